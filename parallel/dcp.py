"""Decode context parallel: KV of a request is dealt over W ranks in runs of `interleave` tokens.

    W = 2, interleave = 2
    position   0 1   2 3   4 5   6 7   8          owner(p) = (p // il) mod W
    rank 0     0 1         2 3         4          local(p) = p // (W*il) * il + p mod il
    rank 1           0 1         2 3

    length on a rank = base*il + clip(len - base*W*il - rank*il, 0, il),   base = len // (W*il)

For PCP + DCP prefill the shards are gathered: each rank lays its shards of all requests one after another, every shard
padded to rank 0's (the longest), and the all-gather puts the ranks' buffers one after another ("rank-major"):

    gathered   | rank 0: req A, req B | rank 1: req A, req B |      row of p = owner*rank_stride + start[req] + local

Source: vLLM 0.33 v1/attention/backends/utils.py and v1/attention/ops/pcp.py, facts section 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel.tables import Bools, Ints

Signed = NDArray[np.signedinteger[Any]]
"""int32 or int64 positions: the arithmetic keeps the width it is given."""

LATENT_ROW_BYTES = 1152
"""One gathered KV row: 512 + 64 bf16 values."""


def check_sharding(dcp_size: int, interleave: int, block_size: int | None = None) -> None:
    """Raises ValueError for sizes below 1, or a cache page that would be cut in the middle of a run."""
    if dcp_size < 1:
        raise ValueError(f"--decode-context-parallel-size must be at least 1, got {dcp_size}")
    if interleave < 1:
        raise ValueError(f"--cp-kv-cache-interleave-size must be at least 1, got {interleave}")
    if block_size is not None and block_size % interleave:
        raise ValueError(f"--cp-kv-cache-interleave-size {interleave} must divide the page size {block_size}")


def page_tokens(dcp_size: int, interleave: int = 1, block_size: int = 64) -> int:
    """Tokens of a page that every rank holds an equal, whole share of: the least multiple of `block_size` and W*il.

    With such pages a slot of the paged cache is dealt as its position is: `owner` and `local_index` of the slot.
    """
    return math.lcm(block_size, dcp_size * interleave)


def owner(positions: Signed, dcp_size: int, interleave: int = 1) -> Signed:
    """Rank that holds each position."""
    return positions // interleave % dcp_size


def local_index(positions: Signed, dcp_size: int, interleave: int = 1) -> Signed:
    """Index of each position within its owner's shard."""
    if interleave == 1:
        return positions // dcp_size
    return positions // (dcp_size * interleave) * interleave + positions % interleave


