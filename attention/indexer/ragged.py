"""The ``ragged`` indexer slot: every key of a request is scored for a block of its query rows, then the best are kept.

    keys  0 ........................ position
    row i [ w . relu(q k) ........... ] -> threshold of the topk-th best -> ids, ascending, -1 behind

    cut along queries only: the score block [rows, context] float32 is what the scratch has room for.

Ties at the threshold go to the lowest position. A row that sees no more than topk keys takes them all, unscored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention import kernels
from attention.batch import AttentionBatch
from attention.layouts import IndexCache
from attention.scratch import Scratch


def select(
    batch: AttentionBatch,
    q: Tensor,
    head_weights: Tensor,
    cache: IndexCache,
    topk: int,
    scratch: Scratch,
    out: Tensor | None = None,
) -> Tensor:
    """Top-k positions of each query row.

    Args:
        batch: plan of the pass; index keys of all its positions are already in ``cache``.
        q: [n, H, d] float32 or bfloat16, n >= ``batch.rows``.
        head_weights: float32 [n, H], with H^-0.5 * d^-0.5 folded in.
        cache: index keys. An fp8 cache has q quantised as SGLang's fused kernel does: e4m3, scale
            max(amax, 1e-4) / 448 folded into the head weight.
        topk: ids a row.
        scratch: holds the score block; the ids do not depend on its size.
        out: int32 [n, topk] to write into.

    Returns:
        int32 [n, topk]: request-local positions, ascending, then -1. Padding rows are -1.

    Raises:
        ValueError: naming the argument that does not fit.
        ScratchTooSmall: when not even one row of scores fits.
    """
    n = check(batch, q, head_weights, cache, topk)
    if out is None:
        out = torch.empty((n, topk), dtype=torch.int32, device=q.device)
    elif out.shape != (n, topk) or out.dtype != torch.int32 or not out.is_contiguous():
        raise ValueError(f"out: a contiguous int32 [{n}, {topk}] tensor is needed")
    scratch.clear()
    kernels.active(q).select(batch, q.contiguous(), head_weights.contiguous(), cache, topk, scratch, out)
    return out


def check(batch: AttentionBatch, q: Tensor, head_weights: Tensor, cache: IndexCache, topk: int) -> int:
    """Rows of q. Raises ValueError naming the argument that does not fit."""
    if q.dim() != 3 or q.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"q: [n, heads, d] float32 or bfloat16 is needed, not {list(q.shape)} {q.dtype}")
    if q.shape[2] != cache.dim:
        raise ValueError(f"q: {q.shape[2]} values a head, the index cache holds {cache.dim}")
    if head_weights.shape != q.shape[:2] or head_weights.dtype != torch.float32:
        raise ValueError(f"head_weights: float32 {list(q.shape[:2])} is needed")
    if q.shape[0] < batch.rows:
        raise ValueError(f"q: {q.shape[0]} rows, the batch has {batch.rows}")
    if topk < 1:
        raise ValueError(f"topk: {topk}; at least 1 is needed")
    return q.shape[0]
