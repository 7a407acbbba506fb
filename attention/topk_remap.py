"""Top-k ids (positions within a request) to rows of the buffer that the attention kernel reads.

    position  --(owner, local)-->  rank-local index        parallel/dcp.py; without DCP owner = rank, local = position
        |
        +-- row in the prefill workspace   owner * rank_stride + start[prefill request] + local
        +-- row in the paged cache         block_table[request][local // block] * block_stride + local % block

    -1 stays -1. An id past the width of the block table becomes -1 in both forms, another rank's in the paged form.

With `compact_to_front` the valid ids move to the front of their row, in order, and the tail is -1.
Source: vLLM 0.33 v1/attention/backends/mla/sparse_utils.py, facts section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parallel.dcp import Signed, local_index, owner, rank_major_rows
from parallel.tables import Bools, Ints

Int32s = NDArray[np.int32]

ROWS_AT_ONCE = 128
"""Query rows per pass: the temporaries of a pass stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Paged cache of one rank: `block_table` int32 [requests, width] of block ids, `block_size` positions per block.

    `block_stride` is the distance of two blocks in buffer rows (block_size where blocks are dense).
    """

    block_table: Int32s
    block_size: int
    block_stride: int


@dataclass(frozen=True, slots=True)
class WorkspaceRows:
    """Gathered workspace: `starts` int [prefill requests], `rank_stride` rows of one rank's part (rank-major)."""

    starts: Int32s | Ints
    rank_stride: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Decode-context-parallel placement of the cache."""

    size: int = 1
    rank: int = 0
    interleave: int = 1


def remap(
    topk: Int32s,
    request: Int32s | Ints,
    prefill_request: Int32s | Ints | None,
    paged: PagedRows,
    workspace: WorkspaceRows,
    placement: Placement | None = None,
    compact_to_front: bool = False,
) -> tuple[Int32s, Int32s]:
    """(rows int32 [n, k], valid ids per row int32 [n]) of the ids `topk` int32 [n, k].

    `request` [n] indexes the block table, `prefill_request` [n] the workspace starts; -1 there, or None for all, means
    that the row reads the paged cache. Raises ValueError when the row counts differ.
    """
    rows = len(topk)
    prefill = np.full(rows, -1, dtype=np.int32) if prefill_request is None else prefill_request
    if not rows == len(request) == len(prefill):
        raise ValueError(f"topk, request and prefill_request differ in rows: {rows}, {len(request)}, {len(prefill)}")
    place = placement or Placement()
    out = np.empty(topk.shape, dtype=np.int32)
    for part in _parts(rows):
        ids, gathered = topk[part], prefill[part] >= 0
        # NOTE: past the width of the block table there is no KV in either form, as in the kernel that this follows.
        local = local_index(ids, place.size, place.interleave) if place.size > 1 else ids
        valid: Bools = (ids >= 0) & (local < paged.block_table.shape[1] * paged.block_size)
        into = out[part]
        if gathered.all():
            into[:] = _workspace(ids, prefill[part], workspace, place)
        elif not gathered.any():
            into[:] = _paged(ids, valid, request[part], paged, place)
        else:
            paged_rows = ~gathered
            into[gathered] = _workspace(ids[gathered], prefill[part][gathered], workspace, place)
            into[paged_rows] = _paged(ids[paged_rows], valid[paged_rows], request[part][paged_rows], paged, place)
        np.copyto(into, -1, where=~valid)
    counts = np.count_nonzero(out >= 0, axis=1).astype(np.int32)
    return (_compact(out, counts) if compact_to_front else out), counts


def _parts(rows: int) -> Iterator[slice]:
    return (slice(start, start + ROWS_AT_ONCE) for start in range(0, rows, ROWS_AT_ONCE))


def _workspace(ids: Int32s, prefill: Int32s | Ints, workspace: WorkspaceRows, place: Placement) -> Signed:
    starts = np.asarray(workspace.starts, dtype=np.int32)[prefill][:, None]
    if place.size == 1:
        return ids + starts
    return rank_major_rows(ids, starts, workspace.rank_stride, place.size, place.interleave)


def _paged(ids: Int32s, valid: Bools, request: Int32s | Ints, paged: PagedRows, place: Placement) -> Signed:
    # NOTE: invalid ids become 0 so that they address something; the caller's mask puts -1 back.
    known = np.where(valid, ids, np.int32(0))
    local = local_index(known, place.size, place.interleave) if place.size > 1 else known
    block, offset = np.divmod(local, paged.block_size)
    rows: Signed = paged.block_table[request[:, None], block] * np.int32(paged.block_stride) + offset
    if place.size > 1:
        np.copyto(rows, -1, where=owner(known, place.size, place.interleave) != place.rank)
    return rows


def _compact(rows: Int32s, counts: Int32s) -> Int32s:
    packed = np.full_like(rows, -1)
    packed[np.arange(rows.shape[1]) < counts[:, None]] = rows[rows >= 0]
    return packed
