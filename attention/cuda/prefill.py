"""The ``workspace`` prefill-KV slot on a GPU: contexts up-converted once a layer, then read by a sparse MLA kernel.

step         | gathered run: prompt 0, prompt 1 | dense | single ... |
                 group: sum of contexts <= R        pages
per group    cache rows (656 or 576 bytes) -> workspace [R, 576] bfloat16 -> ids + start[request] -> sparse MLA

R = min(factor * max_model_len, what a step can fill), groups by `attention.workspace.plan_groups`, as on CPU

heads        | h0 .. h15 | 0 ................ 0 |       padded to what the kernel takes, cut off again
out, lse     rows without an id: 0 and -inf, whatever the kernel leaves there
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from attention.counters import PrefillCounters
from attention.cuda.calls import Calls
from attention.cuda.step import Step, put
from attention.geometry import Geometry
from attention.layouts import LatentCache
from attention.sizes import LATENT_DIM, NOPE_DIM
from attention.workspace import plan_groups, workspace_bytes, workspace_factor, workspace_rows


@dataclass(frozen=True, slots=True)
class Piece:
    """Query rows [first, stop) on the device: page table rows of their requests, the request of each, valid ids a row.

    `slots` and `starts`, the cache slots of the contexts and the first workspace row of each request, where the rows
    are gathered; None where they read pages.
    """

    first: int
    stop: int
    pages: Tensor
    owner: Tensor
    counts: Tensor
    slots: Tensor | None = None
    starts: Tensor | None = None


@dataclass(slots=True)
class _Plan:
    step: Step
    pieces: list[Piece] = field(default_factory=list)


class GatheredPrefill:
    """The slot of one rank.

    Args:
        geometry: sizes; knob `sparse_mla_prefill_workspace_factor` (None: vLLM's rule).
        calls: of the device.
        device: of every tensor.
        max_rows: R in place of the knob's.

    Raises:
        ValueError: a factor below 2, or too little free memory.
    """

    def __init__(self, geometry: Geometry, calls: Calls, device: torch.device, max_rows: int | None = None) -> None:
        factor = geometry.knobs.get("sparse_mla_prefill_workspace_factor")
        self.factor = workspace_factor(geometry.max_model_len) if factor is None else int(factor)
        rows = workspace_rows(geometry.max_model_len, self.factor) if max_rows is None else max_rows
        self.rows = geometry.step_rows(rows)
        self.topk, self.calls, self.device = geometry.topk, calls, device
        geometry.afford(workspace_bytes(self.rows), "the prefill workspace", "--sparse-mla-prefill-workspace-factor")
        self.buffer = torch.empty((self.rows, LATENT_DIM), dtype=torch.bfloat16, device=device)
        self.counters = PrefillCounters()
        self._plan: _Plan | None = None

    def facts(self) -> dict[str, Any]:
        """Buffer in bytes, factor and counters, under the names of the CPU slot."""
        return {
            "sparse_mla_prefill_workspace_factor": self.factor,
            "prefill_workspace_rows": self.rows,
            "prefill_workspace_bytes": workspace_bytes(self.rows),
        } | self.counters.facts()

    @overload
    def attend(
        self,
        step: Step,
        q: Tensor,
        cache: LatentCache,
        topk_ids: Tensor,
        scale: float,
        return_lse: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def attend(
        self, step: Step, q: Tensor, cache: LatentCache, topk_ids: Tensor, scale: float, return_lse: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...
    def attend(
        self, step: Step, q: Tensor, cache: LatentCache, topk_ids: Tensor, scale: float, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Sparse MLA over request-local positions.

        Args:
            step: the same object for every layer of a step, so that it is planned once.
            q: bfloat16 [n, heads, 576], absorbed part first, n >= step.rows.
            cache: latent rows, the new ones stored.
            topk_ids: int32 [rows or more, topk], valid ids first, then -1.
            scale: softmax scale.
            return_lse: also return the natural log-sum-exp.

        Returns:
            bfloat16 [n, heads, 512], and float32 [n, heads] if asked. Padding rows are 0, their log-sum-exp -inf.

        Raises:
            ValueError: naming the argument that does not fit.
        """
        n = q.shape[0]
        if q.dim() != 3 or q.shape[2] != LATENT_DIM or q.dtype != torch.bfloat16 or n < step.rows:
            raise ValueError(f"q: bfloat16 [{step.rows} or more, heads, {LATENT_DIM}] is needed, not {list(q.shape)}")
        if topk_ids.dim() != 2 or topk_ids.shape[0] < step.rows or topk_ids.dtype != torch.int32:
            raise ValueError(f"topk_ids: int32 [{step.rows} or more, k] is needed, not {list(topk_ids.shape)}")
        if topk_ids.shape[1] != self.topk:
            raise ValueError(f"topk_ids: {topk_ids.shape[1]} ids a row, the slot was made for {self.topk}")
        heads = q.shape[1]
        out = q.new_zeros((n, heads, NOPE_DIM))
        lse = torch.full((n, heads), -math.inf, dtype=torch.float32, device=q.device)
        padded = pad_heads(q, self.calls.head_multiple)
        for piece in self._planned(step).pieces:
            at = slice(piece.first, piece.stop)
            part, ids = padded[at], topk_ids[at].contiguous()
            if piece.slots is None or piece.starts is None:
                found, sums = self.calls.attend_pages(part, cache, piece.pages, piece.owner, ids, piece.counts, scale)
            else:
                rows = self.buffer[: piece.slots.shape[0]]
                self.calls.gather_rows(cache, piece.slots, rows)
                self.counters.gathers += 1
                self.counters.workspace_rows += rows.shape[0]
                moved = torch.empty_like(ids)
                self.calls.remap(ids, piece.owner, piece.starts, piece.pages, moved)
                found, sums = self.calls.attend_rows(part, rows, moved, piece.counts, scale)
            some = (piece.counts > 0).unsqueeze(1)
            out[at] = torch.where(some.unsqueeze(2), found[:, :heads], 0.0)
            if return_lse:
                lse[at] = torch.where(some, sums[:, :heads], -math.inf)
        return (out, lse) if return_lse else out

    def _planned(self, step: Step) -> _Plan:
        """Pieces of the step, made once whatever the number of layers."""
        if self._plan is None or self._plan.step is not step:
            self._plan = _Plan(step)
            for kind, first, stop in step.runs(self.topk):
                if kind != "gathered":
                    self._plan.pieces.append(self._piece(step, first, stop))
                    self.counters.paged_rows += sum(step.query_lens[first:stop])
                    continue
                self.counters.gathered_rows += sum(step.query_lens[first:stop])
                for group in plan_groups(step.seq_lens[first:stop], self.rows, first):
                    a, b = group.request_start, group.request_stop
                    starts = put(np.asarray(group.starts, dtype=np.int32), self.device)
                    self._plan.pieces.append(self._piece(step, a, b, step.context_slots(a, b), starts))
        return self._plan

    def _piece(
        self, step: Step, first: int, stop: int, slots: Tensor | None = None, starts: Tensor | None = None
    ) -> Piece:
        rows = step.starts
        owner = np.repeat(np.arange(stop - first, dtype=np.int32), step.query_lens[first:stop])
        counts = np.minimum(step.seen(first, stop), np.int32(self.topk))
        pages = step.page_table[first:stop].contiguous()
        return Piece(rows[first], rows[stop], pages, put(owner, self.device), put(counts, self.device), slots, starts)


def pad_heads(q: Tensor, multiple: int) -> Tensor:
    """q [n, heads, d] with zero heads behind, up to a multiple of `multiple`; q itself where nothing is missing."""
    missing = -q.shape[1] % multiple
    if missing == 0:
        return q
    padded = q.new_zeros((q.shape[0], q.shape[1] + missing, q.shape[2]))
    padded[:, : q.shape[1]] = q
    return padded
