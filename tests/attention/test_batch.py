"""The plan of a forward pass and the scratch."""

from __future__ import annotations

import pytest
import torch

from attention.batch import AttentionBatch
from attention.scratch import Scratch, ScratchTooSmall


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_rows_positions_and_slots() -> None:
    batch = AttentionBatch(ints(0, 2, 2, 3), ints(70, 5, 1), torch.tensor([[9, 4], [1, 0], [3, 0]], dtype=torch.int32))
    assert (batch.requests, batch.rows) == (3, 3)
    assert batch.row_requests().tolist() == [0, 0, 2]
    assert batch.row_positions().tolist() == [68, 69, 0]
    slots = batch.context_slots(0)
    assert slots[[0, 63, 64, 69]].tolist() == [9 * 64, 9 * 64 + 63, 4 * 64, 4 * 64 + 5]


@pytest.mark.parametrize(
    ("start", "lens", "pages", "named"),
    [
        (ints(0, 2), ints(1), 1, "seq_lens"),
        (ints(0, 2, 1), ints(4, 4), 1, "query_start"),
        (ints(1, 2), ints(4), 1, "query_start"),
        (ints(0, 2, 3), ints(4), 1, "query_start"),
        (ints(0, 2), ints(65), 1, "page_table"),
        (ints(0, 2).long(), ints(4), 1, "query_start"),
    ],
)
def test_bad_plans_are_named(start: torch.Tensor, lens: torch.Tensor, pages: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AttentionBatch(start, lens, torch.zeros((lens.shape[0], pages), dtype=torch.int32))


@pytest.mark.parametrize(("first", "stop"), [(0, 7), (0, 0), (2, 2), (1, 3), (3, 7), (2, 6), (6, 7)])
def test_a_part_has_the_same_rows(first: int, stop: int) -> None:
    table = torch.arange(8, dtype=torch.int32).view(4, 2)
    batch = AttentionBatch(ints(0, 3, 3, 6, 7), ints(70, 5, 3, 128), table)
    part = batch.part(first, stop)
    assert part.rows == stop - first
    assert torch.equal(part.row_positions(), batch.row_positions()[first:stop])
    owners = batch.row_requests()[first:stop]
    assert torch.equal(part.page_table[part.row_requests()], batch.page_table[owners])
    assert (part.query_start.diff() > 0).all()
    with pytest.raises(ValueError, match="rows"):
        batch.part(first, 8)


def test_scratch_counts_and_refuses() -> None:
    scratch = Scratch(1 << 16)
    first = scratch.take((10, 10), torch.float32)
    second = scratch.take((3,), torch.uint8)
    assert first.data_ptr() % 64 == second.data_ptr() % 64 == 0
    assert second.data_ptr() >= first.data_ptr() + 400
    with pytest.raises(ScratchTooSmall, match="scores"):
        scratch.take((1 << 16,), torch.uint8, "scores")
    scratch.clear()
    assert scratch.take((1 << 16,), torch.uint8).shape == (1 << 16,) and scratch.peak == 1 << 16
    with pytest.raises(ValueError, match="4096"):
        Scratch(100)
