"""The qchunk slot of the GPU path, its device calls replaced by the reference: ids of the unsplit computation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.cuda.indexer import CANDIDATE_FLOATS, ChunkedIndexer
from attention.cuda.step import Step
from attention.geometry import Geometry
from attention.indexer.qchunk import QChunk
from attention.indexer.split import LOGIT_BYTES
from attention.layouts import IndexCache
from tests.attention.cases import Case
from tests.attention.cuda_reference import ReferenceCalls, ascending, exact, plain_ids, quantised, step_of

TOPK = 16
CPU = torch.device("cpu")
LEAST = LOGIT_BYTES * (CANDIDATE_FLOATS * TOPK + 1)


def geometry(case: Case, **changes: object) -> Geometry:
    values: dict[str, object] = {
        "max_model_len": max(1, int(case.batch.seq_lens.max())),
        "max_requests": case.batch.requests,
        "pool_tokens": case.index.slots,
        "topk": TOPK,
        "index_heads": case.q.shape[1],
        "index_dim": 128,
        "dtype": torch.bfloat16,
        "index_kind": "fp8",
        "latent_kind": "fp8_packed",
    }
    return Geometry(**values | changes)  # type: ignore[arg-type]


def ids(slot: ChunkedIndexer, case: Case, step: Step | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    q, weights = quantised(case)
    return ascending(slot.select(step or step_of(case.batch), q, weights, case.index, out))


@settings(deadline=None, max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([1, 15, 16, 17, 64, 65, 100, 130])), min_size=1, max_size=4
    ),
    cap=st.one_of(st.integers(LEAST + 100, LEAST + 1200), st.integers(LEAST + 100, 1 << 16), st.just(1 << 22)),
    rows=st.one_of(st.integers(25, 80), st.integers(25, 700), st.just(1 << 20)),
    strict=st.booleans(),
    allocates=st.booleans(),
    ties=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_ids_are_those_of_the_unsplit_computation(
    requests: list[tuple[int, int]], cap: int, rows: int, strict: bool, allocates: bool, ties: bool, seed: int
) -> None:
    case = exact([(min(n, length), length) for n, length in requests], seed=seed, ties=ties)
    calls = ReferenceCalls(allocates_scores=allocates)
    made = geometry(case, knobs={"indexer_strict_cap": strict})
    slot = ChunkedIndexer(made, calls, CPU, max_logits_bytes=cap, max_rows=rows)
    wanted = plain_ids(case, TOPK)
    assert torch.equal(ids(slot, case), wanted)
    if strict:
        assert calls.largest * LOGIT_BYTES <= cap


def test_long_contexts_in_key_slices() -> None:
    case = exact([(3, 1500), (70, 1000), (1, 700), (5, 5)], ties=True)
    slot = ChunkedIndexer(geometry(case), ReferenceCalls(), CPU, max_logits_bytes=LEAST + 2000)
    assert torch.equal(ids(slot, case), plain_ids(case, TOPK))
    assert slot.counters.key_slices > 70
    few = ChunkedIndexer(geometry(case), ReferenceCalls(), CPU, max_rows=300)
    assert torch.equal(ids(few, case), plain_ids(case, TOPK))
    assert few.counters.gathers > 4


def test_a_step_is_planned_once_and_keys_are_gathered_once_a_group() -> None:
    case = exact([(100, 300), (100, 300), (100, 300)])
    slot = ChunkedIndexer(geometry(case), ReferenceCalls(), CPU, max_logits_bytes=1 << 14, max_rows=10_000)
    step = step_of(case.batch)
    for layer in range(1, 4):
        ids(slot, case, step)
        assert (slot.counters.gathers, slot.counters.gathered_rows) == (3 * layer, 300)
    packed = ChunkedIndexer(geometry(case), ReferenceCalls(), CPU, max_logits_bytes=1 << 22, max_rows=10_000)
    ids(packed, case)
    assert (packed.counters.gathers, packed.counters.chunks) == (1, 1)


def test_short_contexts_are_not_scored_and_single_rows_read_pages() -> None:
    case = exact([(1, 300), (16, 16), (10, 14), (1, 1), (1, 90)])
    calls = ReferenceCalls()
    slot = ChunkedIndexer(geometry(case), calls, CPU)
    assert torch.equal(ids(slot, case), plain_ids(case, TOPK))
    found = slot.counters
    assert (slot.dense_rows, found.paged_rows, found.gathered_rows, found.gathers) == (27, 2, 0, 0)
    assert calls.largest == 300  # one row at a time is what neighbours leave; 16 and more rows in between


def test_padding_rows_are_minus_one_also_in_a_given_buffer() -> None:
    case = exact([(3, 100)])
    slot = ChunkedIndexer(geometry(case), ReferenceCalls(), CPU)
    out = torch.full((7, TOPK), 99, dtype=torch.int32)
    found = ids(slot, case, out=out)
    assert torch.equal(found[:3], plain_ids(case, TOPK)) and (out[3:] == -1).all()
    q, weights = quantised(case)
    wide = torch.cat([q.view(torch.uint8), torch.full((2, 4, 128), 0x7F, dtype=torch.uint8)]).view(q.dtype)
    found = slot.select(step_of(case.batch), wide, torch.cat([weights, weights[:2]]), case.index)
    assert (found[3:] == -1).all() and found.shape == (5, TOPK)


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_are_shared_by_ranks(rank: int) -> None:
    case = exact([(60, 200), (1, 90), (50, 180)])
    wanted = plain_ids(case, TOPK)
    seen: list[list[int]] = []
    at = [slice(0, 60), slice(61, 111)]

    def exchange(rows: torch.Tensor, sizes: list[int]) -> None:
        """The other rank's rows arrive; ours must be right already."""
        piece = wanted[at[len(seen)]]
        seen.append(list(sizes))
        mine = slice(0, sizes[0]) if rank == 0 else slice(sizes[0], sum(sizes))
        assert torch.equal(ascending(rows[mine]), piece[mine])
        rows.copy_(piece)

    made = geometry(case, ranks=2, rank=rank, exchange=exchange, knobs={"indexer_tp_shard_min_rows": 2})
    slot = ChunkedIndexer(made, ReferenceCalls(), CPU, max_logits_bytes=1 << 14)
    out = torch.full((111, TOPK), -9, dtype=torch.int32)
    assert torch.equal(ids(slot, case, out=out), wanted)
    assert [sum(sizes) for sizes in seen] == [60, 50] and all(0 < sizes[0] < sum(sizes) for sizes in seen)
    assert slot.counters.sharded_rows == 110


