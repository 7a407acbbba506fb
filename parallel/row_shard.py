"""Cost-balanced contiguous row ranges of the indexer over tensor-parallel ranks.

A row at position p scores p+1 keys, so equal row counts are unequal work. With the running cost c over the step's
prefill rows, the i-th rank ends where c first reaches i/tp of the total (that row goes to the next rank):

    cost     1 2 3 4 5 6 7 8        tp = 2, total 36, target 18
    c        1 3 6 10 15 21 28 36
    rank     0 0 0 0  0 | 1  1  1   bound = first row with c >= 18

    cost_row = (p+1) // ratio       target_i = floor(i * total / tp)       bound_i = #{rows with c < target_i}
    then each rank gets at least one row: forward  bound_i >= bound_{i-1} + 1,  backward  bound_i <= bound_{i+1} - 1

Every rank gathers the keys of every chunk, scores only its rows, and the int32 ids [rows, k] are exchanged by a
variable all-gather. Source: vLLM 0.33 v1/attention/backends/mla/indexer.py, facts section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from parallel.tables import Ints, ranges

VLLM_MIN_ROWS = 65_536
"""vLLM's default of `indexer_tp_shard_min_rows`: above its default step budgets, so that the shard is off there."""


def row_shard(
    seq_lens: Sequence[int] | Ints,
    query_lens: Sequence[int] | Ints,
    tp_size: int,
    min_rows: int = VLLM_MIN_ROWS,
    compress_ratio: int = 1,
) -> list[int] | None:
    """Prefill rows per rank [tp_size], or None where every rank scores all rows.

    `seq_lens` are context lengths at the end of the step, `query_lens` the new rows (decode rows are left out by the
    caller). None when tp_size is 1, rows < max(min_rows, tp_size), or no row sees a key.
    """
    if tp_size < 1 or compress_ratio < 1:
        raise ValueError(f"tp_size and compress_ratio must be at least 1, got {tp_size} and {compress_ratio}")
    ends = np.asarray(seq_lens, dtype=np.int64)
    lengths = np.asarray(query_lens, dtype=np.int64)
    rows = int(lengths.sum())
    if tp_size == 1 or rows < max(min_rows, tp_size):
        return None
    cost = np.cumsum(ranges(ends - lengths + 1, ends + 1) // compress_ratio)
    total = int(cost[-1])
    if total <= 0:
        return None
    targets = [i * total // tp_size for i in range(1, tp_size)]
    bounds = [0, *np.searchsorted(cost, targets, side="left").tolist(), rows]
    for i in range(1, tp_size):
        bounds[i] = max(bounds[i], bounds[i - 1] + 1)
    for i in range(tp_size - 1, 0, -1):
        bounds[i] = min(bounds[i], bounds[i + 1] - 1)
    return [stop - start for start, stop in pairwise(bounds)]


def rank_window(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """The rank's prefill rows [start, stop)."""
    start = sum(sizes[:rank])
    return start, start + sizes[rank]


def narrow(start: int, stop: int, window: tuple[int, int]) -> tuple[int, int] | None:
    """The part of the rows [start, stop) inside the window, None when there is none."""
    first, last = max(start, window[0]), min(stop, window[1])
    return (first, last) if first < last else None


def exchange_bytes(rows: int, topk: int, sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Bytes per full layer that the rank contributes to and receives from the all-gather of int32 ids [rows, topk]."""
    own = sizes[rank] * topk * 4
    return own, rows * topk * 4 - own


def break_even_rows(
    keys_per_row: float,
    topk: int,
    tp_size: int,
    seconds_per_visit: float,
    bytes_per_second: float,
    latency_seconds: float,
) -> int | None:
    """Least rows for which sharding is faster than scoring everything on every rank; None when it never is.

    saved(rows) = rows * (1 - 1/tp) * (keys_per_row * seconds_per_visit - 4 * topk / bytes_per_second) - latency
    """
    if tp_size <= 1:
        return None
    share = 1 - 1 / tp_size
    gain = share * (keys_per_row * seconds_per_visit - 4 * topk / bytes_per_second)
    if gain <= 0:
        return None
    return max(tp_size, math.floor(latency_seconds / gain) + 1)
