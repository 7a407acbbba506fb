"""The ``qchunk`` indexer slot: pack by request under two caps, then cut along queries; share rows over TP ranks.

    requests of a step   | decode | dense | 3 long prompts ... |
                             |       |         |
                          pages   0..pos    groups of requests -> keys gathered once -> query slices, top-k each

    keys     fixed buffer of W rows           W = min(max_model_len * 8 * factor, what a step can fill), split.py
    logits   fixed buffer within the cap      | query slice: rows x sum N ........ | spare |
                                              | running best | key slice ... | spare |       one row above the cap

A query slice is scored 64 rows at a time, so the buffer holds 64 rows where the cap would allow more.

A request of one row reads its pages like `ragged`; one whose context is not above topk is not scored (`dense.py`). All
others are cut by `split_chunks`. With the strict cap (default) a row longer than the logits buffer, or a context longer
than W, is scored in key slices with a running top-k; without it such a chunk takes a larger buffer for itself, as vLLM
does. Ids equal those of `ragged` bit for bit, whatever the caps.

TP row shard: each rank scores a cost-balanced window of the gathered rows (`parallel.row_shard`) and the ids are
exchanged. It starts at --indexer-tp-shard-min-rows, or where the cost rule of `shares.py` says that it pays.

Source of caps, packing and shard: vLLM 0.33, facts sections 2 and 4; key slices and the cost rule are our own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention import kernels
from attention.batch import AttentionBatch
from attention.counters import IndexerCounters
from attention.dense import page_runs
from attention.geometry import Geometry
from attention.indexer.metadata import ChunkMetadata, Int32s, KeyGroup, chunk_metadata
from attention.indexer.ragged import check
from attention.indexer.shares import Rates, rank_sizes
from attention.indexer.split import LOGIT_BYTES, scratch_shape, scratch_width, split_chunks, workspace_rows
from attention.kernels import cpu_chunk
from attention.kernels.cpu_chunk import SPARE, TILE, Span
from attention.layouts import IndexCache
from attention.scratch import Scratch
from attention.workspace import workspace_factor
from parallel.row_shard import narrow, rank_window

PRODUCTS_PER_SECOND = 4e10
"""Multiply-adds of scoring a second and rank, one core with 512-bit registers, float32."""
BYTES_PER_SECOND = 1e9
"""Ids exchanged a second between processes of one machine."""
LATENCY_SECONDS = 1e-3
"""One exchange without its bytes."""


@dataclass(frozen=True, slots=True)
class Paged:
    """Rows [first, stop) that read their pages: decoding rows and dense requests."""

    first: int
    stop: int
    batch: AttentionBatch


@dataclass(slots=True)
class Gathered:
    """Rows [first, stop) of requests whose keys are gathered; `sizes` are the rows of each rank, None unshared."""

    first: int
    stop: int
    chunks: list[ChunkMetadata]
    slots: dict[int, Tensor]  # first request of a group -> cache slots of the group's keys, int64
    sizes: list[int] | None = None


@dataclass(slots=True)
class _Plan:
    batch: AttentionBatch
    pieces: list[Paged | Gathered] = field(default_factory=list)


class QChunk:
    """The slot of one rank.

    Args:
        geometry: sizes and knobs: `sparse_indexer_max_logits_mb`, `indexer_strict_cap`,
            `sparse_mla_prefill_workspace_factor` (None: vLLM's rule), `indexer_tp_shard_min_rows` (None: cost rule).
        max_logits_bytes, max_rows: caps in bytes and rows in place of the knobs'.

    Raises:
        ValueError: a logits cap that does not hold one score beside the running best of a row.
    """

    def __init__(self, geometry: Geometry, max_logits_bytes: int | None = None, max_rows: int | None = None) -> None:
        knobs = geometry.knobs
        self.topk = geometry.topk
        self.strict = bool(knobs.get("indexer_strict_cap", True))
        self.form = cpu_chunk.form(geometry.index_kind, geometry.index_dim, geometry.dtype)
        self.geometry = geometry
        factor = knobs.get("sparse_mla_prefill_workspace_factor") or workspace_factor(geometry.max_model_len)
        rows = workspace_rows(geometry.max_model_len, factor) if max_rows is None else max_rows
        self.rows = geometry.step_rows(rows)
        blocks = -(-self.rows // cpu_chunk.BLOCK)
        cap = int(knobs.get("sparse_indexer_max_logits_mb", 64)) << 20 if max_logits_bytes is None else max_logits_bytes
        spare = LOGIT_BYTES * (self.topk + SPARE)
        if cap < spare + LOGIT_BYTES:
            raise ValueError(
                f"--sparse-indexer-max-logits-mb: {cap} bytes do not hold one score beside the running best of a row "
                f"of {self.topk}; {spare + LOGIT_BYTES} are the least"
            )
        self.cap = cap - spare
        room = min(cap // LOGIT_BYTES, TILE * (scratch_width(self.rows) + self.topk + SPARE))
        key_bytes = self.form.key_bytes + (LOGIT_BYTES if self.form.scaled else 0)
        need = LOGIT_BYTES * room + blocks * cpu_chunk.BLOCK * key_bytes
        geometry.afford(need, "the indexer's workspace", "--sparse-mla-prefill-workspace-factor")
        # NOTE: pages of these buffers become real memory when they are first written.
        self.logits = torch.empty(room, dtype=torch.float32)
        self.keys = torch.empty(blocks * cpu_chunk.BLOCK * self.form.key_bytes, dtype=torch.uint8)
        self.scales = torch.empty(blocks * cpu_chunk.BLOCK if self.form.scaled else 0, dtype=torch.float32)
        self.counters = IndexerCounters()
        self._plan: _Plan | None = None

    def facts(self) -> dict[str, Any]:
        """Buffers in bytes, caps and counters, as plain JSON values."""
        return {
            "indexer_workspace_rows": self.rows,
            "indexer_workspace_bytes": self.keys.numel() + 4 * self.scales.numel(),
            "indexer_logits_bytes": LOGIT_BYTES * self.logits.numel(),
        } | self.counters.facts()

    def select(
        self,
        batch: AttentionBatch,
        q: Tensor,
        head_weights: Tensor,
        cache: IndexCache,
        topk: int,
        scratch: Scratch,
        out: Tensor | None = None,
    ) -> Tensor:
        """Top-k positions of each query row; arguments, result and errors as `ragged.select`.

        Raises:
            ValueError: also where topk, q's dtype or the cache's layout are not those of the geometry.
        """
        n = check(batch, q, head_weights, cache, topk)
        how = cpu_chunk.form(cache.kind, cache.dim, q.dtype)
        if topk != self.topk or how != self.form:
            raise ValueError(
                f"topk: {topk} ids of {cache.kind} keys for {q.dtype} queries; the slot was made for {self.topk} of "
                f"{self.geometry.index_kind} keys for {self.geometry.dtype}"
            )
        if out is None:
            out = torch.empty((n, topk), dtype=torch.int32)
        elif out.shape != (n, topk) or out.dtype != torch.int32 or not out.is_contiguous():
            raise ValueError(f"out: a contiguous int32 [{n}, {topk}] tensor is needed")
        q, head_weights = q.contiguous(), head_weights.contiguous()
        for piece in self._planned(batch).pieces:
            at = slice(piece.first, piece.stop)
            if isinstance(piece, Paged):
                scratch.clear()
                kernels.active(q).select(piece.batch, q[at], head_weights[at], cache, topk, scratch, out[at])
            else:
                self._gathered(piece, q, head_weights, cache, scratch, out)
                if piece.sizes is not None and self.geometry.exchange is not None:
                    self.geometry.exchange(out[at], piece.sizes)
        if batch.rows < n:
            out[batch.rows :].fill_(-1)
        return out

    # Planning: once a step, whatever the number of layers ------------------------------------------------------------

    def _planned(self, batch: AttentionBatch) -> _Plan:
        if self._plan is None or self._plan.batch is not batch:
            self._plan = _Plan(batch)
            starts = batch.query_start.tolist()
            for paged, first, stop in page_runs(batch, self.topk):
                a, b = starts[first], starts[stop]
                if paged:
                    self._plan.pieces.append(Paged(a, b, batch.part(a, b)))
                    self.counters.paged_rows += b - a
                else:
                    self._plan.pieces.append(self._cut(batch, first, stop, a))
                    self.counters.gathered_rows += b - a
        return self._plan

    def _cut(self, batch: AttentionBatch, first: int, stop: int, row: int) -> Gathered:
        """Chunks of the requests [first, stop), whose first query row is ``row``."""
        ends = batch.seq_lens[first:stop].tolist()
        rows = batch.query_start[first : stop + 1].diff().tolist()
        chunks = split_chunks(ends, rows, self.rows, self.cap, strict_cap=self.strict, fixed_shapes=True)
        made = [chunk for chunk in chunk_metadata(chunks, ends, rows, first_token=row) if chunk is not None]
        slots = {
            group.request_start: torch.cat(
                [batch.context_slots(first + r) for r in range(group.request_start, group.request_stop)]
            )
            for group in {chunk.group.request_start: chunk.group for chunk in made}.values()
        }
        sizes = self._shares(ends, rows)
        if sizes is not None:
            self.counters.sharded_rows += sum(rows)
        return Gathered(row, row + sum(rows), made, slots, sizes)

    def _shares(self, ends: list[int], rows: list[int]) -> list[int] | None:
        """Rows of each rank, None where every rank scores all."""
        return rank_sizes(self.geometry, ends, rows, Rates(PRODUCTS_PER_SECOND, BYTES_PER_SECOND, LATENCY_SECONDS))

    # Execution: once a layer -----------------------------------------------------------------------------------------

    def _gathered(
        self, piece: Gathered, q: Tensor, weights: Tensor, cache: IndexCache, scratch: Scratch, out: Tensor
    ) -> None:
        whole = (0, piece.stop - piece.first)
        window = whole if piece.sizes is None else rank_window(piece.sizes, self.geometry.rank)
        held: KeyGroup | None = None
        keys, scales = self.keys, self.scales
        for chunk in piece.chunks:
            mine = narrow(chunk.token_start - piece.first, chunk.token_stop - piece.first, window)
            if mine is None:
                continue
            self.counters.chunks += 1
            if not chunk.gathers_slices and held is not chunk.group:
                keys, scales = self._gather(cache, piece.slots[chunk.group.request_start], scratch)
                held = chunk.group
            start, stop = mine[0] + piece.first, mine[1] + piece.first
            if chunk.key_slices:
                self._slices(
                    chunk, piece.slots[chunk.group.request_start], start, stop, q, weights, cache, scratch, out
                )
                if chunk.gathers_slices:
                    held = None
                continue
            rows = slice(start - chunk.token_start, stop - chunk.token_start)
            low, high = _ints(chunk.cu_seqlen_ks[rows]), _ints(chunk.cu_seqlen_ke[rows])
            span = Span(low, high, torch.zeros_like(low), high - low)
            stride, logits = self._view(chunk.group.local_keys, min(stop - start, TILE))
            scratch.clear()
            at = slice(start, stop)
            cpu_chunk.select_keys(
                q[at], weights[at], self.form, keys, scales, span, self.topk, logits, stride, scratch, out[at]
            )

    def _slices(
        self,
        chunk: ChunkMetadata,
        slots: Tensor,
        start: int,
        stop: int,
        q: Tensor,
        weights: Tensor,
        cache: IndexCache,
        scratch: Scratch,
        out: Tensor,
    ) -> None:
        """Rows [start, stop) of a chunk whose keys are scored slice by slice with a running top-k."""
        longest = max(b - a for a, b in chunk.key_slices)
        stride = longest + self.topk + SPARE
        at_once = max(1, min(TILE, self.logits.numel() // stride))
        seen = _ints(chunk.cu_seqlen_ke - chunk.cu_seqlen_ks)
        keys, scales = self.keys, self.scales
        for first in range(start, stop, at_once):
            last = min(first + at_once, stop)
            at, rows = slice(first, last), slice(first - chunk.token_start, last - chunk.token_start)
            for a, b in chunk.key_slices:
                if a > 0 and int(seen[rows][-1]) <= a:
                    break
                low, high = (_ints(bound[rows]) for bound in chunk.slice_bounds(a, b))
                if chunk.gathers_slices:
                    keys, scales = self._gather(cache, slots[a:b], scratch)
                else:
                    low, high = low + a, high + a
                span = Span(low, high, seen[rows].clamp(max=a), seen[rows], a)
                scratch.clear()
                self.counters.key_slices += 1
                cpu_chunk.select_keys(
                    q[at], weights[at], self.form, keys, scales, span, self.topk, self.logits, stride, scratch, out[at]
                )

    def _gather(self, cache: IndexCache, slots: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Keys and scales of ``slots``, in the fixed buffers where they fit (always, with the strict cap)."""
        keys, scales = self.keys, self.scales
        room = -(-slots.shape[0] // cpu_chunk.BLOCK) * cpu_chunk.BLOCK
        if room * self.form.key_bytes > keys.numel():
            keys = torch.empty(room * self.form.key_bytes, dtype=torch.uint8)
            scales = torch.empty(room if self.form.scaled else 0, dtype=torch.float32)
        scratch.clear()
        self.counters.gathers += 1
        cpu_chunk.gather_keys(cache, slots, self.form, keys, scales, scratch)
        return keys, scales

    def _view(self, keys: int, rows: int) -> tuple[int, Tensor]:
        """Floats between two rows of scores over ``keys``, and where they go."""
        elements = self.cap // LOGIT_BYTES
        stride = scratch_shape(keys, elements)[1] if keys <= elements else keys
        if rows * stride + SPARE <= self.logits.numel():
            return stride, self.logits
        return stride, torch.empty(rows * stride + SPARE, dtype=torch.float32)


def _ints(values: Int32s) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
