"""GPU checks of what moves and reads cache rows: gathers, id remap, sparse MLA.

gathered rows and ids bit for bit; attention within the error of bfloat16
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention.kernels import triton as served
from attention.kernels import triton_attend, triton_gather, triton_remap
from attention.layouts import LatentCache, load_latent, pack_latent
from attention.scratch import Scratch
from attention.sizes import INDEX_DIM, LATENT_DIM, NOPE_DIM, PACKED_BYTES, PAGE_SIZE
from attention.topk_remap import PagedRows, WorkspaceRows
from attention.topk_remap import remap as plain_remap
from benchmarks.gpu.bench import BF16, FP8, Bench, Line, off_by, optional
from benchmarks.gpu.index import index_cache

SCALE = 0.0417
"""Softmax scale of the checks, about 576^-0.5."""


def latent_buffer(bench: Bench, slots: int, kind: str) -> Tensor:
    """Latent rows in every slot: ``bfloat16``, ``fp8_packed`` or ``fp8_raw``."""
    if kind == "bfloat16":
        return bench.randn(slots, LATENT_DIM)
    if kind == "fp8_raw":
        return bench.randn(slots, LATENT_DIM, dtype=FP8)
    step = 1 << 16
    return torch.cat(
        [
            pack_latent(part[:, :NOPE_DIM], part[:, NOPE_DIM:]).to(bench.device)
            for part in bench.randn(slots, LATENT_DIM).cpu().split(step)
        ]
    )


def wide_rows(buffer: Tensor, kind: str, slots: Tensor, layer_scale: float) -> Tensor:
    """The plain reading of latent rows, bfloat16 [n, 576]."""
    if kind == "fp8_raw":
        return (buffer[slots].float() * layer_scale).to(BF16)
    return load_latent(LatentCache(buffer, kind), slots, BF16)


def gathers(bench: Bench) -> Iterator[Line]:
    """A whole context in shuffled pages."""
    slots = bench.sizes.context
    pages = torch.randperm(slots // PAGE_SIZE, generator=torch.Generator().manual_seed(2)).to(bench.device)
    order = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=bench.device)).flatten()
    for kind, row_bytes in (("bfloat16", 2 * LATENT_DIM), ("fp8_packed", PACKED_BYTES), ("fp8_raw", LATENT_DIM)):
        buffer = latent_buffer(bench, slots, kind)
        out = torch.empty((slots, LATENT_DIM), dtype=BF16, device=bench.device)

        def call(buffer: Any = buffer, out: Any = out) -> None:
            triton_gather.gather_latent(buffer, order, out, 0.5)

        call()
        line = Line(f"gather {slots} latent rows, {kind}", moved=slots * (row_bytes + 2.0 * LATENT_DIM + 8))
        if not torch.equal(out, wide_rows(buffer, kind, order, 0.5)):
            line.wrong = "rows differ"
        line.ours = bench.seconds(call)
        if kind == "bfloat16":
            bench.library(line, {"index_select": partial(torch.index_select, buffer, 0, order)})
        yield line
    cache = index_cache(bench, slots, "fp8")
    keys = torch.empty((slots, INDEX_DIM), dtype=FP8, device=bench.device)
    scales = torch.empty(slots, device=bench.device)

    def gather_index() -> None:
        triton_gather.gather_index(cache, order, keys, scales)

    gather_index()
    line = Line(f"gather {slots} index keys", moved=slots * (2.0 * 132 + 8))
    page = cache.buffer[pages]
    wanted = page[:, : PAGE_SIZE * INDEX_DIM].reshape(slots, INDEX_DIM)
    tail = page[:, PAGE_SIZE * INDEX_DIM :].contiguous().view(torch.float32).flatten()
    if not torch.equal(keys.view(torch.uint8), wanted) or not torch.equal(scales, tail):
        line.wrong = "keys or scales differ"
    line.ours = bench.seconds(gather_index)
    yield line


def remaps(bench: Bench) -> Iterator[Line]:
    """Rows of gathered and of paged requests mixed."""
    rows, k, requests, width = bench.sizes.mla_rows, bench.sizes.topk, 4, bench.sizes.context // PAGE_SIZE
    rng = torch.Generator().manual_seed(3)
    table = torch.randint(0, 1 << 14, (requests, width), generator=rng).int()
    topk = torch.randint(-1, width * PAGE_SIZE, (rows, k), generator=rng).int()
    request = torch.randint(0, requests, (rows,), generator=rng).int()
    prefill = torch.where(torch.rand(rows, generator=rng) < 0.5, request, -1).int()
    starts = torch.arange(requests, dtype=torch.int32) * 1000
    for compact in (False, True):
        wanted, wanted_counts = plain_remap(
            topk.numpy(),
            request.numpy(),
            prefill.numpy(),
            PagedRows(table.numpy(), PAGE_SIZE, PAGE_SIZE),
            WorkspaceRows(starts.numpy()),
            compact_to_front=compact,
        )
        there = [part.to(bench.device) for part in (topk, request, prefill, table, starts)]
        out, counts = torch.empty_like(there[0]), torch.empty_like(there[1])

        def call(there: Any = there, out: Any = out, counts: Any = counts, compact: bool = compact) -> None:
            ids, owners, groups, pages, first = there
            triton_remap.remap(
                ids, owners, groups, pages, PAGE_SIZE, PAGE_SIZE, first, 0, out, counts, compact_to_front=compact
            )

        call()
        line = Line(f"remap {rows} x {k}{' to the front' if compact else ''}", moved=8.0 * topk.numel())
        if not torch.equal(out.cpu(), torch.from_numpy(wanted)) or not torch.equal(
            counts.cpu(), torch.from_numpy(wanted_counts)
        ):
            line.wrong = "ids or counts differ"
        line.ours = bench.seconds(call)
        yield line


def sparse_mla(bench: Bench) -> Iterator[Line]:
    """Prefill rows and single decode rows, all cache kinds, by row number."""
    context, k = bench.sizes.context, bench.sizes.topk
    major, processors = served.device_facts(bench.device)
    for kind, row_bytes in (("bfloat16", 2 * LATENT_DIM), ("fp8_packed", PACKED_BYTES), ("fp8_raw", LATENT_DIM)):
        buffer = latent_buffer(bench, context, kind)
        for heads in bench.sizes.heads:
            for rows in (bench.sizes.mla_rows, 1):
                q = bench.randn(rows, heads, LATENT_DIM)
                rng = torch.Generator(bench.device).manual_seed(5)
                ids = torch.randint(0, context, (rows, k), generator=rng, device=bench.device).int()
                ids[-1, k // 3 : k // 2] = -1
                out = torch.empty((rows, heads, NOPE_DIM), dtype=BF16, device=bench.device)
                lse = torch.empty((rows, heads), device=bench.device)
                shape = triton_attend.shape_for(heads, major)
                splits = triton_attend.splits_for(rows, heads, k, processors, shape)
                scratch = Scratch(bench.sizes.scratch, bench.device)

                def call(
                    q: Any = q, b: Any = buffer, i: Any = ids, o: Any = out, e: Any = lse, n: int = splits,
                    s: Any = shape, scratch: Any = scratch,
                ) -> None:  # fmt: skip
                    scratch.clear()
                    triton_attend.attend(
                        q[..., :NOPE_DIM], q[..., NOPE_DIM:], b, i, SCALE, o, e,
                        layer_scale=0.5, splits=n, take=scratch.take, shape=s,
                    )  # fmt: skip

                call()
                line = Line(f"sparse MLA {kind}, {heads} heads, {rows} rows x {k}, {splits} shares")
                line.flop = 2.0 * rows * heads * k * (LATENT_DIM + NOPE_DIM)
                line.moved = float(min(rows * k, context)) * row_bytes + q.numel() * 2 + out.numel() * 2
                line.wrong = wrong_attention(q, buffer, kind, ids, out, lse)
                line.ours = bench.seconds(call)
                if kind == "bfloat16":
                    calls: dict[str, Callable[[], object]] = {"torch": partial(torch_mla, q, buffer, ids)}
                    flash = optional("flash_mla", "flash_mla_sparse_fwd") or optional(
                        "sgl_kernel.flash_mla", "flash_mla_sparse_fwd"
                    )
                    if flash is not None:
                        padded = torch.nn.functional.pad(q, (0, 0, 0, -heads % 64))
                        calls["FlashMLA"] = partial(flash, padded, buffer.unsqueeze(1), ids.unsqueeze(1), SCALE)
                    bench.library(line, calls)
                yield line


def wrong_attention(q: Tensor, buffer: Tensor, kind: str, ids: Tensor, out: Tensor, lse: Tensor) -> str | None:
    """Compare a sample of rows with the float32 expression; results are bfloat16 averages of unit normals."""
    for i in sorted({0, q.shape[0] // 2, q.shape[0] - 1}):
        latent = wide_rows(buffer, kind, ids[i][ids[i] >= 0].long(), 0.5).float()
        logits = q[i].float() @ latent.T * SCALE
        found = off_by(lse[i], logits.logsumexp(-1), 2e-3)
        wanted = logits.softmax(-1) @ latent[:, :NOPE_DIM]
        found = found or off_by(out[i], wanted, 2**-6 + 2**-7 * wanted.abs())
        if found:
            return f"row {i}: {found}"
    return None


def torch_mla(q: Tensor, buffer: Tensor, ids: Tensor, rows: int = 64) -> Tensor:
    """Gather and two batched products in bfloat16, 64 rows at a time."""
    parts = []
    for at in range(0, q.shape[0], rows):
        latent = buffer[ids[at : at + rows].clamp_min(0).long()]
        logits = (q[at : at + rows] @ latent.transpose(1, 2)).float() * SCALE
        logits.masked_fill_((ids[at : at + rows] < 0).unsqueeze(1), -math.inf)
        parts.append(logits.softmax(-1).to(BF16) @ latent[..., :NOPE_DIM])
    return torch.cat(parts)
