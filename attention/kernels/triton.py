"""The Triton kernels behind the interface of ``attention.kernels``: what a tensor on a GPU is served by.

    select -> triton_score (pages in place, 8 rows of a request a tile), triton_topk (segments), both within the scratch
    attend -> triton_attend            gather -> triton_gather           beside them: triton_remap, triton_builds

bfloat16 queries; bfloat16 or fp8 caches. Unlike the CPU kernels, ids are not checked (that would wait for the device),
and the bits of a row of ``attend`` may depend on the size of its batch, through the number of shares of its ids.
Compiled for compute capability 9.0 and 10.0 and interpreted in tests; not yet run on a GPU.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from attention.batch import AttentionBatch
from attention.kernels import triton_attend, triton_score, triton_topk
from attention.kernels.triton_gather import gather
from attention.layouts import INDEX_AMAX_FLOOR, IndexCache, LatentCache, quantise
from attention.scratch import Scratch

__all__ = ["attend", "gather", "select"]

_ALIGN = 64


def select(
    batch: AttentionBatch,
    q: Tensor,
    head_weights: Tensor,
    cache: IndexCache,
    topk: int,
    scratch: Scratch,
    out: Tensor,
) -> None:
    """Fill out int32 [n, topk]; see ``ragged.select``. ``scratch`` is on q's device.

    Raises:
        ValueError: for a float32 q or cache, and more ids than ``triton_topk`` supports.
        ScratchTooSmall: when not even one row of scores and its candidates fit.
    """
    if q.dtype != torch.bfloat16 or cache.kind == "float32":
        raise ValueError(f"q: bfloat16, with an fp8 or bfloat16 cache, is needed on a GPU, not {q.dtype}, {cache.kind}")
    out.fill_(-1)
    if batch.rows == 0:
        return
    if cache.kind == "fp8":
        q, scale = quantise(q, INDEX_AMAX_FLOOR)
        head_weights = head_weights * scale
    seen = (batch.row_positions() + 1).int()
    page_table, seen_there = batch.page_table.to(q.device), seen.to(q.device)
    width = int(seen.max())
    step = max(1, scratch.free // (4 * width + _ALIGN + triton_topk.scratch_bytes(1, width, topk)))
    for at in range(0, batch.rows, step):
        stop = min(at + step, batch.rows)
        scratch.clear()
        widest = int(seen[at:stop].max())
        scores = scratch.take((stop - at, widest), torch.float32, "index scores")
        row, rows, request = (part.to(q.device) for part in triton_score.row_tiles(batch, at, stop))
        here = slice(at, stop)
        tiles = (row - at, rows, request)
        triton_score.score_paged(
            q[here], head_weights[here], cache, page_table, tiles, seen_there[here], widest, scores
        )
        triton_topk.topk(scores, seen_there[here], topk, out[here], scratch.take)


def attend(
    batch: AttentionBatch | None,
    q_nope: Tensor,
    q_rope: Tensor,
    cache: LatentCache,
    ids: Tensor,
    scale: float,
    scratch: Scratch,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Fill out [n, heads, 512] and lse [n, heads]; see ``paged.attend``. ``scratch`` is on q's device."""
    n, heads = q_nope.shape[:2]
    row_request = page_table = None
    if batch is not None:
        owners = torch.full((n,), -1, dtype=torch.int32)
        owners[: batch.rows] = batch.row_requests().int()
        row_request, page_table = owners.to(q_nope.device), batch.page_table.to(q_nope.device)
    major, processors = device_facts(q_nope.device)
    shape = triton_attend.shape_for(heads, major)
    splits = triton_attend.splits_for(n, heads, ids.shape[1], processors, shape)
    triton_attend.attend(
        q_nope,
        q_rope,
        cache.buffer,
        ids,
        scale,
        out,
        lse,
        row_request,
        page_table,
        layer_scale=cache.scale,
        splits=splits,
        take=scratch.take,
        shape=shape,
    )


@lru_cache
def device_facts(device: torch.device) -> tuple[int, int]:
    """(major compute capability, multiprocessors) of a GPU; (9, 1) elsewhere, for the interpreter."""
    if device.type != "cuda":
        return 9, 1
    facts = torch.cuda.get_device_properties(device)
    return facts.major, facts.multi_processor_count
