"""Work per rank: rows, and the keys that they visit under the causal mask.

position  0 1 2 3 4 5 ...            visits(p) = min(p + 1, limit)
visits    1 2 3 4 4 4 ...            limit = index_topk for sparse attention, none for the indexer

rows [p, p+n) without a limit   n*p + n*(n+1)/2
with a limit t                  the same up to position t-1, then t per row

imbalance = max over ranks / mean over ranks        1.0 is perfect
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallel.head_tail import HeadTail
from parallel.interleave import Interleave, Zigzag
from parallel.tables import Ints


def range_visits(start_pos: Ints, rows: Ints, limit: int | None = None) -> Ints:
    """Keys visited by each run of `rows` rows from position `start_pos`, int64, elementwise."""
    if limit is None:
        return rows * start_pos + rows * (rows + 1) // 2
    growing = np.clip(limit - start_pos, 0, rows)
    visits: Ints = growing * start_pos + growing * (growing + 1) // 2 + (rows - growing) * limit
    return visits


def head_tail_visits(layout: HeadTail, limit: int | None = None) -> Ints:
    """Keys visited per rank, int64 [P]."""
    visits = np.zeros(layout.pcp_size, dtype=np.int64)
    np.add.at(visits, layout.rank, range_visits(layout.start_pos, layout.stop - layout.start, limit))
    return visits


def row_visits(layout: Interleave | Zigzag, positions: Ints, limit: int | None = None) -> Ints:
    """Keys visited per rank of one of SGLang's splits, int64 [P]; `positions` [G] are those of the global rows."""
    seen = positions + 1 if limit is None else np.minimum(positions + 1, limit)
    return np.array([int(seen[layout.rows(rank)].sum()) for rank in range(layout.cp_size)], dtype=np.int64)


def halves_visits(seq_lens: Sequence[int], query_lens: Sequence[int], ranks: int, limit: int | None = None) -> Ints:
    """Keys visited per rank, int64 [P], were each request's rows cut into P plain parts; for comparison."""
    ends = np.asarray(seq_lens, dtype=np.int64)
    rows = np.asarray(query_lens, dtype=np.int64)
    edges = np.arange(ranks + 1, dtype=np.int64)[:, None] * rows // ranks
    parts: Ints = range_visits(ends - rows + edges[:-1], np.diff(edges, axis=0), limit).sum(axis=1)
    return parts


def imbalance(work: Sequence[int] | Ints) -> float:
    """Largest share over the mean; 1.0 when there is no work."""
    shares = np.asarray(work, dtype=np.int64)
    total = int(shares.sum())
    return float(shares.max()) * len(shares) / total if total else 1.0
