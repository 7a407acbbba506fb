"""The TP row shard on real ranks over gloo: each scores its own rows only, and all end with the ids of ragged."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from attention.geometry import Geometry
from attention.indexer import ragged
from attention.indexer.qchunk import Gathered, QChunk
from attention.scratch import Scratch
from parallel.collectives import all_gather_rows, first_ranks
from parallel.row_shard import rank_window
from tests.attention.cases import make
from tests.attention.ranks import run

TOPK = 16
# (query rows, context) of each request, cap of the logits in bytes, kind of cache, --indexer-tp-shard-min-rows
CASES: tuple[tuple[list[tuple[int, int]], int, str, int | None], ...] = (
    ([(200, 700)], 1 << 20, "float32", 2),
    ([(1, 300), (90, 500), (40, 40), (16, 16), (33, 900), (1, 20)], 1 << 14, "fp8", 2),
    ([(60, 400), (1, 300), (60, 300)], 1 << 20, "bfloat16", 2),
    ([(64, 200)], 1 << 20, "float32", 65),
    ([(4000, 4000)], 1 << 20, "float32", None),
)

# Runs of requests whose rows are shared: none below the least, all of the long prompt by the cost rule.
RUNS = (1, 2, 2, 0, 1)


def _sharded(rank: int, ranks: int, number: int) -> dict[str, Any]:
    requests, cap, kind, least = CASES[number]
    case = make(requests, kind, seed=number)
    want = ragged.select(case.batch, case.q, case.head_weights, case.index, TOPK, Scratch(1 << 22))
    geometry = Geometry(
        max_model_len=4096,
        max_requests=8,
        pool_tokens=case.index.slots,
        topk=TOPK,
        index_heads=4,
        index_dim=128,
        dtype=torch.float32,
        index_kind=kind,
        latent_kind=case.latent.kind,
        knobs={"indexer_tp_shard_min_rows": least},
        ranks=ranks,
        rank=rank,
        exchange=partial(all_gather_rows, group=dist.group.WORLD),
    )
    slot = QChunk(geometry, max_logits_bytes=cap)
    windows = []
    for piece in slot._planned(case.batch).pieces:
        if isinstance(piece, Gathered) and piece.sizes is not None:
            first, stop = rank_window(piece.sizes, rank)
            own = torch.zeros(piece.stop - piece.first, dtype=torch.bool)
            own[first:stop] = True
            case.q[piece.first : piece.stop][~own] = float("nan")  # whoever scores it, it is not this rank
            windows.append((piece.sizes, first, stop))
    found = slot.select(case.batch, case.q, case.head_weights, case.index, TOPK, Scratch(1 << 20))
    return {"equal": torch.equal(found, want), "windows": windows, "rows": slot.counters.sharded_rows}


def _gathered(rank: int) -> list[Any]:
    kept = []
    for sizes in ([3, 1], [0, 4], [4, 0]):
        rows = torch.full((4, 5), -1, dtype=torch.int32)
        first, stop = rank_window(sizes, rank)
        rows[first:stop] = torch.arange(first, stop, dtype=torch.int32).unsqueeze(1)
        all_gather_rows(rows, sizes, dist.group.WORLD)
        kept.append(rows[:, 0].tolist())
    for bad in ([3], [2, 1], [5, -1]):
        with pytest.raises(ValueError, match="sizes: "):
            all_gather_rows(torch.zeros((4, 5)), bad, dist.group.WORLD)
    with pytest.raises(ValueError, match="rows: a contiguous"):
        all_gather_rows(torch.zeros((5, 4)).T, [2, 2], dist.group.WORLD)
    return [*kept, first_ranks(rank + 0.1, dist.group.WORLD)]


def _everything(rank: int, ranks: int) -> tuple[list[dict[str, Any]], list[Any]]:
    cases = [_sharded(rank, ranks, number) for number in range(len(CASES))]
    return cases, _gathered(rank) if ranks == 2 else []


@pytest.fixture(scope="module", params=[2, 3])
def results(request: pytest.FixtureRequest) -> list[tuple[list[dict[str, Any]], list[Any]]]:
    """What each rank found; the processes start once for all cases."""
    return run(request.param, _everything)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_ids_are_those_of_ragged(results: list[tuple[list[dict[str, Any]], list[Any]]], number: int) -> None:
    ranks, mine = len(results), [cases[number] for cases, _ in results]
    assert all(result["equal"] for result in mine)
    runs = RUNS[number]
    for result in mine:
        assert len(result["windows"]) == runs
        assert result["rows"] == sum(sum(sizes) for sizes, _, _ in result["windows"])
        assert (result["rows"] > 0) == (runs > 0)
    for k in range(runs):
        parts = [result["windows"][k] for result in mine]
        assert [(first, stop) for _, first, stop in parts] == [rank_window(parts[0][0], r) for r in range(ranks)]


@pytest.mark.slow
def test_variable_all_gather(results: list[tuple[list[dict[str, Any]], list[Any]]]) -> None:
    if len(results) != 2:
        pytest.skip("written for two ranks")
    assert [gathered for _, gathered in results] == [[[0, 1, 2, 3]] * 3 + [0.1]] * 2
