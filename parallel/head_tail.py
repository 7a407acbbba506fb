"""Head-tail split of a prefill over P context-parallel ranks.

Causal work grows along a prompt, so each rank takes one piece from the head and its mirror image from the tail. A
request of q new rows is cut into 2P segments of size = ceil(q / 2P), clipped to q; rank r owns segments r and 2P-1-r:

    P = 2    | seg 0 | seg 1 | seg 2 | seg 3 |        keys seen   1 + 4  =  2 + 3   (in segments)
    rank     |   0   |   1   |   1   |   0   |

    q = 7    0 1   2 3   4 5   6                       size 2, the last segment is clipped to one row
    rank 0   0 1               6
    rank 1         2 3   4 5

Segments that are empty after clipping vanish. Rows on a rank: those of requests that do not prefill first, then by
(request, start). Requests that are not cut ("replicated"):

    decode rows                                              always
    a prefill of q rows, if dcp > 1 and (2P-1) * size >= q   (its last segment would be empty)

A replicated request is run whole by every rank; with sharded decode (P > 1 and dcp == 1) only by rank k mod P, where k
counts the replicated requests with rows in batch order. The gather back is `tables.gather_tables`.
Source: vLLM 0.33 v1/worker/gpu/pcp_manager.py, facts section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parallel.tables import Bools, GatherTables, Ints, gather_tables, ranges


def segment_size(query_len: int, pcp_size: int) -> int:
    """Rows of one segment, ceil(query_len / 2P)."""
    return -(-query_len // (2 * pcp_size))


def shards_decode(pcp_size: int, dcp_size: int) -> bool:
    """Whether decode rows are dealt out over the ranks instead of run by all: P > 1 and dcp == 1."""
    return pcp_size > 1 and dcp_size == 1


def replicated_requests(
    num_scheduled: Sequence[int] | Ints, is_prefilling: Sequence[bool] | Bools, pcp_size: int, dcp_size: int
) -> Bools:
    """Requests that are not cut into segments, bool [R]."""
    query_lens = np.asarray(num_scheduled, dtype=np.int64)
    prefilling = np.asarray(is_prefilling, dtype=np.bool_)
    if dcp_size == 1:
        return ~prefilling
    parts = 2 * pcp_size
    size = -(-query_lens // parts)
    return ~prefilling | ((parts - 1) * size >= query_lens)


@dataclass(frozen=True, slots=True)
class Segment:
    """One run of rows on one rank: global rows, rank-local rows (both half-open) and the first row's position."""

    request: int
    start: int
    stop: int
    local_start: int
    local_stop: int
    start_pos: int


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What one rank runs, one entry per segment.

    `request` int64 [S], `query_start` int64 [S+1] (local rows), `start_pos` int64 [S], `seq_lens` int64 [S] (last local
    position + 1). A rank without rows has one entry of request 0 with no rows and length 0, so that no batch is empty.
    """

    request: Ints
    query_start: Ints
    start_pos: Ints
    seq_lens: Ints


@dataclass(frozen=True)
class HeadTail:
    """Layout of one step over P ranks; arrays have one entry per segment, rank by rank, in local row order.

    `rank`, `request`, `start`, `stop`, `local_start`, `start_pos`: int64 [S]. `rank_rows` int64 [P] rows per rank,
    `total_rows` G, `replicated` bool [R].
    """

    pcp_size: int
    total_rows: int
    replicated: Bools
    rank: Ints
    request: Ints
    start: Ints
    stop: Ints
    local_start: Ints
    start_pos: Ints
    rank_rows: Ints

    @property
    def dispatch_rows(self) -> int:
        """Rows of the longest rank, the least padded length."""
        return int(self.rank_rows.max(initial=0))

    @cached_property
    def _bounds(self) -> Ints:
        return np.searchsorted(self.rank, np.arange(self.pcp_size + 1))

    def _entries(self, rank: int) -> slice:
        if not 0 <= rank < self.pcp_size:
            raise ValueError(f"rank {rank} is outside 0..{self.pcp_size - 1}")
        return slice(int(self._bounds[rank]), int(self._bounds[rank + 1]))

    def segments(self, rank: int) -> list[Segment]:
        """The rank's segments in local order."""
        part = self._entries(rank)
        fields = (self.request, self.start, self.stop, self.local_start, self.start_pos)
        return [
            Segment(request, start, stop, local, local + stop - start, pos)
            for request, start, stop, local, pos in zip(*(field[part].tolist() for field in fields), strict=True)
        ]

    def rows(self, rank: int) -> Ints:
        """Global rows that the rank runs, in local order, int64 [rank_rows[rank]]."""
        part = self._entries(rank)
        return ranges(self.start[part], self.stop[part])

    def positions(self, rank: int) -> Ints:
        """Absolute positions of the rank's rows, int64 [rank_rows[rank]]."""
        part = self._entries(rank)
        return ranges(self.start_pos[part], self.start_pos[part] + self.stop[part] - self.start[part])

    def rank_batch(self, rank: int) -> RankBatch:
        """The rank's own batch, for planning its attention."""
        part = self._entries(rank)
        lengths = self.stop[part] - self.start[part]
        if not len(lengths):
            none = np.zeros(1, dtype=np.int64)
            return RankBatch(none, np.zeros(2, dtype=np.int64), none, none)
        query_start = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        return RankBatch(self.request[part], query_start, self.start_pos[part], self.start_pos[part] + lengths)

    def tables(self, padded_rows: int | None = None) -> GatherTables:
        """The gather tables; `padded_rows` (a graph size) defaults to the longest rank, ValueError when below it."""
        return gather_tables([self.rows(rank) for rank in range(self.pcp_size)], self.total_rows, padded_rows)


