"""From hidden states to the indexer's queries, keys and head weights.

    q = rope(wq_b . q_resid)              [n, H, d]         rope turns the first rope_dim of d, interleaved pairs
    k = rope(LayerNorm(wk . x))           [n, d]            LayerNorm with weight and bias, eps 1e-6, in float32
    w = (weights_proj . x) * H^-0.5 * d^-0.5                [n, H] float32; may be negative

    interleaved pair i:  (a, b) = (v[2i], v[2i+1])  ->  (a cos - b sin, a sin + b cos)
    angle = position * theta^(-2i / rope_dim)

d^-0.5 belongs to the dot product; it moves into w because relu(c x) = c relu(x) for c > 0.
Source: the GLM-MoE-DSA indexer as published in transformers 5.19 and SGLang 0.5.23.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True)
class IndexerWeights:
    """Weights of one indexer.

    wq_b [H * d, q_lora], wk [d, hidden], k_norm weight and bias [d], weights_proj [H, hidden].
    """

    wq_b: Tensor
    wk: Tensor
    k_norm_weight: Tensor
    k_norm_bias: Tensor
    weights_proj: Tensor


def rope_tables(positions: Tensor, rope_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 [n, rope_dim / 2], of absolute positions [n]."""
    powers = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    inverse: Tensor = 1.0 / theta**powers
    angles = positions.float().unsqueeze(-1) * inverse
    return angles.cos(), angles.sin()


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first ``2 * cos.shape[-1]`` values of x [n, ..., d] in interleaved pairs; the rest passes."""
    width = 2 * cos.shape[-1]
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[1],)
    cos, sin = cos.view(shape), sin.view(shape)
    even, odd = x[..., 0:width:2].float(), x[..., 1:width:2].float()
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., width:]], dim=-1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = LAYER_NORM_EPS) -> Tensor:
    """LayerNorm over the last dimension in float32, returned in x's dtype."""
    normed: Tensor = functional.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps)
    return normed.to(x.dtype)


def fold_head_weights(raw: Tensor, head_dim: int) -> Tensor:
    """Float32 [n, H]: the projection's output [n, H] times H^-0.5 and d^-0.5."""
    return raw.float() * (1.0 / math.sqrt(raw.shape[-1] * head_dim))


def project(
    hidden: Tensor,
    q_resid: Tensor,
    positions: Tensor,
    weights: IndexerWeights,
    rope_dim: int,
    theta: float,
    eps: float = LAYER_NORM_EPS,
) -> tuple[Tensor, Tensor, Tensor]:
    """The whole indexer in front of its scoring.

    Args:
        hidden: [n, hidden]; the layer's normed input.
        q_resid: [n, q_lora]; the normed low-rank query.
        positions: [n], absolute.

    Returns:
        q [n, H, d], k [n, d] in the input dtype and head weights [n, H] float32, ready for ``indexer.ragged.select``.
    """
    head_dim = weights.wk.shape[0]
    cos, sin = rope_tables(positions, rope_dim, theta)
    q = functional.linear(q_resid, weights.wq_b).view(q_resid.shape[0], -1, head_dim)
    k = layer_norm(functional.linear(hidden, weights.wk), weights.k_norm_weight, weights.k_norm_bias, eps)
    raw = functional.linear(hidden, weights.weights_proj)
    return rope_interleaved(q, cos, sin), rope_interleaved(k, cos, sin), fold_head_weights(raw, head_dim)
