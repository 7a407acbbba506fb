"""The ``qchunk`` indexer slot on a GPU: the chunks of the CPU slot around a library's scoring call and top-k.

    step        | gathered run                              | dense    | single       |
    per group   keys of its requests gathered once into W rows x (128 + 4) bytes, reused by its query slices
    per slice   scores [rows, keys] within the cap -> top-k at once -> ids of the rows
    dense       ids 0 .. position, unscored                 single: scores from the pages, then top-k

    W, cap, packing, cutting: `attention.indexer.split`; ks, ke: `attention.indexer.metadata`, as on CPU

A row above the cap, or a context above W, is scored in key slices. Candidates stand in the order of their positions:

    | best of the keys before a: min(a, k) ids | best of the slice [a, b) |   -> k best, ties to the lowest position

Scores that a library allocates itself (DeepGEMM) are bounded by the cut, not by a buffer; it may pad each row of them
to a multiple of 256 columns, which the cap does not count (vLLM's does not either).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.counters import IndexerCounters
from attention.cuda.calls import Calls
from attention.cuda.step import Kind, Step, put
from attention.geometry import Geometry
from attention.indexer.metadata import ChunkMetadata, chunk_metadata
from attention.indexer.shares import GPU, rank_sizes
from attention.indexer.split import (
    DEFAULT_MAX_LOGITS_MB,
    LOGIT_BYTES,
    Chunk,
    scratch_width,
    split_chunks,
    workspace_bytes,
    workspace_rows,
)
from attention.layouts import IndexCache
from attention.sizes import INDEX_DIM, PAGE_SIZE
from attention.workspace import workspace_factor
from parallel.row_shard import narrow, rank_window

CANDIDATE_FLOATS = 8
"""Words a row and id beside a slice's scores: the running scores, ids and scores of the slice, both of the two joined,
and the merged ids; the running ids are the result itself."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [first, stop) that need no gathered keys; `seen` int32 on the device, `width` its largest value."""

    kind: Kind
    first: int
    stop: int
    seen: Tensor
    width: int
    pages: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """One request group on the device: slots of its keys int64 [n], and ks, ke int32 of all its rows from `first`."""

    slots: Tensor
    ks: Tensor
    ke: Tensor
    first: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rows [first, stop) whose keys are gathered; `sizes` are the rows of each rank, None unshared."""

    first: int
    stop: int
    chunks: list[ChunkMetadata]
    groups: dict[int, Bounds]  # first request of a group
    sizes: list[int] | None


@dataclass(slots=True)
class _Plan:
    step: Step
    pieces: list[Rows | Gathered] = field(default_factory=list)


class ChunkedIndexer:
    """The slot of one rank.

    Args:
        geometry: sizes and knobs, as for `attention.indexer.qchunk.QChunk`; `dtype` and `index_kind` are not read.
        calls: of the device.
        device: of every tensor.
        max_logits_bytes, max_rows: caps in bytes and rows in place of the knobs'.

    Raises:
        ValueError: a cap that does not hold one score beside the running best of a row, or too little free memory.
    """

    def __init__(
        self,
        geometry: Geometry,
        calls: Calls,
        device: torch.device,
        max_logits_bytes: int | None = None,
        max_rows: int | None = None,
    ) -> None:
        knobs = geometry.knobs
        self.geometry, self.calls, self.device, self.topk = geometry, calls, device, geometry.topk
        self.strict = bool(knobs.get("indexer_strict_cap", True))
        factor = knobs.get("sparse_mla_prefill_workspace_factor") or workspace_factor(geometry.max_model_len)
        self.rows = geometry.step_rows(workspace_rows(geometry.max_model_len, factor) if max_rows is None else max_rows)
        limit = int(knobs.get("sparse_indexer_max_logits_mb", DEFAULT_MAX_LOGITS_MB)) << 20
        cap = limit if max_logits_bytes is None else max_logits_bytes
        spare = LOGIT_BYTES * CANDIDATE_FLOATS * self.topk
        if cap < spare + LOGIT_BYTES:
            raise ValueError(
                f"--sparse-indexer-max-logits-mb: {cap} bytes do not hold one score beside the running best of a row "
                f"of {self.topk}; {spare + LOGIT_BYTES} are the least"
            )
        self.elements = (cap - spare) // LOGIT_BYTES
        need = cap + workspace_bytes(self.rows)
        geometry.afford(need, "the indexer's workspace", "--sparse-mla-prefill-workspace-factor")
        self.cap = cap
        self.keys = torch.empty((self.rows, INDEX_DIM), dtype=torch.float8_e4m3fn, device=device)
        self.scales = torch.empty(self.rows, dtype=torch.float32, device=device)
        self.room = torch.empty(0 if calls.allocates_scores else self.elements, dtype=torch.float32, device=device)
        self.counters = IndexerCounters()
        self.dense_rows = 0  # since start, once a step
        self._plan: _Plan | None = None

    def facts(self) -> dict[str, Any]:
        """Buffers in bytes, caps and counters, under the names of the CPU slot."""
        facts = self.counters.facts()
        facts["indexer_rows"]["dense"] = self.dense_rows
        return facts | {
            "indexer_workspace_rows": self.rows,
            "indexer_workspace_bytes": workspace_bytes(self.rows),
            "indexer_logits_bytes": self.cap,
        }

    def select(self, step: Step, q: Tensor, weights: Tensor, cache: IndexCache, out: Tensor | None = None) -> Tensor:
        """Top-k positions of each query row.

        Args:
            step: the same object for every layer of a step, so that it is planned once.
            q: float8_e4m3fn [n, H, 128], n >= step.rows. weights: float32 [n, H], q's scales folded in.
            cache: index keys, e4m3 pages, the new ones stored.
            out: int32 [n, topk] to fill.

        Returns:
            int32 [n, topk]: request-local positions, valid ones first, then -1. Padding rows are -1.

        Raises:
            ValueError: naming the argument that does not fit.
        """
        n = q.shape[0]
        if q.dim() != 3 or q.shape[2] != INDEX_DIM or q.dtype != torch.float8_e4m3fn or n < step.rows:
            raise ValueError(
                f"q: float8_e4m3fn [{step.rows} or more, heads, {INDEX_DIM}] is needed, not {list(q.shape)}"
            )
        if weights.shape != q.shape[:2] or weights.dtype != torch.float32:
            raise ValueError(f"weights: float32 {list(q.shape[:2])} is needed, not {list(weights.shape)}")
        if cache.kind != "fp8":
            raise ValueError(f"cache: fp8 index pages are needed on a GPU, not {cache.kind}")
        if out is None:
            out = torch.empty((n, self.topk), dtype=torch.int32, device=q.device)
        elif out.shape[1:] != (self.topk,) or out.shape[0] < n or out.dtype != torch.int32 or not out.is_contiguous():
            raise ValueError(f"out: a contiguous int32 [{n}, {self.topk}] tensor is needed")
        q, weights = q.contiguous(), weights.contiguous()
        for piece in self._planned(step).pieces:
            if isinstance(piece, Gathered):
                self._gathered(piece, q, weights, cache, out)
                if piece.sizes is not None and self.geometry.exchange is not None:
                    self.geometry.exchange(out[piece.first : piece.stop], piece.sizes)
            elif piece.kind == "dense":
                columns = torch.arange(self.topk, dtype=torch.int32, device=self.device)
                seen = piece.seen.unsqueeze(1)
                out[piece.first : piece.stop] = torch.where(columns < seen, columns, columns.new_tensor(-1))
            else:
                self._single(piece, q, weights, cache, out)
        out[step.rows :].fill_(-1)
        return out

    # Planning: once a step, whatever the number of layers ------------------------------------------------------------

    def _planned(self, step: Step) -> _Plan:
        if self._plan is None or self._plan.step is not step:
            self._plan = _Plan(step)
            starts = step.starts
            for kind, first, stop in step.runs(self.topk, self.elements if self.strict else None):
                a, b = starts[first], starts[stop]
                if kind == "gathered":
                    self._plan.pieces.append(self._cut(step, first, stop, a))
                    self.counters.gathered_rows += b - a
                    continue
                seen = put(step.seen(first, stop), self.device)
                width, pages = max(step.seq_lens[first:stop]), None
                if kind == "single":
                    # NOTE: no wider than these rows need: a library's scores are as wide as the table.
                    pages = step.page_table[first:stop, : -(-width // PAGE_SIZE)]
                    self.counters.paged_rows += b - a
                else:
                    self.dense_rows += b - a
                self._plan.pieces.append(Rows(kind, a, b, seen, width, pages))
        return self._plan

    def _cut(self, step: Step, first: int, stop: int, row: int) -> Gathered:
        """Chunks of the requests [first, stop), whose first query row is ``row``."""
        ends, rows = list(step.seq_lens[first:stop]), list(step.query_lens[first:stop])
        cap = LOGIT_BYTES * self.elements
        chunks: list[Chunk] = split_chunks(ends, rows, self.rows, cap, strict_cap=self.strict, fixed_shapes=True)
        made = [chunk for chunk in chunk_metadata(chunks, ends, rows, first_token=row) if chunk is not None]
        groups: dict[int, Bounds] = {}
        for chunk in made:
            group = chunk.group
            if group.request_start in groups:
                continue
            members = [other for other in made if other.group is group]
            groups[group.request_start] = Bounds(
                step.context_slots(first + group.request_start, first + group.request_stop),
                put(np.concatenate([member.cu_seqlen_ks for member in members]), self.device),
                put(np.concatenate([member.cu_seqlen_ke for member in members]), self.device),
                members[0].token_start,
            )
        sizes = rank_sizes(self.geometry, ends, rows, GPU)
        if sizes is not None:
            self.counters.sharded_rows += sum(rows)
        return Gathered(row, row + sum(rows), made, groups, sizes)

    # Execution: once a layer -----------------------------------------------------------------------------------------

    def _single(self, piece: Rows, q: Tensor, weights: Tensor, cache: IndexCache, out: Tensor) -> None:
        assert piece.pages is not None
        at_once = max(1, self.elements // scratch_width(piece.width))
        for first in range(piece.first, piece.stop, at_once):
            stop = min(first + at_once, piece.stop)
            at, local = slice(first, stop), slice(first - piece.first, stop - piece.first)
            seen = piece.seen[local]
            room = self._room((stop - first) * piece.width)
            scores = self.calls.page_scores(q[at], weights[at], cache, piece.pages[local], seen, piece.width, room)
            self.calls.topk(scores, seen, out[at])

    def _gathered(self, piece: Gathered, q: Tensor, weights: Tensor, cache: IndexCache, out: Tensor) -> None:
        whole = (0, piece.stop - piece.first)
        window = whole if piece.sizes is None else rank_window(piece.sizes, self.geometry.rank)
        held: Bounds | None = None
        keys, scales = self.keys, self.scales
        for chunk in piece.chunks:
            mine = narrow(chunk.token_start - piece.first, chunk.token_stop - piece.first, window)
            if mine is None:
                continue
            self.counters.chunks += 1
            group = piece.groups[chunk.group.request_start]
            if not chunk.gathers_slices and held is not group:
                keys, scales = self._gather(cache, group.slots)
                held = group
            start, stop = mine[0] + piece.first, mine[1] + piece.first
            if chunk.key_slices:
                self._slices(chunk, group, start, stop, keys, scales, q, weights, cache, out)
                if chunk.gathers_slices:
                    held = None
                continue
            rows, at = slice(start - group.first, stop - group.first), slice(start, stop)
            ks, ke = group.ks[rows], group.ke[rows]
            local = slice(start - chunk.token_start, stop - chunk.token_start)
            width = int((chunk.cu_seqlen_ke[local] - chunk.cu_seqlen_ks[local]).max())
            room = self._room((stop - start) * width)
            scores = self.calls.scores(q[at], weights[at], keys, scales, ks, ke, width, room)
            self.calls.topk(scores, ke - ks, out[at])

    def _slices(
        self,
        chunk: ChunkMetadata,
        group: Bounds,
        start: int,
        stop: int,
        keys: Tensor,
        scales: Tensor,
        q: Tensor,
        weights: Tensor,
        cache: IndexCache,
        out: Tensor,
    ) -> None:
        """Rows [start, stop) of a chunk of one request, whose keys are scored slice by slice with a running top-k."""
        longest = max(b - a for a, b in chunk.key_slices)
        k = self.topk
        at_once = max(1, self.elements // (longest + CANDIDATE_FLOATS * k))
        for first in range(start, stop, at_once):
            last = min(first + at_once, stop)
            at, rows = slice(first, last), slice(first - group.first, last - group.first)
            seen, host = group.ke[rows] - group.ks[rows], chunk.cu_seqlen_ke - chunk.cu_seqlen_ks
            most = int(host[last - 1 - chunk.token_start])
            best = torch.empty((last - first, k), dtype=torch.float32, device=self.device)
            for a, b in chunk.key_slices:
                if a > 0 and most <= a:
                    break
                self.counters.key_slices += 1
                if chunk.gathers_slices:
                    part, part_scales = self._gather(cache, group.slots[a:b])
                else:
                    part, part_scales = keys[a:b], scales[a:b]
                high = seen.clamp(a, b) - a
                low = torch.zeros_like(high)
                width = min(most, b) - a
                room = self._room((last - first) * width)
                scores = self.calls.scores(q[at], weights[at], part, part_scales, low, high, width, room)
                if a == 0:
                    self.calls.best(scores, high, None, out[at], best)
                    continue
                found, its = torch.empty_like(out[at]), torch.empty_like(best)
                self.calls.best(scores, high, None, found, its)
                before = min(a, k)
                names = torch.cat([out[at][:, :before], found + a], dim=1)
                values = torch.cat([best[:, :before], its], dim=1)
                # NOTE: a row that sees nothing of the slice may see less than `before` keys; its own stay as they are.
                lengths = torch.where(high > 0, before + high.clamp_max(k), seen.clamp_max(before))
                merged = torch.empty_like(found)
                self.calls.best(values, lengths.int(), names, merged, best)
                out[at] = merged

    def _gather(self, cache: IndexCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and scales of ``slots``, in the fixed buffers where they fit (always, with the strict cap)."""
        count = slots.shape[0]
        keys, scales = self.keys, self.scales
        if count > self.rows:
            keys = torch.empty((count, INDEX_DIM), dtype=keys.dtype, device=self.device)
            scales = torch.empty(count, dtype=torch.float32, device=self.device)
        self.counters.gathers += 1
        self.calls.gather_keys(cache, slots, keys[:count], scales[:count])
        return keys[:count], scales[:count]

    def _room(self, elements: int) -> Tensor:
        """Where scores go that the library does not allocate: the fixed buffer, always with the strict cap."""
        if self.calls.allocates_scores or elements <= self.room.numel():
            return self.room
        return torch.empty(elements, dtype=torch.float32, device=self.device)
