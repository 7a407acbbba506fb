"""A latent cache of which every rank keeps its share of the tokens (decode context parallel), and attention over it.

    W = 2, interleave = 1     slot      0 1 2 3 ... 63 | 64 65 ...       slots are those of the unsharded cache
                              rank 0    0   2   ...    | 64    ...       row of slot s = local_index(s)
                              rank 1      1   3 ... 63 |    65 ...       rows of a rank = slots / W

    write    a rank stores the rows whose slot it owns, and drops the others
    attend   queries of all heads to every rank, each over its own keys; the results are merged (`dcp_merge.py`)

Index keys are not sharded: every rank scores all keys and finds the same ids, so no top-k has to be merged. A page is
the least multiple of 64 tokens that all ranks own equal whole shares of, so that slots of a prefix shared by several
requests lie with the same rank for all of them. Rows of a step are exchanged in cuts of bounded size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attention import kernels
from attention.batch import AttentionBatch
from attention.layouts import LatentCache
from attention.scratch import Scratch
from attention.sizes import LATENT_DIM, NOPE_DIM, PAGE_SIZE
from attention.topk_remap import Int32s, PagedRows, Placement, WorkspaceRows, remap
from parallel.collectives import all_gather_equal, all_to_all
from parallel.dcp import check_sharding, global_position, local_index, local_lengths, owner, page_tokens
from parallel.dcp_merge import context_bytes, merge, pack, partial_bytes, query_bytes, unpack

EXCHANGE_BYTES = 16 << 20
"""A cut of query rows is at most so large, all heads of the group, as values and as results."""

NO_WORKSPACE = WorkspaceRows(np.zeros(1, dtype=np.int32))


@dataclass(slots=True)
class Moved:
    """Since start, on this rank: rows exchanged and bytes received, once a layer."""

    merged_rows: int = 0
    query_bytes: int = 0
    partial_bytes: int = 0
    context_bytes: int = 0

    def clear(self) -> None:
        """Count from 0 again."""
        self.merged_rows = self.query_bytes = self.partial_bytes = self.context_bytes = 0


@dataclass(frozen=True)
class Shards:
    """How the group shares the cache.

    Attributes:
        size, rank: ranks of the group, and this one among them. interleave: tokens of a run.
        group: their process group.
        same_heads: the ranks have the same query heads (prefill ranks), not each its own (tensor-parallel ones).
        moved: counters.

    Raises:
        ValueError: sizes below 1, or an interleave that does not divide the page of 64 tokens.
    """

    size: int
    rank: int
    interleave: int
    group: dist.ProcessGroup
    same_heads: bool = False
    moved: Moved = field(default_factory=Moved)

    def __post_init__(self) -> None:
        check_sharding(self.size, self.interleave, PAGE_SIZE)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of the unsharded cache."""
        return page_tokens(self.size, self.interleave, PAGE_SIZE)

    @property
    def placement(self) -> Placement:
        """The same for the id remap."""
        return Placement(self.size, self.rank, self.interleave)

    def owned(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(which of int64 `slots` [n] this rank stores, their rows in its cache), both int64 [m]."""
        given = slots.numpy()
        mine = np.flatnonzero(owner(given, self.size, self.interleave) == self.rank)
        return torch.from_numpy(mine), torch.from_numpy(local_index(given[mine], self.size, self.interleave))

    def rows_of(self, slots: Tensor) -> Tensor:
        """Rows of int64 `slots` [n] in the cache of the rank that owns each, int64 [n]."""
        return torch.from_numpy(local_index(slots.numpy(), self.size, self.interleave))

    def rounds(self, tokens: int) -> int:
        """Rows of `tokens` positions when every rank's share is as large as rank 0's, the largest."""
        return int(local_lengths([tokens], self.size, 0, self.interleave)[0]) * self.size

    def pages(self, table: Tensor) -> PagedRows:
        """Page table of this rank's rows, of one of 64-token pages int32 [requests, pages]."""
        step = self.page_tokens // PAGE_SIZE
        share = self.page_tokens // self.size
        return PagedRows(table[:, ::step].numpy() // step, share, share)

    def context_rows(self, batch: AttentionBatch, request: int) -> Tensor:
        """Rows of a request's context in this rank's cache, int64 [rank 0's share]; row 0 where this one has fewer."""
        length = int(batch.seq_lens[request])
        rows = torch.zeros(self.rounds(length) // self.size, dtype=torch.int64)
        held = int(local_lengths([length], self.size, self.rank, self.interleave)[0])
        positions = global_position(np.arange(held), self.rank, self.size, self.interleave)
        rows[:held] = self.rows_of(batch.slots_of(request, torch.from_numpy(positions)))
        return rows

    def local_ids(self, batch: AttentionBatch, requests: Int32s, ids: Tensor) -> Tensor:
        """Rows in this rank's cache of request-local ids, int32 [n, k]; -1 for a key of another rank.

        Args:
            requests: int32 [n], request of each row. ids: int32 [n, k].

        Raises:
            ValueError: an id outside its request's context.
        """
        given = ids.numpy()
        past = given.max(axis=1, initial=-1) >= batch.seq_lens.numpy()[requests]
        if past.any():
            raise ValueError(f"topk_ids: row {int(past.argmax())} has an id outside its context")
        rows, _ = remap(given, requests, None, self.pages(batch.page_table), NO_WORKSPACE, self.placement)
        return torch.from_numpy(rows)

    def rows_at_once(self, heads: int, itemsize: int) -> int:
        """Query rows of one exchange; `heads` of this rank."""
        return max(1, EXCHANGE_BYTES // (self.size * heads * LATENT_DIM * itemsize))

    def attend(
        self,
        batch: AttentionBatch,
        q_nope: Tensor,
        q_rope: Tensor,
        cache: LatentCache,
        ids: Tensor,
        scale: float,
        scratch: Scratch,
    ) -> tuple[Tensor, Tensor]:
        """Sparse MLA of the batch's rows over the keys of all ranks; a collective call of the group.

        Args:
            q_nope, q_rope: [rows, heads, 512] and [rows, heads, 64], heads of this rank.
            cache: rows of this rank. ids: int32 [rows, k], request-local positions, the same on all ranks.

        Returns:
            [rows, heads, 512] in q's dtype and float32 [rows, heads], log-sum-exp.

        Raises:
            ValueError: an id outside its request's context, or rows that the other ranks do not have.
        """
        if batch.of is not None:
            raise ValueError(
                "batch: rows of one prefill rank cannot be merged; --prefill-kv workspace gathers their keys"
            )
        n, heads = q_nope.shape[:2]
        out = torch.empty((n, heads, NOPE_DIM), dtype=q_nope.dtype)
        lse = torch.empty((n, heads), dtype=torch.float32)
        if n == 0:
            return out, lse
        requests = batch.row_requests().numpy().astype(np.int32)
        local = self.local_ids(batch, requests, ids)
        step = self.rows_at_once(heads, q_nope.element_size())
        for first in range(0, n, step):
            at = slice(first, min(first + step, n))
            out[at], lse[at] = self._cut(q_nope[at], q_rope[at], cache, local[at], scale, scratch)
        return out, lse

    def _cut(
        self, q_nope: Tensor, q_rope: Tensor, cache: LatentCache, local: Tensor, scale: float, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        n, heads = q_nope.shape[:2]
        asked = heads if self.same_heads else self.size * heads
        if not self.same_heads:
            own = torch.cat([q_nope, q_rope], dim=-1)
            q = all_gather_equal(own, self.group).transpose(0, 1).reshape(n, asked, LATENT_DIM)
            q_nope, q_rope = q[..., :NOPE_DIM], q[..., NOPE_DIM:]
            self.moved.query_bytes += query_bytes(self.size, n, heads, q.element_size())
        part = torch.empty((n, asked, NOPE_DIM), dtype=q_nope.dtype)
        weight = torch.empty((n, asked), dtype=torch.float32)
        scratch.clear()
        kernels.active().attend(None, q_nope, q_rope, cache, local.contiguous(), scale, scratch, part, weight)
        if self.same_heads:
            received = all_gather_equal(pack(part, weight, 1)[0], self.group)
        else:
            received = all_to_all(pack(part, weight, self.size), self.group)
        self.moved.merged_rows += n
        self.moved.partial_bytes += partial_bytes(self.size, n, heads, q_nope.element_size())
        return merge(*unpack(received, q_nope.dtype))

    def gather(self, own: Tensor, out: Tensor) -> None:
        """Fill out [W * s, 576], rank-major, with each rank's [s, 576]; a collective call of the group."""
        self.moved.context_bytes += context_bytes(self.size, own.shape[0], own.element_size())
        all_gather_equal(own, self.group, out)

    def facts(self) -> dict[str, Any]:
        """Size, interleave, page and counters, as plain JSON values."""
        done = self.moved
        return {
            "decode_context_parallel_size": self.size,
            "cp_kv_cache_interleave_size": self.interleave,
            "page_tokens": self.page_tokens,
            "merged_rows": done.merged_rows,
            "received_bytes": {
                "queries": done.query_bytes,
                "partials": done.partial_bytes,
                "contexts": done.context_bytes,
            },
        }


@dataclass(frozen=True)
class ShardedCache(LatentCache):
    """`LatentCache` that holds the rows of one rank only.

    Args:
        shards: how the group shares it.
    """

    shards: Shards = field(kw_only=True)

    def attend(
        self, batch: AttentionBatch, q_nope: Tensor, q_rope: Tensor, ids: Tensor, scale: float, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """`Shards.attend` over this cache."""
        return self.shards.attend(batch, q_nope, q_rope, self, ids, scale, scratch)
