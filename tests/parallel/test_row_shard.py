"""Row shard of the indexer: covers rows once, balances cost, and stays off where it must."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.row_shard import break_even_rows, exchange_bytes, narrow, rank_window, row_shard

batches = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 120)), min_size=1, max_size=5)


@given(batches, st.integers(2, 16), st.sampled_from([1, 4, 128]))
def test_windows_cover_every_row_once(batch: list[tuple[int, int]], tp: int, ratio: int) -> None:
    rows = [new for _, new in batch]
    sizes = row_shard([old + new for old, new in batch], rows, tp, 1, ratio)
    cost = [(old + i + 1) // ratio for old, new in batch for i in range(new)]
    if sum(rows) < tp or not sum(cost):
        assert sizes is None
        return
    assert sizes is not None
    windows = [rank_window(sizes, rank) for rank in range(tp)]
    assert [row for start, stop in windows for row in range(start, stop)] == list(range(sum(rows)))
    assert min(sizes) >= 1


@given(batches, st.integers(2, 16))
def test_each_cost_is_within_one_row_of_the_mean(batch: list[tuple[int, int]], tp: int) -> None:
    rows = [new for _, new in batch]
    sizes = row_shard([old + new for old, new in batch], rows, tp, 1)
    cost = np.array([old + i + 1 for old, new in batch for i in range(new)])
    # Where one row is dearer than a share, the rule of one row a rank shifts the bounds.
    if sizes is None or int(cost.max()) * tp > int(cost.sum()):
        return
    bounds = np.cumsum([0, *sizes])
    shares = np.array([cost[a:b].sum() for a, b in pairwise(bounds)])
    assert np.abs(shares - cost.sum() / tp).max() <= cost.max() + 1


def test_known_shares_of_the_first_and_last_chunk() -> None:
    assert row_shard([16384], [16384], 8, 1) == [5792, 2399, 1841, 1553, 1367, 1236, 1137, 1059]
    late = row_shard([2**20], [16384], 8, 1)
    assert late is not None
    assert (late[0], late[-1]) == (2062, 2034)


def test_off() -> None:
    assert row_shard([100], [100], 1, 1) is None
    assert row_shard([65535], [65535], 2) is None
    assert row_shard([65536], [65536], 2) is not None
    assert row_shard([3, 3], [3, 3], 4, 1, compress_ratio=4) is None
    assert row_shard([], [], 2, 0) is None
    with pytest.raises(ValueError, match="tp_size and compress_ratio"):
        row_shard([1], [1], 0)


def test_narrow() -> None:
    assert narrow(0, 10, (4, 20)) == (4, 10)
    assert narrow(5, 8, (0, 20)) == (5, 8)
    assert narrow(0, 4, (4, 20)) is None


def test_exchange_of_a_full_chunk() -> None:
    own, received = exchange_bytes(16384, 2048, [2048] * 8, 0)
    assert (own, received) == (16_777_216, 117_440_512)


def test_break_even() -> None:
    costs = {"topk": 2048, "seconds_per_visit": 1e-9, "bytes_per_second": 1e10, "latency_seconds": 1e-3}
    least = break_even_rows(keys_per_row=100_000, tp_size=2, **costs)
    assert least is not None

    def saved(rows: int) -> float:
        return rows * 0.5 * (100_000 * 1e-9 - 4 * 2048 / 1e10) - 1e-3

    assert saved(least) > 0 >= saved(least - 1)
    assert break_even_rows(keys_per_row=100, tp_size=2, **costs) is None
    assert break_even_rows(keys_per_row=100_000, tp_size=1, **costs) is None
