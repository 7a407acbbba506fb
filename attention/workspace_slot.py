"""The ``workspace`` prefill-KV slot: contexts gathered and up-converted once a layer, then read by remapped ids.

    step         | decode | dense | prompt 0 | prompt 1 | prompt 2 |
                     |       |         \\_____ group 0 ____/    |        sum of contexts <= R       workspace.py
                   pages   pages            gather             gather
                                 workspace  | context 0 | context 1 |   R rows of 576, one float type
    ids of a row of prompt 1     p  ->  start[1] + p                                           topk_remap.py
    sparse MLA                   over workspace rows instead of pages

    R = min(factor * max_model_len, what a step can fill)

Under decode context parallel each rank gathers its own share of the contexts, as many rows as rank 0 has, and the
shares are laid one after another; ids are mapped to that order, and nothing has to be merged. Prefill ranks that share
a step as well have rows of their own, but gather the same contexts:

                 workspace  | rank 0: context 0, context 1 | rank 1: context 0, context 1 |     own share: R // W rows

One buffer serves all layers and steps. Its rows hold the values that `paged` takes from the cache in place, and they
are summed in the same order, so the result has the same bits. A request of one row reads its pages, and so does one
whose context is not above topk (`dense.py`): there is nothing to reuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention import kernels
from attention.batch import AttentionBatch, Part
from attention.counters import PrefillCounters
from attention.dense import page_runs
from attention.geometry import Geometry
from attention.layouts import LatentCache
from attention.scratch import Scratch
from attention.shards import ShardedCache, Shards
from attention.sizes import LATENT_DIM, NOPE_DIM, PAGE_SIZE, ROPE_DIM
from attention.topk_remap import Int32s, PagedRows, WorkspaceRows, remap
from attention.workspace import Group, plan_groups, workspace_factor, workspace_rows


@dataclass(frozen=True, slots=True)
class Paged:
    """Query rows `at` that read their pages."""

    at: slice | Tensor
    batch: AttentionBatch


@dataclass(frozen=True, slots=True)
class Gathered:
    """Query rows `at` of a group: rows of the cache to gather, rows of the workspace that this makes, and for the remap
    the group's page table, the first row of each request, its context length, and the request of each query row."""

    at: slice | Tensor
    slots: Tensor
    rows: int
    pages: PagedRows
    starts: WorkspaceRows
    lengths: Int32s
    owner: Int32s


@dataclass(slots=True)
class _Plan:
    batch: AttentionBatch
    pieces: list[Paged | Gathered] = field(default_factory=list)