def test_the_cost_rule_keeps_short_steps_whole() -> None:
    case = exact([(20, 60)])
    made = geometry(case, ranks=2, exchange=lambda rows, sizes: pytest.fail("exchanged"))
    slot = ChunkedIndexer(made, ReferenceCalls(), CPU)
    assert torch.equal(ids(slot, case), plain_ids(case, TOPK))


def test_memory_facts_are_those_of_the_cpu_slot() -> None:
    case = exact([(3, 100), (2, 70)])
    knobs = {"sparse_indexer_max_logits_mb": 1, "sparse_mla_prefill_workspace_factor": 3}
    ours = ChunkedIndexer(geometry(case, knobs=knobs), ReferenceCalls(), CPU).facts()
    theirs = QChunk(geometry(case, knobs=knobs)).facts()
    assert set(ours) == set(theirs)
    assert ours["indexer_workspace_rows"] == theirs["indexer_workspace_rows"] == 200
    assert ours["indexer_workspace_bytes"] == 200 * 132
    assert ours["indexer_logits_bytes"] == 1 << 20


def test_what_does_not_fit_is_named() -> None:
    case = exact([(3, 100)])
    with pytest.raises(ValueError, match=f"--sparse-indexer-max-logits-mb.*{LEAST} are the least"):
        ChunkedIndexer(geometry(case), ReferenceCalls(), CPU, max_logits_bytes=LEAST - 1)
    with pytest.raises(ValueError, match=r"the indexer's workspace needs .* --sparse-mla-prefill-workspace-factor"):
        ChunkedIndexer(geometry(case, free_bytes=1000), ReferenceCalls(), CPU)
    slot = ChunkedIndexer(geometry(case), ReferenceCalls(), CPU)
    q, weights = quantised(case)
    step = step_of(case.batch)
    with pytest.raises(ValueError, match="q: float8_e4m3fn"):
        slot.select(step, case.q, weights, case.index)
    with pytest.raises(ValueError, match="q: float8_e4m3fn"):
        slot.select(step, q[:2], weights[:2], case.index)
    with pytest.raises(ValueError, match="weights"):
        slot.select(step, q, weights[:2], case.index)
    with pytest.raises(ValueError, match="cache: fp8"):
        slot.select(step, q, weights, IndexCache(torch.zeros((64, 128)), "float32"))
    with pytest.raises(ValueError, match="out"):
        slot.select(step, q, weights, case.index, torch.zeros((2, TOPK), dtype=torch.int32))


@pytest.mark.parametrize(
    ("lengths", "rows", "pages", "named"),
    [
        ([5], [1, 1], 1, "seq_lens and query_lens"),
        ([5], [6], 1, "seq_lens: shorter"),
        ([65], [1], 1, "1 pages do not hold 65"),
        ([5, 5], [1, 1], 1, r"int32 \[2, pages\]"),
    ],
)
def test_a_step_that_does_not_fit_together(lengths: list[int], rows: list[int], pages: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Step(lengths, rows, torch.zeros((1, pages), dtype=torch.int32))


def test_runs_of_a_step() -> None:
    step = Step([300, 10, 0, 90, 80, 400], [9, 3, 0, 1, 1, 2], torch.zeros((6, 7), dtype=torch.int32))
    assert step.runs(16) == [("gathered", 0, 1), ("dense", 1, 2), ("single", 3, 5), ("gathered", 5, 6)]
    assert step.runs(16, 85) == [
        ("gathered", 0, 1),
        ("dense", 1, 2),
        ("gathered", 3, 4),
        ("single", 4, 5),
        ("gathered", 5, 6),
    ]
    assert step.seen(0, 2).tolist() == [*range(292, 301), 8, 9, 10]