def global_position(local: Ints, rank: int, dcp_size: int, interleave: int = 1) -> Ints:
    """Position of each local index of the rank's shard: the inverse of (owner, local_index)."""
    return (local // interleave * dcp_size + rank) * interleave + local % interleave


def local_lengths(seq_lens: Sequence[int] | Ints, dcp_size: int, rank: int, interleave: int = 1) -> Ints:
    """Tokens of each sequence that the rank holds, int64 of the shape of `seq_lens`.

    NOTE: decode rows have one length per token. Expand the lengths per token first, then localise (`token_lengths`);
    a localised request length minus the token's distance from the end is a different, wrong number.
    """
    lengths = np.asarray(seq_lens, dtype=np.int64)
    base = lengths // (dcp_size * interleave) * interleave
    return base + np.clip(lengths - base * dcp_size - rank * interleave, 0, interleave)


def token_lengths(seq_lens: Sequence[int] | Ints, query_lens: Sequence[int] | Ints) -> Ints:
    """Keys that each new token sees (its position + 1), int64 [sum of query_lens]; the input of `local_lengths`."""
    ends = np.asarray(seq_lens, dtype=np.int64)
    lengths = np.asarray(query_lens, dtype=np.int64)
    stops = np.cumsum(lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(ends + 1 - stops, lengths)


def local_slots(
    positions: Ints, slots: Ints, dcp_size: int, rank: int, interleave: int = 1, pad_slot: int = -1
) -> Ints:
    """KV slots [n] of the tokens at `positions` [n] for this rank's cache write: `pad_slot` where another rank owns."""
    kept: Bools = owner(positions, dcp_size, interleave) == rank
    return np.where(kept, slots, pad_slot)


def rank_major_rows(positions: Signed, starts: Signed, rank_stride: int, dcp_size: int, interleave: int = 1) -> Signed:
    """Rows of `positions` in the rank-major gathered buffer; `starts` is where each one's request begins on a rank."""
    local = local_index(positions, dcp_size, interleave)
    return owner(positions, dcp_size, interleave) * rank_stride + starts + local


@dataclass(frozen=True, slots=True)
class GlobalChunkPlan:
    """One PCP + DCP prefill chunk: R batch rows (segments) of Q requests, Q regions of the gathered buffer.

    A region holds one request: shard rows on each rank (rank 0's count, the largest), shard * W rows in all.

    row_bounds       [Q+1]   batch rows of each region
    row_start_cu     [R+1]   first global row of each batch row's region, then the total
    global_cu        [R+1]   running global rows; a region counts at its first batch row
    padded_local_cu  [R+1]   the same in rows of one rank
    deinterleave_idx [total] row of the rank-major buffer for each row in position order (padding repeats the last row)
    """

    row_bounds: Ints
    row_start_cu: Ints
    global_cu: Ints
    padded_local_cu: Ints
    padded_local_total: int
    total: int
    deinterleave_idx: Ints


def _running(values: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])


def region_bounds(row_request: Sequence[int] | Ints) -> Ints:
    """Where runs of equal request ids begin, and the end: int64 [Q+1]."""
    requests = np.asarray(row_request, dtype=np.int64)
    if not len(requests):
        return np.zeros(1, dtype=np.int64)
    changes = np.flatnonzero(requests[1:] != requests[:-1]) + 1
    return np.concatenate([np.zeros(1, dtype=np.int64), changes, np.array([len(requests)], dtype=np.int64)])


def global_chunk_plan(
    row_request: Sequence[int] | Ints, row_shard_rows: Sequence[int] | Ints, dcp_size: int, interleave: int = 1
) -> GlobalChunkPlan:
    """Plan of one chunk: `row_request` int [R], equal ones adjacent; `row_shard_rows` int [R], rank 0's shard rows.

    Raises ValueError when the lists differ in length or two rows of one request disagree on its shard.
    """
    check_sharding(dcp_size, interleave)
    shards = np.asarray(row_shard_rows, dtype=np.int64)
    if len(shards) != len(row_request):
        raise ValueError(f"row_request and row_shard_rows differ in length: {len(row_request)} and {len(shards)}")
    bounds = region_bounds(row_request)
    first = bounds[:-1]
    shard = shards[first]
    if not np.array_equal(np.repeat(shard, np.diff(bounds)), shards):
        raise ValueError("row_shard_rows differs between rows of one request")

    at_first = np.zeros(len(shards), dtype=np.int64)
    at_first[first] = shard
    padded_local_cu = _running(at_first)
    local_total = int(padded_local_cu[-1])
    total = local_total * dcp_size

    # Global rows t of each region, then where the gather put them.
    region_rows = shard * dcp_size
    region_start = np.cumsum(shard) - shard
    t = np.arange(total, dtype=np.int64) - np.repeat(region_start * dcp_size, region_rows)
    local = np.minimum(local_index(t, dcp_size, interleave), np.repeat(shard - 1, region_rows))
    source = owner(t, dcp_size, interleave) * local_total + np.repeat(region_start, region_rows) + local

    row_start = np.repeat(region_start * dcp_size, np.diff(bounds))
    return GlobalChunkPlan(
        row_bounds=bounds,
        row_start_cu=np.concatenate([row_start, np.array([total], dtype=np.int64)]),
        global_cu=padded_local_cu * dcp_size,
        padded_local_cu=padded_local_cu,
        padded_local_total=local_total,
        total=total,
        deinterleave_idx=source,
    )


def request_extents(
    row_request: Sequence[int] | Ints,
    row_query_lens: Sequence[int] | Ints,
    row_shard_rows: Sequence[int] | Ints,
    dcp_size: int,
) -> tuple[Ints, Ints]:
    """(context rows, query rows) per request [Q] by which chunks are planned, equal on all PCP ranks.

    Context rows are shard * W; query rows are the request's batch rows times its longest one.
    """
    bounds = region_bounds(row_request)
    if len(bounds) == 1:
        return bounds[:0], bounds[:0]
    queries = np.asarray(row_query_lens, dtype=np.int64)
    shards = np.asarray(row_shard_rows, dtype=np.int64)
    return shards[bounds[:-1]] * dcp_size, np.diff(bounds) * np.maximum.reduceat(queries, bounds[:-1])


def gather_rank_bytes(shard_rows: int, row_bytes: int = LATENT_ROW_BYTES) -> int:
    """Bytes that one rank contributes per layer to the gather of `shard_rows` rows."""
    return shard_rows * row_bytes
