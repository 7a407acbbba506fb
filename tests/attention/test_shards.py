"""A latent cache shared by real ranks on gloo: rows, attention, the workspace, counters, the start-up check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from attention import paged, shard_check
from attention.batch import AttentionBatch, Part
from attention.geometry import Geometry
from attention.indexer import ragged
from attention.layouts import LatentCache
from attention.scratch import Scratch
from attention.shards import ShardedCache, Shards
from attention.sizes import PAGE_SIZE
from attention.workspace_slot import Workspace
from parallel.collectives import sub_group
from parallel.dcp import local_index, owner, page_tokens
from parallel.dcp_merge import context_bytes, partial_bytes, query_bytes
from parallel.head_tail import head_tail
from parallel.local import local_batch
from tests.attention import ranks
from tests.attention.cases import Case, make

TOPK = 64
SCALE = 0.05
HEADS = 3  # of each rank
LENGTHS = [*range(1, 41), 63, 64, 65, 100, 128, 205, 500, 1500]
KINDS = [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("fp8", torch.bfloat16)]


def paged_in(case: Case, size: int, interleave: int) -> Case:
    """`case` with its contexts laid out in the pages of the launch, whole rounds of runs, in a shuffled order."""
    step = page_tokens(size, interleave) // PAGE_SIZE
    lengths = case.batch.seq_lens.tolist()
    needed = [-(-length // (step * PAGE_SIZE)) for length in lengths]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)) + 1
    table = torch.zeros((len(lengths), max(needed) * step), dtype=torch.int32)
    buffer = torch.zeros(((sum(needed) + 1) * step * PAGE_SIZE, case.latent.buffer.shape[1])).to(
        case.latent.buffer.dtype
    )
    at = 0
    for r, count in enumerate(needed):
        table[r, : count * step] = (order[at : at + count, None] * step + torch.arange(step)).flatten().to(torch.int32)
        at += count
    batch = AttentionBatch(case.batch.query_start, case.batch.seq_lens, table)
    for r in range(batch.requests):
        buffer[batch.context_slots(r)] = case.latent.buffer[case.batch.context_slots(r)]
    return replace(case, batch=batch, latent=LatentCache(buffer, case.latent.kind))


def made(rank: int, size: int, interleave: int, group: Any, requests: list[tuple[int, int]], kind: Any) -> Any:
    """(shards, whole case, share, this rank's heads, ids): the same case on every rank."""
    whole = paged_in(make(requests, *kind, heads=size * HEADS), size, interleave)
    ids = chosen(make(requests, *kind, heads=size * HEADS))
    shards = Shards(size, rank, interleave, group)
    which, rows = shards.owned(torch.arange(whole.latent.slots))
    share = torch.empty_like(whole.latent.buffer[: whole.latent.slots // size])
    share[rows] = whole.latent.buffer[which]
    own = slice(rank * HEADS, (rank + 1) * HEADS)
    return shards, whole, ShardedCache(share, whole.latent.kind, shards=shards), own, ids


def chosen(case: Case) -> torch.Tensor:
    return ragged.select(case.batch, case.q, case.head_weights, case.index, TOPK, Scratch(1 << 20))


def _paged(rank: int, size: int, interleave: int, kind: Any) -> float:
    requests = [(min(n, 1 + n % 5), n) for n in LENGTHS]
    _, whole, share, own, ids = made(rank, size, interleave, dist.group.WORLD, requests, kind)
    q = whole.q_nope[:, own], whole.q_rope[:, own]
    want = paged.attend(whole.batch, *q, whole.latent, ids, SCALE, Scratch(1 << 20), return_lse=True)
    got = paged.attend(whole.batch, *q, share, ids, SCALE, Scratch(1 << 20), return_lse=True)
    return max(float((a.float() - b.float()).abs().max()) for a, b in zip(got, want, strict=True))


def _workspace(rank: int, size: int, interleave: int, kind: Any, max_rows: int) -> dict[str, Any]:
    requests = [(10, 200), (12, 100), (1, 300), (3, 300), (1, 7), (20, 40), (5, 513)]
    shards, whole, share, own, ids = made(rank, size, interleave, dist.group.WORLD, requests, kind)
    geometry = Geometry(
        max_model_len=600,
        max_requests=8,
        pool_tokens=whole.latent.slots,
        topk=TOPK,
        index_heads=4,
        index_dim=128,
        dtype=whole.q_nope.dtype,
        index_kind=whole.index.kind,
        latent_kind=whole.latent.kind,
    )
    q = whole.q_nope[:, own].contiguous(), whole.q_rope[:, own].contiguous()
    alone = Workspace(geometry, max_rows=max_rows)
    shared = Workspace(replace(geometry, shards=shards), max_rows=max_rows)
    shared.buffer.fill_(float("nan"))
    want = alone.attend(whole.batch, *q, whole.latent, ids, SCALE, Scratch(1 << 20))
    got = shared.attend(whole.batch, *q, share, ids, SCALE, Scratch(1 << 20))
    gathered = torch.tensor([r in (0, 1, 3, 6) for r in whole.batch.row_requests().tolist()])
    moved = shared.shards.moved if shared.shards is not None else None
    return {
        "bits": torch.equal(got[gathered], want[gathered]),
        "apart": float((got.float() - want.float()).abs().max()),
        "moved": moved,
        "rows": shared.counters.workspace_rows,
        "merged": int((~gathered).sum()),
        "bytes": shared.facts()["prefill_workspace_bytes"],
    }


Found = dict[tuple[int, str], dict[str, Any]]


def _all(rank: int, size: int, runs: tuple[int, ...]) -> Found:
    """Every run length and kind in one start of the ranks."""
    found = {}
    for run in runs:
        for kind in KINDS:
            found[run, kind[0]] = {"paged": _paged(rank, size, run, kind)} | _workspace(rank, size, run, kind, 768)
    return found


@pytest.fixture(scope="module", params=[(2, (1, 4, 64)), (3, (4,))], ids=["2 ranks", "3 ranks"])
def found(request: pytest.FixtureRequest) -> tuple[int, list[Found]]:
    """(ranks, what each of them found)."""
    size, runs = request.param
    return size, ranks.run(size, _all, runs)


def each(found: list[Found]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"interleave {run}, {kind}", facts) for rank in found for (run, kind), facts in rank.items()]


def test_paged_attention_is_that_over_one_cache(found: tuple[int, list[Found]]) -> None:
    """Every length of 1 to 40 and beyond topk, several rows each, three kinds of cache."""
    for case, facts in each(found[1]):
        assert facts["paged"] < (1e-5 if "float32" in case else 3e-2), case


def test_the_workspace_has_the_bits_of_one_cache(found: tuple[int, list[Found]]) -> None:
    """Gathered rows are read in the order of the ids, so nothing is rounded differently; decodes are merged."""
    for case, facts in each(found[1]):
        assert facts["bits"], case
        assert facts["apart"] < (1e-5 if "float32" in case else 3e-2), case


def test_bytes_received_are_those_of_the_formula(found: tuple[int, list[Found]]) -> None:
    size = found[0]
    for case, facts in each(found[1]):
        moved, merged, width = facts["moved"], facts["merged"], 4 if "float32" in case else 2
        assert moved.merged_rows == merged
        assert moved.query_bytes == query_bytes(size, merged, HEADS, width)
        assert moved.partial_bytes == partial_bytes(size, merged, HEADS, width)
        assert moved.context_bytes == context_bytes(size, facts["rows"] // size, width)
        # The workspace of 768 rows and a rank's own share of it.
        assert facts["bytes"] == (768 + 768 // size) * 576 * width


def _cut(rank: int, size: int) -> tuple[bool, int]:
    """One exchange a row against one for all rows."""
    shards, whole, share, own, ids = made(rank, size, 1, dist.group.WORLD, [(9, 300), (1, 40)], KINDS[0])
    q = whole.q_nope[:, own], whole.q_rope[:, own]
    at_once = shards.attend(whole.batch, *q, share, ids, SCALE, Scratch(1 << 20))

    class OneRow(Shards):
        def rows_at_once(self, heads: int, itemsize: int) -> int:
            return 1

    single = OneRow(size, rank, 1, dist.group.WORLD)  # type: ignore[arg-type]
    row_by_row = single.attend(whole.batch, *q, share, ids, SCALE, Scratch(1 << 20))
    same = all(torch.equal(a, b) for a, b in zip(at_once, row_by_row, strict=True))
    ids[-1, -1] = 40
    with pytest.raises(ValueError, match="topk_ids: row 9 has an id outside its context"):
        shards.attend(whole.batch, *q, share, ids, SCALE, Scratch(1 << 20))
    return same, shards.rows_at_once(8, 2)


def _each_once(rank: int, size: int) -> dict[str, Any]:
    """What is tried with one kind of cache only, in one start of the ranks."""
    return {"cut": _cut(rank, size), "prefill": _prefill_ranks(rank, size), "check": _check(rank, size)}


@pytest.fixture(scope="module")
def once() -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return ranks.run(2, _each_once)


def test_rows_are_exchanged_in_cuts_without_a_trace_and_ids_checked(once: list[dict[str, Any]]) -> None:
    for same, rows in (found["cut"] for found in once):
        assert same
        assert rows == (16 << 20) // (2 * 8 * 576 * 2)


def _prefill_ranks(rank: int, size: int) -> dict[str, Any]:
    """Ranks with the same heads: decodes that all of them run, and a step whose rows they have dealt out."""
    requests = [(10, 200), (1, 77), (4, 4), (3, 300), (1, 7)]
    _, whole, share, _, ids = made(rank, size, 4, dist.group.WORLD, requests, KINDS[0])
    shards = Shards(size, rank, 4, dist.group.WORLD, same_heads=True)  # type: ignore[arg-type]
    share = replace(share, shards=shards)
    q = whole.q_nope, whole.q_rope
    want = paged.attend(whole.batch, *q, whole.latent, ids, SCALE, Scratch(1 << 20))
    merged = paged.attend(whole.batch, *q, share, ids, SCALE, Scratch(1 << 20))
    moved = (shards.moved.query_bytes, shards.moved.partial_bytes)
    geometry = Geometry(400, 8, whole.latent.slots, TOPK, 4, 128, torch.float32, "float32", "float32", shards=shards)
    slot = Workspace(geometry, max_rows=448)
    slot.buffer.fill_(float("nan"))
    query_lens, ends = np.array([n for n, _ in requests]), np.array([length for _, length in requests])
    layout = head_tail(query_lens, ends - query_lens, query_lens > 1, size, size)
    nowhere = np.zeros(len(requests), dtype=np.bool_)
    steps = [(list(range(rank, whole.batch.rows, size)), nowhere)]
    steps += [(list(range(whole.batch.rows if rank else 0)), nowhere), (layout.rows(rank).tolist(), layout.replicated)]
    bits, rows, near = [], [], 0.0
    for held, everywhere in steps:
        part = local_batch(held, whole.batch.query_start.tolist(), whole.batch.seq_lens.tolist())
        start, seen = (torch.from_numpy(value).to(torch.int32) for value in (part.query_start, part.seq_lens))
        of = Part(whole.batch, torch.from_numpy(part.request), torch.from_numpy(everywhere))
        local = AttentionBatch(start, seen, whole.batch.page_table[of.requests], of=of)
        mine = torch.tensor(held, dtype=torch.int64)
        cut = ~of.everywhere[whole.batch.row_requests()[mine]]
        got = slot.attend(local, q[0][mine], q[1][mine], share, ids[mine], SCALE, Scratch(1 << 20))
        bits.append(torch.equal(got[cut], want[mine][cut]))
        near = max(near, float((got - want[mine]).abs().max()) if held else 0.0)
        rows.append(slot.counters.workspace_rows)
    with pytest.raises(ValueError, match="rows of one prefill rank cannot be merged"):
        paged.attend(local, q[0][mine], q[1][mine], share, ids[mine], SCALE, Scratch(1 << 20))
    apart = float((merged - want).abs().max())
    heads, of_all = q[0].shape[1], whole.batch.rows
    return {"apart": max(apart, near), "moved": moved, "bits": bits, "rows": rows, "heads": heads, "of": of_all}


def test_prefill_ranks_merge_what_all_run_and_gather_for_what_each_has(once: list[dict[str, Any]]) -> None:
    """The bits of one cache, in as many gathers on a rank without rows as on the others."""
    for found in (rank["prefill"] for rank in once):
        assert found["apart"] < 1e-5
        assert found["moved"] == (0, partial_bytes(2, found["of"], found["heads"], 4))
        assert found["bits"] == [True, True, True]
        # Contexts of 200, 77, 4, 300 and 7 tokens in rounds of 8, once a step. In the last step every rank runs the two
        # decodes, and the prefill of 3 rows, which has no four segments.
        assert found["rows"] == [600, 1200, 1200 + 208]


class Misplaced(Shards):
    """Writes where another rank's rows are read: the mistake that answers at random, beyond a page."""

    def owned(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = slots.numpy()
        mine = (owner(given + (given >= 128), self.size, self.interleave) == self.rank).nonzero()[0]
        rows = local_index(given[mine], self.size, self.interleave)
        return torch.from_numpy(mine), torch.from_numpy(rows)


def _check(rank: int, size: int) -> dict[str, str]:
    """What the check says, by what is wrong."""
    group: Any = dist.group.WORLD

    def said(shards: Shards, kind: Any = KINDS[0]) -> str:
        try:
            shard_check.run(shards, "fp8_packed" if kind[0] == "fp8" else kind[0], kind[1])
        except shard_check.ShardCheckError as error:
            return str(error)
        return ""

    well = {kind[0]: said(Shards(size, rank, 64, group), kind) for kind in KINDS}
    return well | {
        "place": said(Misplaced(size, rank, 1, group)),
        "interleave": said(Shards(size, rank, 4 if rank else 1, group)),
        "rank": said(Shards(size, size - 1 - rank, 1, group)),
    }


def test_the_check_passes_where_all_is_well_and_else_fails_loudly(once: list[dict[str, Any]]) -> None:
    for said in (found["check"] for found in once):
        assert [said[kind[0]] for kind in KINDS] == ["", "", ""]
        assert said["place"].startswith("decode context parallel: ") and "in a context of" in said["place"]
        for fault in ("interleave", "rank"):
            assert said[fault].startswith("decode context parallel: the ranks were told different things"), fault


def _parts(rank: int, size: int) -> tuple[list[int], str]:
    world = dist.group.WORLD
    with pytest.raises(ValueError, match="size: 3 does not divide the group of 4 ranks") as error:
        sub_group(world, 3)  # type: ignore[arg-type]
    assert dist.get_process_group_ranks(sub_group(world, 4)) == [0, 1, 2, 3]  # type: ignore[arg-type]
    return dist.get_process_group_ranks(sub_group(world, 2)), str(error.value)  # type: ignore[arg-type]


def test_neighbours_form_a_group() -> None:
    assert [part for part, _ in ranks.run(4, _parts)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
