"""GPU checks of the indexer's kernels: scores, top-k, the whole selection, gathered keys.

ids exactly where the scores are the same numbers; scores within the error of their products
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention.batch import AttentionBatch
from attention.kernels import reference, triton_score, triton_topk
from attention.kernels import triton as served
from attention.layouts import INDEX_AMAX_FLOOR, IndexCache, quantise, store_index
from attention.scratch import Scratch
from attention.sizes import INDEX_DIM, INDEX_PAGE_BYTES, PAGE_SIZE
from benchmarks.gpu.bench import BF16, Bench, Line, off_by, optional


def scores_of_gathered_keys(bench: Bench) -> Iterator[Line]:
    """A late chunk of one prompt: every row sees most keys."""
    rows, keys = bench.sizes.score_rows, bench.sizes.score_keys
    for kind in ("fp8", "bfloat16"):
        for heads in (32, 64):
            q, w = bench.randn(rows, heads, INDEX_DIM), bench.randn(rows, heads, dtype=torch.float32)
            k, scale = bench.randn(keys, INDEX_DIM), None
            if kind == "fp8":
                q, folded = quantise(q, INDEX_AMAX_FLOOR)
                w = w * folded
                k, scale = quantise(k, INDEX_AMAX_FLOOR)
            ks = torch.zeros(rows, dtype=torch.int32, device=bench.device)
            ke = (torch.arange(rows, device=bench.device) + keys - rows + 1).int()
            out = torch.full((rows, keys), -math.inf, device=bench.device)

            def call(
                q: Any = q, w: Any = w, k: Any = k, scale: Any = scale, ks: Any = ks, ke: Any = ke, out: Any = out
            ) -> None:
                triton_score.score_gathered(q, w, k, scale, ks, ke, out)

            call()
            seen = int(ke.sum())
            line = Line(
                f"scores, gathered {kind}, {heads} heads", flop=2.0 * heads * INDEX_DIM * seen, fp8=kind == "fp8"
            )
            line.moved = 4.0 * seen + k.numel() * k.element_size() + q.numel() * q.element_size()
            line.wrong = wrong_scores(q, w, k, scale, ke, out)
            line.ours = bench.seconds(call)
            calls: dict[str, Callable[[], object]] = {"torch": partial(torch_scores, q, w, k)}
            deep = optional("deep_gemm", "fp8_mqa_logits")
            if deep is not None and scale is not None:
                calls["DeepGEMM"] = partial(deep, q, (k, scale), w, ks, ke, clean_logits=False)
            bench.library(line, calls)
            yield line


def wrong_scores(q: Tensor, w: Tensor, k: Tensor, scale: Tensor | None, seen: Tensor, out: Tensor) -> str | None:
    """Compare a sample of rows; the bound is 2^-12 of the magnitudes summed, for products of e4m3 kept in few bits."""
    for i in sorted({0, 1, q.shape[0] // 2, q.shape[0] - 1}):
        n = int(seen[i])
        part = slice(i, i + 1)
        wanted = reference.scores(q[part], w[part], k[:n], None if scale is None else scale[:n])
        mass = torch.einsum("mhd,sd->mhs", q[part].float().abs(), k[:n].float().abs()) * w[part].abs().unsqueeze(-1)
        bound = mass.sum(1) * (1.0 if scale is None else scale[:n]) * 2**-12
        found = off_by(out[part, :n], wanted, bound)
        if found or bool((out[i, n:] != -math.inf).any()):
            return f"row {i}: {found or 'a cell past its keys was written'}"
    return None


def torch_scores(q: Tensor, w: Tensor, k: Tensor, rows: int = 64) -> Tensor:
    """The torch expression in bfloat16, 64 rows at a time."""
    q, k = q.to(BF16), k.to(BF16).T
    parts = [((q[i : i + rows] @ k).relu_() * w[i : i + rows].unsqueeze(-1)).sum(1) for i in range(0, q.shape[0], rows)]
    return torch.cat(parts)


def paged_batch(requests: int, rows: int, length: int) -> AttentionBatch:
    """Requests of the same size over shuffled pages."""
    pages = -(-length // PAGE_SIZE)
    order = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(1)).int().view(requests, pages)
    starts = torch.arange(requests + 1, dtype=torch.int32) * rows
    return AttentionBatch(starts, torch.full((requests,), length, dtype=torch.int32), order)


def index_cache(bench: Bench, slots: int, kind: str) -> IndexCache:
    """Index keys in every slot."""
    if kind == "bfloat16":
        return IndexCache(bench.randn(slots, INDEX_DIM), kind)
    cache = IndexCache(
        torch.empty((slots // PAGE_SIZE, INDEX_PAGE_BYTES), dtype=torch.uint8, device=bench.device), "fp8"
    )
    step = 1 << 18
    for at in range(0, slots, step):
        here = torch.arange(at, min(at + step, slots), device=bench.device)
        store_index(cache, here, bench.randn(here.shape[0], INDEX_DIM))
    return cache


def selection(bench: Bench) -> Iterator[Line]:
    """The whole selection of a decode batch: scores from the pages, then top-k."""
    rows, length, k = bench.sizes.decode_rows, bench.sizes.decode_keys, bench.sizes.topk
    for kind in ("fp8", "bfloat16"):
        batch = paged_batch(rows, 1, length)
        cache = index_cache(bench, batch.page_table.numel() * PAGE_SIZE, kind)
        q, w = bench.randn(rows, 32, INDEX_DIM), bench.randn(rows, 32, dtype=torch.float32)
        scratch = Scratch(bench.sizes.scratch, bench.device)
        out = torch.empty((rows, k), dtype=torch.int32, device=bench.device)

        def call(
            batch: Any = batch, q: Any = q, w: Any = w, cache: Any = cache, scratch: Any = scratch, out: Any = out
        ) -> None:
            served.select(batch, q, w, cache, k, scratch, out)

        call()
        line = Line(
            f"select, decode of {rows}, {kind} pages", flop=2.0 * 32 * INDEX_DIM * rows * length, fp8=kind == "fp8"
        )
        line.moved = rows * length * (132.0 if kind == "fp8" else 256.0)
        line.wrong = wrong_selection(batch, q, w, cache, out)
        line.ours = bench.seconds(call)
        yield line


def wrong_selection(batch: AttentionBatch, q: Tensor, w: Tensor, cache: IndexCache, out: Tensor) -> str | None:
    """Ids that differ from the plain ones must have scores that equal theirs to rounding."""
    there = IndexCache(cache.buffer.cpu(), cache.kind)
    plain = torch.empty(out.shape, dtype=torch.int32)
    reference.select(batch, q.cpu(), w.cpu(), there, out.shape[1], Scratch(1 << 30), plain)
    found = out.cpu()
    for i in range(out.shape[0]):
        ours, theirs = set(found[i].tolist()), set(plain[i].tolist())
        if found[i].tolist() != sorted(ours) and -1 not in ours:
            return f"row {i}: not ascending"
        if len(ours) != len(theirs) or len(ours - theirs) > max(1, out.shape[1] // 100):
            return f"row {i}: {len(ours - theirs)} of {len(theirs)} ids differ"
    return None


def top_k(bench: Bench) -> Iterator[Line]:
    """Continuous scores and scores with many ties, for many rows and for one long row."""
    k = bench.sizes.topk
    for name, rows, width, ties in (
        ("many rows", bench.sizes.score_rows, bench.sizes.score_keys, False),
        ("many rows, ties", bench.sizes.score_rows, bench.sizes.score_keys, True),
        ("one row", 1, 8 * bench.sizes.score_keys, False),
    ):
        scores = bench.randn(rows, width, dtype=torch.float32)
        if ties:
            scores = (scores * 4).round() / 4
        lengths = torch.full((rows,), width, dtype=torch.int32, device=bench.device)
        lengths[0] = max(1, k // 2)
        out = torch.empty((rows, k), dtype=torch.int32, device=bench.device)
        scratch = Scratch(bench.sizes.scratch, bench.device)

        def call(scores: Any = scores, lengths: Any = lengths, out: Any = out, scratch: Any = scratch) -> None:
            scratch.clear()
            triton_topk.topk(scores, lengths, k, out, scratch.take)

        call()
        line = Line(f"top-k {k} of {width}, {name}", moved=4.0 * scores.numel() + 4.0 * out.numel())
        for i in sorted({0, rows // 2, rows - 1}):
            wanted = reference.best(scores[i, : int(lengths[i])], k)
            found = out[i, : wanted.shape[0]]
            if not torch.equal(found, wanted) or bool((out[i, wanted.shape[0] :] != -1).any()):
                line.wrong = f"row {i}: {int((found != wanted).sum())} of {wanted.shape[0]} ids differ"
        lengths.fill_(width)
        line.ours = bench.seconds(call)
        calls: dict[str, Callable[[], object]] = {"torch.topk": partial(torch.topk, scores, k, sorted=False)}
        flashinfer = optional("flashinfer", "top_k")
        if flashinfer is not None:
            calls["FlashInfer"] = partial(flashinfer, scores, k)
        bench.library(line, calls)
        yield line
