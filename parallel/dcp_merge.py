"""Decode context parallel: each rank attends its own keys, and the partial results become one by log-sum-exp.

    rank   own query heads                    all heads, own keys                        own heads, all keys
     0     q[n, h]  ──┐                  ┌──> out_0, lse_0 [n, 2h]  ──┐             ┌──> merge -> out [n, h]
                      ├─ gather heads ───┤                            ├─ exchange ──┤
     1     q[n, h]  ──┘                  └──> out_1, lse_1 [n, 2h]  ──┘             └──> merge -> out [n, h]

    lse = ln sum_r exp(lse_r)        out = sum_r exp(lse_r - lse) * out_r        a rank without keys: out 0, lse -inf

The sum runs in rank order whatever the batch, so a row's bits do not depend on its neighbours. Where one rank holds
all keys of a row, its factor is exactly 1 and the others' exactly 0.

Bytes that one rank receives a layer, W ranks, n rows, h heads of its own, b bytes a value:

    queries    (W - 1) * n * h * 576 * b
    partials   (W - 1) * n * h * (512 * b + 4)
    contexts   (W - 1) * s * 576 * b              workspace prefill instead of the two: s rows of rank 0's shard

Source of the formulas: vLLM 0.33 v1/attention/ops/common.py (merge), facts section 6 (gather).
"""

from __future__ import annotations

import torch
from torch import Tensor

LATENT_VALUES = 576
OUT_VALUES = 512
LSE_BYTES = 4


def merge(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """One result of W partial ones.

    Args:
        parts: [W, n, heads, d], softmax-weighted values over the keys of each rank, float32 or bfloat16.
        lses: float32 [W, n, heads], natural log-sum-exp; -inf where a rank had no key (its part is not read then).

    Returns:
        (out [n, heads, d] in the type of `parts`, lse float32 [n, heads]); a row without any key is 0 with lse -inf.
    """
    total = torch.logsumexp(lses, dim=0)
    # NOTE: -inf - -inf is NaN: a row that nobody has keys for takes factor 0 everywhere.
    factors = torch.exp(lses - total.clamp_min(torch.finfo(torch.float32).min)).unsqueeze(-1)
    out = torch.zeros(parts.shape[1:], dtype=torch.float32)
    for part, factor in zip(parts, factors, strict=True):
        out += torch.where(factor > 0, part.float() * factor, out.new_zeros(()))
    return out.to(parts.dtype), total


def query_bytes(ranks: int, rows: int, heads: int, itemsize: int) -> int:
    """Bytes that one rank receives when `rows` queries of `heads` heads a rank are gathered."""
    return (ranks - 1) * rows * heads * LATENT_VALUES * itemsize


def partial_bytes(ranks: int, rows: int, heads: int, itemsize: int) -> int:
    """Bytes that one rank receives when the partial results of `rows` rows, `heads` heads a rank, are exchanged."""
    return (ranks - 1) * rows * heads * (OUT_VALUES * itemsize + LSE_BYTES)


def context_bytes(ranks: int, shard_rows: int, itemsize: int) -> int:
    """Bytes that one rank receives when contexts of `shard_rows` rows a rank are gathered into the workspace."""
    return (ranks - 1) * shard_rows * LATENT_VALUES * itemsize


def pack(out: Tensor, lse: Tensor, ranks: int) -> Tensor:
    """Partial results in the order in which they are sent: uint8 [W, n, heads / W, bytes of a value row and its lse].

    Args:
        out: [n, heads, d], heads of rank 0 first. lse: float32 [n, heads].
    """
    n, heads, d = out.shape
    own, width = heads // ranks, d * out.element_size()
    packed = torch.empty((ranks, n, own, width + LSE_BYTES), dtype=torch.uint8)
    packed[..., :width] = out.view(n, ranks, own, d).transpose(0, 1).contiguous().view(torch.uint8)
    packed[..., width:] = lse.view(n, ranks, own, 1).transpose(0, 1).contiguous().view(torch.uint8)
    return packed


def unpack(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(parts [W, n, heads, d] in `dtype`, lses float32 [W, n, heads]) of what `pack` made, rank by rank."""
    width = packed.shape[-1] - LSE_BYTES
    parts = packed[..., :width].contiguous().view(dtype)
    return parts, packed[..., width:].contiguous().view(torch.float32).squeeze(-1)