def head_tail(
    num_scheduled: Sequence[int] | Ints,
    num_computed: Sequence[int] | Ints,
    is_prefilling: Sequence[bool] | Bools,
    pcp_size: int,
    dcp_size: int = 1,
    shard_decode: bool | None = None,
) -> HeadTail:
    """Layout of a step whose request i schedules `num_scheduled[i]` rows after `num_computed[i]` done ones, all [R].

    `shard_decode` None takes `shards_decode(pcp_size, dcp_size)`. Raises ValueError for sizes below 1, lengths of the
    three lists that differ, or negative counts.
    """
    if pcp_size < 1 or dcp_size < 1:
        raise ValueError(f"pcp_size and dcp_size must be at least 1, got {pcp_size} and {dcp_size}")
    query_lens = np.asarray(num_scheduled, dtype=np.int64)
    computed = np.asarray(num_computed, dtype=np.int64)
    prefilling = np.asarray(is_prefilling, dtype=np.bool_)
    if not len(query_lens) == len(computed) == len(prefilling):
        raise ValueError(
            f"num_scheduled, num_computed and is_prefilling differ in length: "
            f"{len(query_lens)}, {len(computed)}, {len(prefilling)}"
        )
    if min(query_lens.min(initial=0), computed.min(initial=0)) < 0:
        raise ValueError("num_scheduled and num_computed may not be negative")
    if shard_decode is None:
        shard_decode = shards_decode(pcp_size, dcp_size)

    whole = replicated_requests(query_lens, prefilling, pcp_size, dcp_size)
    first_row = np.cumsum(query_lens) - query_lens

    cut = np.flatnonzero(~whole)
    index = np.arange(2 * pcp_size, dtype=np.int64)[:, None]
    size = -(-query_lens[cut] // (2 * pcp_size))
    lo = np.minimum(index * size, query_lens[cut])
    hi = np.minimum(lo + size, query_lens[cut])
    owner = np.broadcast_to(np.minimum(index, 2 * pcp_size - 1 - index), lo.shape)

    kept = np.flatnonzero(whole & (query_lens > 0))
    if shard_decode:
        copies, kept_rank = kept, np.arange(len(kept), dtype=np.int64) % pcp_size
    else:
        copies, kept_rank = np.tile(kept, pcp_size), np.repeat(np.arange(pcp_size, dtype=np.int64), len(kept))

    rank = np.concatenate([owner.ravel(), kept_rank])
    request = np.concatenate([np.broadcast_to(cut, lo.shape).ravel(), copies])
    offset = np.concatenate([lo.ravel(), np.zeros(len(copies), dtype=np.int64)])
    rows = np.concatenate([(hi - lo).ravel(), query_lens[copies]])

    order = np.lexsort((offset, request, prefilling[request], rank))
    order = order[rows[order] > 0]
    rank, request, offset, rows = rank[order], request[order], offset[order], rows[order]

    rank_rows = np.zeros(pcp_size, dtype=np.int64)
    np.add.at(rank_rows, rank, rows)
    rank_first = np.cumsum(rank_rows) - rank_rows
    start = first_row[request] + offset
    return HeadTail(
        pcp_size=pcp_size,
        total_rows=int(query_lens.sum()),
        replicated=whole,
        rank=rank,
        request=request,
        start=start,
        stop=start + rows,
        local_start=np.cumsum(rows) - rows - rank_first[rank],
        start_pos=computed[request] + offset,
        rank_rows=rank_rows,
    )
