"""One rank's rows of a step, described as a batch of its own.

    step      | request 0: positions 4 5 6 7 8 9 10 11 | request 1: 0 |
    rank 0      . .                         ... the rows of the rank, in its order, as global row numbers: 0 1 6 7
    entries   (request 0, [0, 2), ends 6)  (request 0, [2, 4), ends 12)

An entry is a run of neighbouring rows of one request: its last row sees all keys up to itself. Head-tail gives two
entries a request, interleave one a row. A rank without rows gets one entry without rows, so that no batch is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallel.head_tail import RankBatch
from parallel.tables import Ints


def local_batch(
    rows: Sequence[int] | Ints, query_start: Sequence[int] | Ints, seq_lens: Sequence[int] | Ints
) -> RankBatch:
    """The rank's batch.

    Args:
        rows: global rows of the rank in local order.
        query_start: [R+1], first global row of each request, then the total.
        seq_lens: [R], context length of each request at the end of the step.

    Raises:
        ValueError: a row that no request has.
    """
    held = np.asarray(rows, dtype=np.int64)
    starts = np.asarray(query_start, dtype=np.int64)
    ends = np.asarray(seq_lens, dtype=np.int64)
    if not len(held):
        none = np.zeros(1, dtype=np.int64)
        return RankBatch(none, np.zeros(2, dtype=np.int64), none, none)
    if int(held.min()) < 0 or int(held.max()) >= int(starts[-1]):
        raise ValueError(f"rows: {int(held.min())} to {int(held.max())}, the step has {int(starts[-1])}")
    request = np.searchsorted(starts, held, side="right") - 1
    breaks = (np.diff(held) != 1) | (np.diff(request) != 0)
    first = np.concatenate([np.zeros(1, dtype=np.int64), np.flatnonzero(breaks) + 1])
    lengths = np.diff(np.append(first, len(held)))
    owner = request[first]
    start_pos = ends[owner] - starts[owner + 1] + held[first]
    return RankBatch(owner, np.append(first, len(held)), start_pos, start_pos + lengths)
