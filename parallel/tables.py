"""The three tables of an uneven all-gather, as inverse functions.

Every rank holds some of the step's G global rows, pads them to L, and the gather puts the ranks one after another:

    gathered row   0 ......... L-1 | L ........ 2L-1 | ...
    holds          rank 0, padding | rank 1, padding | ...

    gather[t]   gathered row -> global row      0 on padding
    restore[g]  global row   -> gathered row    of the first rank that holds g
    writes[t]   this gathered row stores KV     false on padding and on later ranks' copies

    gather[restore[g]] == g        writes == the image of restore, so each global row is stored exactly once

The names of vLLM 0.33 (v1/worker/gpu/pcp_manager.py) are padded_gather_idx, hidden_restore_idx, gathered_kv_write_mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class GatherTables:
    """Tables of one step for P ranks of L padded rows over G global rows.

    `padded_gather_idx` int64 [P*L], `hidden_restore_idx` int64 [G], `gathered_kv_write_mask` bool [P*L].
    """

    padded_rows: int
    padded_gather_idx: Ints
    hidden_restore_idx: Ints
    gathered_kv_write_mask: Bools

    def slots(self, global_slots: Ints, pad_slot: int = -1) -> Ints:
        """KV slots of the gathered rows, int64 [P*L], from those of the global rows [G]; `pad_slot` where masked."""
        mapped = np.full(self.padded_gather_idx.shape, pad_slot, dtype=np.int64)
        mask = self.gathered_kv_write_mask
        mapped[mask] = np.asarray(global_slots, dtype=np.int64)[self.padded_gather_idx[mask]]
        return mapped


def gather_tables(rank_rows: Sequence[Ints], total_rows: int, padded_rows: int | None = None) -> GatherTables:
    """Tables for ranks that hold the global rows `rank_rows[rank]`, in that local order.

    `padded_rows` is L; None takes the longest rank. Raises ValueError when L is too small or a row has no holder.
    """
    counts = np.array([len(rows) for rows in rank_rows], dtype=np.int64)
    longest = int(counts.max(initial=0))
    length = longest if padded_rows is None else padded_rows
    if length < longest:
        raise ValueError(f"padded_rows is {length}, but the longest rank holds {longest} rows")

    held = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in rank_rows]) if len(rank_rows) else counts
    starts = np.cumsum(counts) - counts
    place = np.arange(len(held)) + np.repeat(np.arange(len(counts)) * length - starts, counts)

    gather = np.zeros(len(counts) * length, dtype=np.int64)
    gather[place] = held
    restore = np.full(total_rows, -1, dtype=np.int64)
    # NOTE: numpy keeps the last write of a repeated index; walking backwards leaves the first rank's copy.
    restore[held[::-1]] = place[::-1]
    if total_rows and int(restore.min()) < 0:
        raise ValueError(f"global row {int(np.argmin(restore))} is held by no rank")
    writes = np.zeros(len(counts) * length, dtype=np.bool_)
    writes[restore] = True
    return GatherTables(length, gather, restore, writes)


def gather_bytes(padded_rows: int, ranks: int, row_bytes: int) -> int:
    """Bytes that one rank receives when P ranks of `padded_rows` rows are all-gathered: (P-1) * L * row_bytes."""
    return (ranks - 1) * padded_rows * row_bytes


def ranges(starts: Ints, stops: Ints) -> Ints:
    """The integers of the half-open ranges [starts[i], stops[i]) one after another, int64."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    offsets: Ints = np.repeat(starts - (ends - lengths), lengths)
    return np.arange(len(offsets), dtype=np.int64) + offsets
