"""Remapped ids address the row that holds the very position, checked through the buffers themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.topk_remap import ROWS_AT_ONCE, PagedRows, Placement, WorkspaceRows, remap
from parallel.dcp import local_index, local_lengths, owner

BLOCK = 4


def paged_cache(lengths: list[int], placement: Placement, stride: int) -> tuple[PagedRows, np.ndarray]:
    """A block table in shuffled order and the cache of one rank: row -> 1000 * request + position."""
    width = max(-(-max(lengths) // BLOCK), 1)
    blocks = np.random.default_rng(1).permutation(len(lengths) * width).reshape(len(lengths), width)
    cache = np.full(blocks.size * stride, -5)
    for request, length in enumerate(lengths):
        positions = np.arange(length)
        mine = positions[owner(positions, placement.size, placement.interleave) == placement.rank]
        local = local_index(mine, placement.size, placement.interleave)
        cache[blocks[request, local // BLOCK] * stride + local % BLOCK] = 1000 * request + mine
    return PagedRows(blocks.astype(np.int32), BLOCK, stride), cache


def gathered_workspace(lengths: list[int], placement: Placement) -> tuple[WorkspaceRows, np.ndarray]:
    """Rank-major workspace of the requests: row -> 1000 * request + position."""
    shards = local_lengths(lengths, placement.size, 0, placement.interleave)
    starts = np.cumsum(shards) - shards
    stride = int(shards.sum())
    buffer = np.full(stride * placement.size, -5)
    for request, length in enumerate(lengths):
        p = np.arange(length)
        held = owner(p, placement.size, placement.interleave) * stride
        buffer[held + starts[request] + local_index(p, placement.size, placement.interleave)] = 1000 * request + p
    return WorkspaceRows(starts.astype(np.int32), stride), buffer


@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (2, 1), (2, 4), (4, 2)]),
    st.integers(0, 6),
    st.booleans(),
)
def test_ids_reach_their_row(
    data: st.DataObject, lengths: list[int], shape: tuple[int, int], rows: int, compact: bool
) -> None:
    world, run = shape
    placement = Placement(world, data.draw(st.integers(0, world - 1)), run)
    paged, cache = paged_cache(lengths, placement, stride=BLOCK + 3)
    workspace, buffer = gathered_workspace(lengths, placement)
    request = np.array(data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=rows, max_size=rows)), dtype=int)
    prefill = np.where(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), request, -1).astype(int)
    topk = np.array(
        [data.draw(st.lists(st.integers(-1, lengths[r] - 1), min_size=5, max_size=5)) for r in request]
    ).reshape(rows, 5)

    out, counts = remap(topk.astype(np.int32), request, prefill, paged, workspace, placement, compact)
    for i in range(rows):
        kept = [p for p in topk[i].tolist() if p >= 0 and (prefill[i] >= 0 or p // run % world == placement.rank)]
        assert counts[i] == len(kept)
        source = buffer if prefill[i] >= 0 else cache
        valid = out[i][out[i] >= 0]
        assert source[valid].tolist() == [1000 * request[i] + p for p in kept]
        if compact:
            assert (out[i][: len(kept)] >= 0).all() and (out[i][len(kept) :] == -1).all()
        elif prefill[i] >= 0 or world == 1:
            assert np.array_equal(out[i] >= 0, topk[i] >= 0)


def test_ids_past_the_block_table_are_dropped() -> None:
    paged = PagedRows(np.array([[3, 1]], dtype=np.int32), 4, 4)
    topk = np.array([[7, 8, -1]], dtype=np.int32)
    one = np.zeros(1, dtype=np.int32)
    workspace = WorkspaceRows(np.array([100], dtype=np.int32))
    assert remap(topk, one, None, paged, workspace)[0].tolist() == [[7, -1, -1]]
    assert remap(topk, one, one, paged, workspace)[0].tolist() == [[107, -1, -1]]


def test_more_rows_than_one_pass() -> None:
    rows = 2 * ROWS_AT_ONCE + 3
    paged = PagedRows(np.zeros((1, 1), dtype=np.int32), rows, rows)
    topk = np.arange(rows, dtype=np.int32)[:, None]
    out, counts = remap(topk, np.zeros(rows, dtype=np.int32), None, paged, WorkspaceRows(np.zeros(0, dtype=np.int32)))
    assert np.array_equal(out, topk)
    assert counts.tolist() == [1] * rows


def test_row_counts_that_differ_are_refused() -> None:
    paged = PagedRows(np.zeros((1, 1), dtype=np.int32), 4, 4)
    topk = np.zeros((2, 3), dtype=np.int32)
    with pytest.raises(ValueError, match="differ in rows: 2, 1, 2"):
        remap(topk, np.zeros(1, dtype=np.int32), None, paged, WorkspaceRows(np.zeros(0, dtype=np.int32)))
