"""The indexer in front of its scoring, against float64 written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from attention.indexer.numerics import (
    IndexerWeights,
    fold_head_weights,
    layer_norm,
    project,
    rope_interleaved,
    rope_tables,
)


def test_rope_turns_pairs_and_keeps_the_rest() -> None:
    positions = torch.tensor([0, 1, 1000])
    x = torch.randn((3, 2, 12))
    turned = rope_interleaved(x, *rope_tables(positions, 8, 10000.0))
    assert torch.equal(turned[0], x[0])
    assert torch.equal(turned[..., 8:], x[..., 8:])
    for n, position in enumerate(positions.tolist()):
        for i in range(4):
            angle = position * 10000.0 ** (-2 * i / 8)
            a, b = x[n, 1, 2 * i].item(), x[n, 1, 2 * i + 1].item()
            assert turned[n, 1, 2 * i].item() == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=2e-4)
            assert turned[n, 1, 2 * i + 1].item() == pytest.approx(a * math.sin(angle) + b * math.cos(angle), abs=2e-4)


def test_layer_norm_is_float32_inside() -> None:
    x = (torch.randn((4, 128)) * 3 + 100).bfloat16()
    weight, bias = torch.randn(128), torch.randn(128)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    want = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight + bias
    assert torch.allclose(layer_norm(x, weight, bias).double(), want, rtol=2**-7, atol=1e-3)
    assert layer_norm(x, weight, bias).dtype == torch.bfloat16


def test_head_weights_carry_both_scales() -> None:
    assert torch.allclose(fold_head_weights(torch.ones((1, 32)), 128), torch.tensor(32**-0.5 * 128**-0.5))


def test_shapes_of_the_real_size() -> None:
    weights = IndexerWeights(
        wq_b=torch.randn((32 * 128, 96)),
        wk=torch.randn((128, 80)),
        k_norm_weight=torch.ones(128),
        k_norm_bias=torch.zeros(128),
        weights_proj=torch.randn((32, 80)),
    )
    q, k, w = project(torch.randn((5, 80)), torch.randn((5, 96)), torch.arange(5), weights, 64, 1e6)
    assert q.shape == (5, 32, 128) and k.shape == (5, 128) and w.shape == (5, 32) and w.dtype == torch.float32
