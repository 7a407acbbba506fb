"""Sparse MLA straight from the cache: each row reads its selected latent rows where they lie.

    slot(j) = page_table[request, ids[j] / 64] * 64 + ids[j] mod 64
    s[h, j] = scale * (q_nope[h] . latent[slot(j), :512] + q_rope[h] . latent[slot(j), 512:])
    out[h]  = sum_j softmax_j(s[h])[j] * latent[slot(j), :512]               lse[h] = ln sum_j exp s[h, j]

The query is absorbed: the latent row is key and value of every head. ``attend_rows`` is the same sum over rows named by
their place in the buffer, for callers that gathered them. A cache of which each rank holds a share (``shards.py``) is
attended on every rank, and the results are merged.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from attention import kernels
from attention.batch import AttentionBatch
from attention.layouts import LatentCache
from attention.scratch import Scratch
from attention.shards import ShardedCache
from attention.sizes import NOPE_DIM, ROPE_DIM

READS_SHARDS = True


@overload
def attend(
    batch: AttentionBatch,
    q_nope: Tensor,
    q_rope: Tensor,
    cache: LatentCache,
    topk_ids: Tensor,
    scale: float,
    scratch: Scratch,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attend(
    batch: AttentionBatch,
    q_nope: Tensor,
    q_rope: Tensor,
    cache: LatentCache,
    topk_ids: Tensor,
    scale: float,
    scratch: Scratch,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attend(
    batch: AttentionBatch,
    q_nope: Tensor,
    q_rope: Tensor,
    cache: LatentCache,
    topk_ids: Tensor,
    scale: float,
    scratch: Scratch,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sparse MLA over request-local positions.

    Args:
        batch: plan of the pass.
        q_nope, q_rope: [n, heads, 512] and [n, heads, 64], float32 or bfloat16, n >= ``batch.rows``.
        cache: latent rows. fp8_packed rows are scaled in float32 and rounded once to q's dtype.
        topk_ids: int32 [n, k]; -1 is skipped wherever it stands; the sum runs in the order of the ids.
        scale: softmax scale.
        scratch: holds one tile; the result does not depend on its size.
        return_lse: also return the natural log-sum-exp.

    Returns:
        [n, heads, 512] in q's dtype, and float32 [n, heads] if asked. A row without ids is 0 with lse -inf.

    Raises:
        ValueError: naming the argument that does not fit, or an id outside its request's context.
    """
    if q_nope.shape[0] < batch.rows:
        raise ValueError(f"q_nope: {q_nope.shape[0]} rows, the batch has {batch.rows}")
    if isinstance(cache, ShardedCache):
        _check(q_nope, q_rope, topk_ids)
        rows = batch.rows
        out, lse = cache.attend(batch, q_nope[:rows], q_rope[:rows], topk_ids[:rows], scale, scratch)
        if rows < q_nope.shape[0]:
            out = torch.cat([out, out.new_zeros(q_nope.shape[0] - rows, *out.shape[1:])])
            lse = torch.cat([lse, lse.new_full((q_nope.shape[0] - rows, lse.shape[1]), float("-inf"))])
        return (out, lse) if return_lse else out
    return _run(batch, q_nope, q_rope, cache, topk_ids, scale, scratch, return_lse)


@overload
def attend_rows(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: LatentCache,
    rows: Tensor,
    scale: float,
    scratch: Scratch,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attend_rows(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: LatentCache,
    rows: Tensor,
    scale: float,
    scratch: Scratch,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attend_rows(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: LatentCache,
    rows: Tensor,
    scale: float,
    scratch: Scratch,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attend`` with int32 [n, k] row numbers of ``cache.buffer`` in place of positions; -1 is skipped."""
    return _run(None, q_nope, q_rope, cache, rows, scale, scratch, return_lse)


def _run(
    batch: AttentionBatch | None,
    q_nope: Tensor,
    q_rope: Tensor,
    cache: LatentCache,
    ids: Tensor,
    scale: float,
    scratch: Scratch,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    _check(q_nope, q_rope, ids)
    n, heads = q_nope.shape[:2]
    out = torch.empty((n, heads, NOPE_DIM), dtype=q_nope.dtype, device=q_nope.device)
    lse = torch.empty((n, heads), dtype=torch.float32, device=q_nope.device)
    scratch.clear()
    kernels.active(q_nope).attend(batch, q_nope, q_rope, cache, ids.contiguous(), scale, scratch, out, lse)
    return (out, lse) if return_lse else out


def _check(q_nope: Tensor, q_rope: Tensor, ids: Tensor) -> None:
    n, heads = q_nope.shape[:2]
    if q_nope.shape != (n, heads, NOPE_DIM) or q_nope.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"q_nope: [n, heads, {NOPE_DIM}] float32 or bfloat16 is needed, not {list(q_nope.shape)}")
    if q_rope.shape != (n, heads, ROPE_DIM) or q_rope.dtype != q_nope.dtype:
        raise ValueError(f"q_rope: [{n}, {heads}, {ROPE_DIM}] {q_nope.dtype} is needed, not {list(q_rope.shape)}")
    if ids.dim() != 2 or ids.shape[0] != n or ids.dtype != torch.int32:
        raise ValueError(f"topk_ids: int32 [{n}, k] is needed, not {list(ids.shape)} {ids.dtype}")