class Workspace:
    """The slot of one rank.

    NOTE: under decode context parallel `attend` is a collective call: every rank has the same batch.

    Args:
        geometry: sizes; knob `sparse_mla_prefill_workspace_factor` (None: vLLM's rule).
        max_rows: R in place of the knob's.

    Raises:
        ValueError: a factor below 2.
    """

    READS_SHARDS = READS_PARTS = True

    def __init__(self, geometry: Geometry, max_rows: int | None = None) -> None:
        factor = geometry.knobs.get("sparse_mla_prefill_workspace_factor")
        self.factor = workspace_factor(geometry.max_model_len) if factor is None else int(factor)
        rows = workspace_rows(geometry.max_model_len, self.factor) if max_rows is None else max_rows
        self.shards = geometry.shards
        self.rows = geometry.step_rows(rows if self.shards is None else max(rows, geometry.context_rows))
        self.topk = geometry.topk
        self.dtype = row_dtype(geometry.latent_kind, geometry.dtype)
        share = 0 if self.shards is None else self.rows // self.shards.size
        need = (self.rows + share) * LATENT_DIM * self.dtype.itemsize
        geometry.afford(need, "the prefill workspace", "--sparse-mla-prefill-workspace-factor")
        # NOTE: pages of this buffer become real memory when they are first written.
        self.buffer = torch.empty((self.rows, LATENT_DIM), dtype=self.dtype)
        self.own = torch.empty((share, LATENT_DIM), dtype=self.dtype)
        self.counters = PrefillCounters()
        self._plan: _Plan | None = None

    def facts(self) -> dict[str, Any]:
        """Buffer in bytes, factor and counters, as plain JSON values."""
        return {
            "sparse_mla_prefill_workspace_factor": self.factor,
            "prefill_workspace_rows": self.rows,
            "prefill_workspace_bytes": (self.buffer.numel() + self.own.numel()) * self.buffer.element_size(),
        } | self.counters.facts()

    def attend(
        self,
        batch: AttentionBatch,
        q_nope: Tensor,
        q_rope: Tensor,
        cache: LatentCache,
        topk_ids: Tensor,
        scale: float,
        scratch: Scratch,
    ) -> Tensor:
        """Sparse MLA over request-local positions; arguments, result and errors as `paged.attend`.

        Raises:
            ValueError: also where cache and q need rows of another float type than the geometry's, or where an id of
                a gathered row is outside its request's context.
        """
        self._check(batch, q_nope, q_rope, cache, topk_ids)
        n, heads = q_nope.shape[:2]
        out = torch.empty((n, heads, NOPE_DIM), dtype=q_nope.dtype)
        lse = torch.empty((n, heads), dtype=torch.float32)
        ids = topk_ids.contiguous()
        for piece in self._planned(batch).pieces:
            scratch.clear()
            chosen = kernels.active(q_nope)
            run = chosen.attend
            if isinstance(piece, Paged):
                at = piece.at
                if isinstance(cache, ShardedCache):
                    out[at], lse[at] = cache.attend(piece.batch, q_nope[at], q_rope[at], ids[at], scale, scratch)
                else:
                    run(piece.batch, q_nope[at], q_rope[at], cache, ids[at], scale, scratch, out[at], lse[at])
                continue
            gathered = LatentCache(self.buffer[: piece.rows], str(self.dtype).removeprefix("torch."))
            if self.shards is None:
                chosen.gather(cache, piece.slots, gathered.buffer)
            else:
                own = self.own[: piece.slots.shape[0]]
                chosen.gather(cache, piece.slots, own)
                self.shards.gather(own, gathered.buffer)
            self.counters.gathers += 1
            self.counters.workspace_rows += piece.rows
            mine = piece.at
            moved = self._moved(piece, ids[mine])
            if isinstance(mine, slice):
                run(None, q_nope[mine], q_rope[mine], gathered, moved, scale, scratch, out[mine], lse[mine])
            elif mine.numel():
                seen, weight = out.new_empty((mine.numel(), *out.shape[1:])), lse.new_empty((mine.numel(), heads))
                run(None, q_nope[mine], q_rope[mine], gathered, moved, scale, scratch, seen, weight)
                out[mine] = seen
        out[batch.rows :].zero_()
        return out

    def _check(
        self, batch: AttentionBatch, q_nope: Tensor, q_rope: Tensor, cache: LatentCache, topk_ids: Tensor
    ) -> None:
        n, heads = q_nope.shape[:2]
        if n < batch.rows or q_nope.shape != (n, heads, NOPE_DIM):
            raise ValueError(
                f"q_nope: [n, heads, {NOPE_DIM}], n at least {batch.rows}, is needed, not {list(q_nope.shape)}"
            )
        if q_rope.shape != (n, heads, ROPE_DIM) or q_rope.dtype != q_nope.dtype:
            raise ValueError(f"q_rope: [{n}, {heads}, {ROPE_DIM}] {q_nope.dtype} is needed, not {list(q_rope.shape)}")
        if topk_ids.dim() != 2 or topk_ids.shape[0] != n or topk_ids.dtype != torch.int32:
            raise ValueError(f"topk_ids: int32 [{n}, k] is needed, not {list(topk_ids.shape)} {topk_ids.dtype}")
        if row_dtype(cache.kind, q_nope.dtype) != self.dtype:
            raise ValueError(f"cache: {cache.kind} rows for {q_nope.dtype} queries; the workspace holds {self.dtype}")

    def _moved(self, piece: Gathered, ids: Tensor) -> Tensor:
        """Workspace rows of request-local ids. Raises ValueError for an id past its request's context."""
        past = ids.numpy().max(axis=1, initial=-1) >= piece.lengths[piece.owner]
        if past.any():
            rows = piece.at.start + past.argmax() if isinstance(piece.at, slice) else piece.at[int(past.argmax())]
            raise ValueError(f"topk_ids: row {int(rows)} has an id outside its context")
        placement = None if self.shards is None else self.shards.placement
        moved, _ = remap(ids.numpy(), piece.owner, piece.owner, piece.pages, piece.starts, placement)
        return torch.from_numpy(moved)

    def _planned(self, batch: AttentionBatch) -> _Plan:
        """Pieces of the step, made once whatever the number of layers."""
        if self._plan is None or self._plan.batch is not batch:
            self._plan = _Plan(batch)
            if self.shards is not None and batch.of is not None:
                self._plan.pieces.extend(self._parted(batch, batch.of, self.shards))
                return self._plan
            starts = batch.query_start.tolist()
            for paged, first, stop in page_runs(batch, self.topk):
                a, b = starts[first], starts[stop]
                if paged:
                    self._plan.pieces.append(Paged(slice(a, b), batch.part(a, b)))
                    self.counters.paged_rows += b - a
                    continue
                self.counters.gathered_rows += b - a
                lengths = batch.seq_lens[first:stop].tolist()
                if self.shards is not None:
                    lengths = [self.shards.rounds(length) for length in lengths]
                for group in plan_groups(lengths, self.rows, first):
                    self._plan.pieces.append(self._gathered(batch, group))
        return self._plan

    def _parted(self, batch: AttentionBatch, of: Part, shards: Shards) -> Iterator[Paged | Gathered]:
        """A prefill rank's rows over contexts of which it holds a share. What every rank runs is merged; of the other
        requests every rank gathers all contexts, in the same groups, also those that it has no rows of."""
        entry = batch.row_requests()
        owner = of.requests[entry]
        merged = torch.nonzero(of.everywhere[owner]).squeeze(1)
        self.counters.paged_rows += merged.numel()
        self.counters.gathered_rows += batch.rows - merged.numel()
        if merged.numel():
            kept, rows = np.unique(entry[merged].numpy(), return_counts=True)
            starts = torch.from_numpy(np.append(0, rows.cumsum()).astype(np.int32))
            yield Paged(merged, AttentionBatch(starts, batch.seq_lens[kept], batch.page_table[kept]))
        cut = torch.nonzero(~of.everywhere & (of.whole.query_start.diff() > 0)).squeeze(1)
        if not cut.numel():
            return
        # The requests that are cut, as a step of their own; its query rows play no part.
        step = AttentionBatch(
            torch.zeros(cut.numel() + 1, dtype=torch.int32), of.whole.seq_lens[cut], of.whole.page_table[cut]
        )
        place = torch.full((of.whole.requests,), -1).index_copy_(0, cut, torch.arange(cut.numel()))[owner].numpy()
        for group in plan_groups([shards.rounds(length) for length in step.seq_lens.tolist()], self.rows):
            mine = np.flatnonzero((place >= group.request_start) & (place < group.request_stop))
            request = (place[mine] - group.request_start).astype(np.int32)
            yield replace(self._gathered(step, group), at=torch.from_numpy(mine), owner=request)

    def _gathered(self, batch: AttentionBatch, group: Group) -> Gathered:
        """What to gather for a group, and how its ids are mapped."""
        starts, members = batch.query_start.tolist(), slice(group.request_start, group.request_stop)
        requests = range(group.request_start, group.request_stop)
        at = np.asarray(group.starts, dtype=np.int32)
        table = batch.page_table[members]
        if self.shards is None:
            slots = torch.cat([batch.context_slots(r) for r in requests])
            pages, places = PagedRows(table.numpy(), PAGE_SIZE, PAGE_SIZE), WorkspaceRows(at)
        else:
            slots = torch.cat([self.shards.context_rows(batch, r) for r in requests])
            pages, places = self.shards.pages(table), WorkspaceRows(at // self.shards.size, slots.shape[0])
        return Gathered(
            slice(starts[group.request_start], starts[group.request_stop]),
            slots,
            group.rows,
            pages,
            places,
            batch.seq_lens[members].numpy(),
            np.repeat(np.arange(len(at), dtype=np.int32), batch.query_start.diff()[members].numpy()),
        )


def row_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """Float type in which a cache of ``kind`` meets queries of ``dtype``: bfloat16 where both have no more bits."""
    return torch.bfloat16 if dtype == torch.bfloat16 and kind != "float32" else torch.float32
