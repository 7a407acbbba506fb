"""Work per rank: rows, and the keys that they visit under the causal mask.

position  0 1 2 3 4 5 ...            visits(p) = min(p + 1, limit)
visits    1 2 3 4 4 4 ...            limit = index_topk for sparse attention, none for the indexer

rows [p, p+n) without a limit   n*p + n*(n+1)/2
with a limit t                  the same up to position t-1, then t per row

imbalance = max over ranks / mean over ranks        1.0 is perfect
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallel.head_tail import HeadTail, head_tail
from parallel.interleave import Interleave, Zigzag, interleave, interleave_applies, zigzag, zigzag_applies
from parallel.tables import Bools, Ints, ranges


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


@dataclass(frozen=True, slots=True)
class Shares:
    """One step over P ranks: rows and visited keys of each, [P]."""

    rows: list[int]
    visits: list[int]

    @property
    def imbalance(self) -> float:
        """Most visits of a rank over the mean."""
        return imbalance(self.visits)


def one_row(query_lens: Sequence[int] | Ints) -> Bools:
    """Requests whose single row is dealt out whole, bool [R].

    NOTE: decode rows, and prefill chunks of one row, which vLLM instead gives to rank 0 each time.
    """
    single: Bools = np.asarray(query_lens, dtype=np.int64) == 1
    return single


def whole_shares(query_lens: Sequence[int], prefix_lens: Sequence[int], ranks: int, limit: int | None = None) -> Shares:
    """A step that every rank runs whole: decode steps, and those that a split cannot cut."""
    new, prefix = np.asarray(query_lens, dtype=np.int64), np.asarray(prefix_lens, dtype=np.int64)
    return Shares([int(new.sum())] * ranks, [int(range_visits(prefix, new, limit).sum())] * ranks)


def step_shares(
    split: str,
    query_lens: Sequence[int],
    prefix_lens: Sequence[int],
    ranks: int,
    limit: int | None = None,
    dcp_size: int = 1,
) -> Shares | None:
    """What each prefill rank of `--cp-split` gets of a step of `query_lens` new rows after `prefix_lens` cached keys.

    None for a split that is not built in. `limit`: as in `range_visits`.
    """
    new, prefix = np.asarray(query_lens, dtype=np.int64), np.asarray(prefix_lens, dtype=np.int64)
    if split == "head-tail":
        layout = head_tail(new, prefix, ~one_row(new), ranks, dcp_size)
        return Shares(layout.rank_rows.tolist(), head_tail_visits(layout, limit).tolist())
    made: Interleave | Zigzag
    if split == "interleave" and interleave_applies(query_lens, ranks):
        made = interleave(query_lens, ranks)
    elif split == "zigzag" and zigzag_applies(query_lens, ranks):
        made = zigzag(query_lens, prefix_lens, ranks)
    elif split in ("interleave", "zigzag"):
        return whole_shares(query_lens, prefix_lens, ranks, limit)
    else:
        return None
    return Shares(made.rank_rows(), row_visits(made, ranges(prefix, prefix + new), limit).tolist())
