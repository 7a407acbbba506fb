"""SGLang's two context-parallel splits: `interleave` and `zigzag`.

interleave: token i of the concatenated new tokens belongs to rank i mod P.

    P = 2    token  0 1 2 3 4 5 6          rank 0: 0 2 4 6        padded to a multiple of P
             rank   0 1 0 1 0 1 0          rank 1: 1 3 5

zigzag: each request is cut into 2P blocks whose sizes differ by at most one (the first `len mod 2P` blocks are the
longer ones; head-tail instead cuts ceil-sized segments). Rank r owns blocks r and 2P-1-r, first blocks of all requests
first:

    P = 2    | b0 | b1 | b2 | b3 |         rank 0: b0 of each request, then b3 of each     padded to a multiple of 2P
    rank     | 0  | 1  | 1  | 0  |         rank 1: b1 of each request, then b2 of each

Neither applies to every step: interleave needs P tokens in all, zigzag 2P tokens in each request.
Source: SGLang 0.5.23 srt/layers/cp/{interleave,zigzag,padding}.py, facts section 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallel.tables import GatherTables, Ints, gather_tables, ranges


def interleave_applies(extend_lens: Sequence[int], cp_size: int) -> bool:
    """Whether a step of these new tokens per request can be interleaved over `cp_size` ranks."""
    return cp_size > 1 and sum(extend_lens) >= cp_size


def zigzag_applies(extend_lens: Sequence[int], cp_size: int) -> bool:
    """Whether every request has a token for each of its 2P blocks."""
    return cp_size > 1 and sum(extend_lens) >= 2 * cp_size and all(n >= 2 * cp_size for n in extend_lens)


def _aligned(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Interleave:
    """Round-robin of `total_rows` tokens over `cp_size` ranks."""

    cp_size: int
    total_rows: int

    def rank_rows(self) -> list[int]:
        """Rows of each rank; the first total mod P ranks have one more."""
        base, extra = divmod(self.total_rows, self.cp_size)
        return [base + (rank < extra) for rank in range(self.cp_size)]

    def rows(self, rank: int) -> Ints:
        """Global rows of the rank in local order, int64."""
        return np.arange(rank, self.total_rows, self.cp_size, dtype=np.int64)

    def padded_rows(self) -> int:
        """Physical length of every rank: the longest, rounded up to a multiple of P."""
        return _aligned(max(self.rank_rows()), self.cp_size)

    def tables(self) -> GatherTables:
        """The gather tables over `padded_rows()`."""
        return gather_tables([self.rows(rank) for rank in range(self.cp_size)], self.total_rows, self.padded_rows())


def interleave(extend_lens: Sequence[int], cp_size: int) -> Interleave:
    """Layout of a step. Raises ValueError where the split does not apply."""
    if not interleave_applies(extend_lens, cp_size):
        raise ValueError(f"interleave over {cp_size} ranks needs at least {cp_size} tokens, got {sum(extend_lens)}")
    return Interleave(cp_size, sum(extend_lens))


@dataclass(frozen=True, slots=True)
class Zigzag:
    """Blocks of one step: `sizes` and `starts` (global rows) int64 [R, 2P]; `prefix_lens` int64 [R]."""

    cp_size: int
    sizes: Ints
    starts: Ints
    prefix_lens: Ints

    def rank_rows(self) -> list[int]:
        """Rows of each rank."""
        total = self.sizes.sum(axis=0)
        return [int(total[rank] + total[-1 - rank]) for rank in range(self.cp_size)]

    def rows(self, rank: int) -> Ints:
        """Global rows of the rank in local order, int64."""
        starts = np.concatenate([self.starts[:, rank], self.starts[:, -1 - rank]])
        sizes = np.concatenate([self.sizes[:, rank], self.sizes[:, -1 - rank]])
        return ranges(starts, starts + sizes)

    def padded_rows(self) -> int:
        """Physical length of every rank: the longest, rounded up to a multiple of 2P."""
        return _aligned(max(self.rank_rows()), 2 * self.cp_size)

    def tables(self) -> GatherTables:
        """The gather tables over `padded_rows()`."""
        total = int(self.sizes.sum())
        return gather_tables([self.rows(rank) for rank in range(self.cp_size)], total, self.padded_rows())

    def split_list(self) -> list[int]:
        """Sizes of all blocks in global order, [R * 2P]."""
        sizes: list[int] = self.sizes.ravel().tolist()
        return sizes

    def zigzag_index(self, rank: int) -> list[int]:
        """Blocks of the rank (indices into `split_list`) in local order, [2R]."""
        blocks = np.arange(self.sizes.size).reshape(self.sizes.shape)
        index: list[int] = np.concatenate([blocks[:, rank], blocks[:, -1 - rank]]).tolist()
        return index

    def gathered_blocks(self) -> list[int]:
        """Blocks (indices into `split_list`) in the order in which the gather brings them, [R * 2P]."""
        return [block for rank in range(self.cp_size) for block in self.zigzag_index(rank)]

    def reverse_split_len(self) -> list[int]:
        """Sizes of the gathered blocks, [R * 2P]."""
        sizes = self.split_list()
        return [sizes[block] for block in self.gathered_blocks()]

    def cp_reverse_index(self) -> list[int]:
        """Gathered place of each block in global order, [R * 2P]: the inverse of `gathered_blocks`."""
        index: list[int] = np.argsort(np.array(self.gathered_blocks())).tolist()
        return index

    def query_lens(self, rank: int) -> tuple[list[int], list[int]]:
        """New rows per request in the rank's head and tail blocks."""
        return self.sizes[:, rank].tolist(), self.sizes[:, -1 - rank].tolist()

    def kv_lens(self, rank: int) -> tuple[list[int], list[int]]:
        """Keys per request that the last row of the rank's head and tail blocks sees, prefix included."""
        seen = self.prefix_lens[:, None] + np.cumsum(self.sizes, axis=1)
        return seen[:, rank].tolist(), seen[:, -1 - rank].tolist()


def zigzag(extend_lens: Sequence[int], prefix_lens: Sequence[int], cp_size: int) -> Zigzag:
    """Layout of `extend_lens` new tokens after `prefix_lens` cached ones. ValueError where it does not apply."""
    if not zigzag_applies(extend_lens, cp_size):
        raise ValueError(
            f"zigzag over {cp_size} ranks needs at least {2 * cp_size} tokens in each request, got {list(extend_lens)}"
        )
    if len(extend_lens) != len(prefix_lens):
        raise ValueError(f"extend_lens and prefix_lens differ in length: {len(extend_lens)} and {len(prefix_lens)}")
    lengths = np.asarray(extend_lens, dtype=np.int64)[:, None]
    base, extra = np.divmod(lengths, 2 * cp_size)
    sizes = base + (np.arange(2 * cp_size) < extra)
    starts = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape)
    return Zigzag(cp_size, sizes, starts, np.asarray(prefix_lens, dtype=np.int64))
