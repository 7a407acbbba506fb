"""GPU checks of the slots themselves: the chunk loop of `qchunk` and the gather of `workspace`, around our kernels.

cut = unsplit, id for id: a row's scores do not depend on what is scored beside it, and ties have a rule
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention.batch import AttentionBatch
from attention.cuda.choice import DEEPGEMM, Choice
from attention.cuda.indexer import CANDIDATE_FLOATS, ChunkedIndexer
from attention.cuda.library import LibraryCalls
from attention.cuda.prefill import GatheredPrefill
from attention.cuda.step import Step
from attention.cuda.triton_calls import TritonCalls
from attention.geometry import Geometry
from attention.indexer.split import LOGIT_BYTES
from attention.kernels import triton as served
from attention.layouts import INDEX_AMAX_FLOOR, LatentCache, quantise
from attention.scratch import Scratch
from attention.sizes import INDEX_DIM, LATENT_DIM, NOPE_DIM, PAGE_SIZE
from benchmarks.gpu.bench import Bench, Line, off_by, optional
from benchmarks.gpu.index import index_cache
from benchmarks.gpu.latent import SCALE, latent_buffer

HEADS = 32


def mixed_step(bench: Bench) -> tuple[Step, AttentionBatch]:
    """Two prompts, a short one, a decoding row; the pages shuffled. On the device, and as the CPU plan of the same."""
    size = bench.sizes
    requests = [
        (size.score_rows, size.score_keys),
        (1, size.decode_keys),
        (size.topk // 2, size.topk),
        (size.score_rows // 2, size.score_keys // 2),
    ]
    pages = [-(-length // PAGE_SIZE) for _, length in requests]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(5)).int()
    table = torch.zeros((len(requests), max(pages)), dtype=torch.int32)
    for r, part in enumerate(order.split(pages)):
        table[r, : len(part)] = part
    rows, ends = [n for n, _ in requests], [length for _, length in requests]
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    batch = AttentionBatch(starts, torch.tensor(ends, dtype=torch.int32), table)
    return Step(ends, rows, table.to(bench.device)), batch


def geometry(step: Step, topk: int, kind: str = "fp8_packed") -> Geometry:
    """Sizes that hold the step."""
    pages = sum(-(-length // PAGE_SIZE) for length in step.seq_lens)
    return Geometry(
        max_model_len=max(step.seq_lens),
        max_requests=len(step.seq_lens),
        pool_tokens=pages * PAGE_SIZE,
        topk=topk,
        index_heads=HEADS,
        index_dim=INDEX_DIM,
        dtype=torch.bfloat16,
        index_kind="fp8",
        latent_kind=kind,
    )


def chunk_loop(bench: Bench) -> Iterator[Line]:
    """Scores and top-k of a mixed step under caps of all sizes; our time against the same step unsplit."""
    step, batch = mixed_step(bench)
    k = bench.sizes.topk
    made = geometry(step, k)
    cache = index_cache(bench, made.pool_tokens, "fp8")
    plain_q, w = bench.randn(step.rows, HEADS, INDEX_DIM), bench.randn(step.rows, HEADS, dtype=torch.float32)
    q, folded = quantise(plain_q, INDEX_AMAX_FLOOR)
    weights = w * folded
    spare = LOGIT_BYTES * CANDIDATE_FLOATS * k
    whole = LOGIT_BYTES * step.rows * sum(step.seq_lens) + spare
    one_row = LOGIT_BYTES * max(step.seq_lens) + spare

    def slot(cap: int, calls: Any = None, rows: int | None = None) -> ChunkedIndexer:
        return ChunkedIndexer(made, calls or TritonCalls(), bench.device, max_logits_bytes=cap, max_rows=rows)

    unsplit = slot(whole)
    wanted = unsplit.select(step, q, weights, cache)
    seen = sum(int(step.seen(r, r + 1).sum()) for r in range(len(step.seq_lens)))
    # The step once more by the paged kernels, whose own check is `selection`.
    paged = torch.empty_like(wanted)
    served.select(batch, plain_q, w, cache, k, Scratch(bench.sizes.scratch, bench.device), paged)
    for name, chosen in (
        ("unsplit", unsplit),
        ("in query slices", slot(max(8 * one_row, whole // 16))),
        ("a row at a time", slot(one_row)),
        ("in key slices", slot(spare + (one_row - spare) // 3 + spare)),
        ("in gathered slices", slot(whole, rows=max(step.seq_lens) // 3)),
    ):
        found = chosen.select(step, q, weights, cache)
        line = Line(f"qchunk, {step.rows} rows, {name}", flop=2.0 * HEADS * INDEX_DIM * seen, fp8=True)
        line.moved = 4.0 * seen + 2.0 * 132 * sum(step.seq_lens)
        if not torch.equal(found, wanted):
            line.wrong = "ids differ from those of the unsplit step"
        elif name == "unsplit":
            line.wrong = few_differ(found, paged, k)
        many = name == "a row at a time" and bench.timed  # thousands of launches: checked, not timed
        if not many:
            line.ours = bench.seconds(partial(chosen.select, step, q, weights, cache))
            bench.library(line, {"unsplit": partial(unsplit.select, step, q, weights, cache)})
        yield line
    if bench.timed and torch.cuda.get_device_capability(bench.device)[0] in DEEPGEMM:
        if optional("deep_gemm", "fp8_mqa_logits") is None:
            return
        deep = slot(max(8 * one_row, whole // 16), LibraryCalls(Choice("DeepGEMM", "Triton"), None))
        line = Line("qchunk around DeepGEMM, in query slices", flop=2.0 * HEADS * INDEX_DIM * seen, fp8=True)
        line.wrong = few_differ(deep.select(step, q, weights, cache), wanted, k)
        line.ours = bench.seconds(partial(deep.select, step, q, weights, cache))
        bench.library(line, {"Triton unsplit": partial(unsplit.select, step, q, weights, cache)})
        yield line


def few_differ(found: Tensor, wanted: Tensor, k: int) -> str | None:
    """Ids of two kernels' scores: near ties at the cut may fall either way, one in a hundred."""
    last = torch.iinfo(torch.int32).max
    for i in range(0, found.shape[0], max(1, found.shape[0] // 64)):
        ours, theirs = ({n for n in row[i].tolist() if 0 <= n < last} for row in (found, wanted))
        if len(ours) != len(theirs) or len(ours - theirs) > max(1, k // 100):
            return f"row {i}: {len(ours - theirs)} of {len(theirs)} ids differ"
    return None


def workspace_loop(bench: Bench) -> Iterator[Line]:
    """Gather, remap and sparse MLA of a mixed step against the same rows read from their pages."""
    step, batch = mixed_step(bench)
    k = bench.sizes.topk
    rng = torch.Generator().manual_seed(6)
    seen = torch.from_numpy(step.seen(0, len(step.seq_lens))).unsqueeze(1)
    columns = torch.arange(k).unsqueeze(0)
    drawn = (torch.rand((step.rows, k), generator=rng) * seen).int()
    ids = torch.where(columns < seen, torch.where(seen <= k, columns.int(), drawn), -1).int().to(bench.device)
    for kind in ("fp8_packed", "fp8_raw"):
        made = geometry(step, k, kind)
        cache = LatentCache(latent_buffer(bench, made.pool_tokens, kind), kind, 0.5 if kind == "fp8_raw" else 1.0)
        for heads in bench.sizes.heads[-1:]:
            q = bench.randn(step.rows, heads, LATENT_DIM)
            slot = GatheredPrefill(made, TritonCalls(), bench.device)
            out = slot.attend(step, q, cache, ids, SCALE)
            plain = torch.empty_like(out)
            sums = torch.empty(out.shape[:2], device=bench.device)
            scratch = Scratch(bench.sizes.scratch, bench.device)

            def pages(
                q: Any = q, cache: Any = cache, plain: Any = plain, sums: Any = sums, scratch: Any = scratch
            ) -> None:
                scratch.clear()
                served.attend(batch, q[..., :NOPE_DIM], q[..., NOPE_DIM:], cache, ids, SCALE, scratch, plain, sums)

            pages()
            valid = int((ids >= 0).sum())
            line = Line(f"workspace, {step.rows} rows, {heads} heads, {kind}")
            line.flop, line.moved = 2.0 * heads * valid * (LATENT_DIM + NOPE_DIM), valid * 2.0 * LATENT_DIM
            line.wrong = off_by(out, plain, plain.float().abs() * 2**-6 + 2**-7)
            line.ours = bench.seconds(partial(slot.attend, step, q, cache, ids, SCALE))
            bench.library(line, {"pages": pages})
            yield line
