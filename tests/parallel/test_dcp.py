"""Decode context parallel: where a token lies, and the chunk plan of the gathered shards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.dcp import (
    check_sharding,
    gather_rank_bytes,
    global_chunk_plan,
    global_position,
    local_index,
    local_lengths,
    local_slots,
    owner,
    rank_major_rows,
    request_extents,
    token_lengths,
)

worlds = st.integers(1, 8)
runs = st.sampled_from([1, 2, 3, 4, 64])


@given(st.lists(st.integers(0, 900), max_size=6), worlds, runs)
def test_local_lengths_count_the_owned_positions(seq_lens: list[int], world: int, run: int) -> None:
    for rank in range(world):
        plain = [sum(p // run % world == rank for p in range(n)) for n in seq_lens]
        assert local_lengths(seq_lens, world, rank, run).tolist() == plain


@given(st.integers(1, 500), worlds, runs)
def test_local_index_is_dense_and_inverse(length: int, world: int, run: int) -> None:
    positions = np.arange(length)
    holder, local = owner(positions, world, run), local_index(positions, world, run)
    for rank in range(world):
        mine = positions[holder == rank]
        assert local[holder == rank].tolist() == list(range(len(mine)))
        assert np.array_equal(global_position(np.arange(len(mine)), rank, world, run), mine)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=5))
def test_token_lengths(batch: list[tuple[int, int]]) -> None:
    ends, rows = [old + new for old, new in batch], [new for _, new in batch]
    assert token_lengths(ends, rows).tolist() == [old + i + 1 for old, new in batch for i in range(new)]


def test_lengths_are_expanded_before_they_are_localised() -> None:
    # Two draft tokens end at length 4; the row of length 3 has two keys on rank 0 of 2, not local(4) - 1 = 1.
    assert local_lengths(token_lengths([4], [2]), 2, 0).tolist() == [2, 2]
    assert local_lengths(token_lengths([4], [2]), 2, 1).tolist() == [1, 2]


def test_slots_of_other_ranks_are_padded() -> None:
    assert local_slots(np.arange(5), np.arange(5) + 10, 2, 1).tolist() == [-1, 11, -1, 13, -1]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=5),
    worlds,
    st.sampled_from([1, 2, 4]),
)
def test_deinterleave_brings_a_request_back(batch: list[tuple[int, int]], world: int, run: int) -> None:
    """Shards of whole requests are laid out per rank, gathered, and put in position order."""
    lengths = [n for _, n in batch]
    request = [i for i, (rows, _) in enumerate(batch) for _ in range(rows)]
    shard = [int(local_lengths([lengths[i]], world, 0, run)[0]) for i in range(len(batch))]
    plan = global_chunk_plan(request, [shard[i] for i in request], world, run)

    gathered = np.full(plan.total, -1)
    region = np.cumsum(shard) - shard
    for i, length in enumerate(lengths):
        positions = np.arange(length)
        at = rank_major_rows(positions, np.full(length, region[i]), plan.padded_local_total, world, run)
        gathered[at] = 1000 * i + positions
    ordered = gathered[plan.deinterleave_idx]
    for i, length in enumerate(lengths):
        start = int(plan.row_start_cu[request.index(i)])
        assert ordered[start : start + length].tolist() == [1000 * i + p for p in range(length)]
    assert plan.row_bounds.tolist() == [*[request.index(i) for i in range(len(batch))], len(request)]
    assert (plan.padded_local_total, plan.total) == (sum(shard), sum(shard) * world)
    assert np.array_equal(plan.global_cu, plan.padded_local_cu * world)


def test_no_rows() -> None:
    plan = global_chunk_plan([], [], 2)
    assert (plan.total, plan.row_bounds.tolist(), plan.row_start_cu.tolist()) == (0, [0], [0])
    context, rows = request_extents([], [], [], 2)
    assert len(context) == len(rows) == 0


def test_request_extents_are_the_same_for_every_rank() -> None:
    context, rows = request_extents([0, 0, 1], [5, 7, 3], [10, 10, 4], 2)
    assert (context.tolist(), rows.tolist()) == ([20, 8], [14, 3])


def test_gather_bytes_of_a_million_tokens_over_four_ranks() -> None:
    assert gather_rank_bytes(2**20 // 4) == 301_989_888


def test_bad_input_names_the_flag() -> None:
    with pytest.raises(ValueError, match="--decode-context-parallel-size"):
        check_sharding(0, 1)
    with pytest.raises(ValueError, match="--cp-kv-cache-interleave-size must be at least 1"):
        check_sharding(2, 0)
    with pytest.raises(ValueError, match="--cp-kv-cache-interleave-size 48 must divide the page size 64"):
        check_sharding(2, 48, 64)
    with pytest.raises(ValueError, match="differ in length"):
        global_chunk_plan([0], [1, 2], 2)
    with pytest.raises(ValueError, match="differs between rows"):
        global_chunk_plan([0, 0], [1, 2], 2)
