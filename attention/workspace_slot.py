"""The ``workspace`` prefill-KV slot: contexts gathered and up-converted once a layer, then read by remapped ids.

    step         | decode | dense | prompt 0 | prompt 1 | prompt 2 |
                     |       |         \\_____ group 0 ____/    |        sum of contexts <= R       workspace.py
                   pages   pages            gather             gather
                                 workspace  | context 0 | context 1 |   R rows of 576, one float type
    ids of a row of prompt 1     p  ->  start[1] + p                                           topk_remap.py
    sparse MLA                   over workspace rows instead of pages

    R = min(factor * max_model_len, what a step can fill)

One buffer serves all layers and steps. Its rows hold the values that `paged` takes from the cache in place, and they
are summed in the same order, so the result has the same bits. A request of one row reads its pages, and so does one
whose context is not above topk (`dense.py`): there is nothing to reuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention import kernels
from attention.batch import PAGE_SIZE, AttentionBatch
from attention.dense import page_runs
from attention.geometry import Geometry
from attention.layouts import LATENT_DIM, NOPE_DIM, ROPE_DIM, LatentCache
from attention.scratch import Scratch
from attention.topk_remap import Int32s, PagedRows, WorkspaceRows, remap
from attention.workspace import plan_groups, workspace_factor, workspace_rows


@dataclass(frozen=True, slots=True)
class Paged:
    """Query rows [first, stop) that read their pages."""

    first: int
    stop: int
    batch: AttentionBatch


@dataclass(frozen=True, slots=True)
class Gathered:
    """Query rows [first, stop) of a group: cache slots of its contexts, and for the remap the group's page table,
    the first workspace row of each request, and the request of each row."""

    first: int
    stop: int
    slots: Tensor
    pages: Int32s
    starts: Int32s
    owner: Int32s


@dataclass(slots=True)
class Counters:
    """Since start: query rows, once a step; contexts gathered, in rows and once a layer."""

    paged_rows: int = 0
    gathered_rows: int = 0
    gathers: int = 0
    workspace_rows: int = 0


@dataclass(slots=True)
class _Plan:
    batch: AttentionBatch
    pieces: list[Paged | Gathered] = field(default_factory=list)


class Workspace:
    """The slot of one rank.

    Args:
        geometry: sizes; knob `sparse_mla_prefill_workspace_factor` (None: vLLM's rule).
        max_rows: R in place of the knob's.

    Raises:
        ValueError: a factor below 2.
    """

    def __init__(self, geometry: Geometry, max_rows: int | None = None) -> None:
        factor = geometry.knobs.get("sparse_mla_prefill_workspace_factor")
        self.factor = workspace_factor(geometry.max_model_len) if factor is None else int(factor)
        rows = workspace_rows(geometry.max_model_len, self.factor) if max_rows is None else max_rows
        self.rows = geometry.step_rows(rows)
        self.topk = geometry.topk
        self.dtype = row_dtype(geometry.latent_kind, geometry.dtype)
        need = self.rows * LATENT_DIM * self.dtype.itemsize
        geometry.afford(need, "the prefill workspace", "--sparse-mla-prefill-workspace-factor")
        # NOTE: pages of this buffer become real memory when they are first written.
        self.buffer = torch.empty((self.rows, LATENT_DIM), dtype=self.dtype)
        self.counters = Counters()
        self._plan: _Plan | None = None

    def facts(self) -> dict[str, Any]:
        """Buffer in bytes, factor and counters, as plain JSON values."""
        done = self.counters
        return {
            "sparse_mla_prefill_workspace_factor": self.factor,
            "prefill_workspace_rows": self.rows,
            "prefill_workspace_bytes": self.buffer.numel() * self.buffer.element_size(),
            "prefill_rows": {"paged": done.paged_rows, "gathered": done.gathered_rows},
            "prefill_work": {"gathers": done.gathers, "workspace_rows": done.workspace_rows},
        }

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
            at = slice(piece.first, piece.stop)
            scratch.clear()
            run = kernels.active().attend
            if isinstance(piece, Paged):
                run(piece.batch, q_nope[at], q_rope[at], cache, ids[at], scale, scratch, out[at], lse[at])
                continue
            rows = piece.slots.shape[0]
            gathered = LatentCache(self.buffer[:rows], str(self.dtype).removeprefix("torch."))
            kernels.active().gather(cache, piece.slots, gathered.buffer)
            self.counters.gathers += 1
            self.counters.workspace_rows += rows
            moved = self._moved(piece, ids[at])
            run(None, q_nope[at], q_rope[at], gathered, moved, scale, scratch, out[at], lse[at])
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

    @staticmethod
    def _moved(piece: Gathered, ids: Tensor) -> Tensor:
        """Workspace rows of request-local ids. Raises ValueError for an id past its request's context."""
        moved, _ = remap(
            ids.numpy(),
            piece.owner,
            piece.owner,
            PagedRows(piece.pages, PAGE_SIZE, PAGE_SIZE),
            WorkspaceRows(piece.starts),
        )
        ends = np.append(piece.starts[1:], np.int32(piece.slots.shape[0]))
        past = moved.max(axis=1, initial=-1) >= ends[piece.owner]
        if past.any():
            raise ValueError(f"topk_ids: row {piece.first + int(past.argmax())} has an id outside its context")
        return torch.from_numpy(moved)

    def _planned(self, batch: AttentionBatch) -> _Plan:
        """Pieces of the step, made once whatever the number of layers."""
        if self._plan is None or self._plan.batch is not batch:
            self._plan = _Plan(batch)
            starts = batch.query_start.tolist()
            for paged, first, stop in page_runs(batch, self.topk):
                a, b = starts[first], starts[stop]
                if paged:
                    self._plan.pieces.append(Paged(a, b, batch.part(a, b)))
                    self.counters.paged_rows += b - a
                    continue
                self.counters.gathered_rows += b - a
                for group in plan_groups(batch.seq_lens[first:stop].tolist(), self.rows, first):
                    members = slice(group.request_start, group.request_stop)
                    queries = batch.query_start.diff()[members].numpy()
                    self._plan.pieces.append(
                        Gathered(
                            starts[group.request_start],
                            starts[group.request_stop],
                            torch.cat([batch.context_slots(r) for r in range(group.request_start, group.request_stop)]),
                            batch.page_table[members].numpy(),
                            np.asarray(group.starts, dtype=np.int32),
                            np.repeat(np.arange(len(group.starts), dtype=np.int32), queries),
                        )
                    )
        return self._plan


def row_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """Float type in which a cache of ``kind`` meets queries of ``dtype``: bfloat16 where both have no more bits."""
    return torch.bfloat16 if dtype == torch.bfloat16 and kind != "float32" else torch.float32
