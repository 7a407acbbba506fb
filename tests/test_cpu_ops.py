"""The compiled operators and products of the CPU decoder: against torch, and bit for bit whatever the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_runtime import cpu_ops
from glm_runtime.cpu_gemm import Weight
from glm_runtime.cpu_layer import experts

DTYPES = [torch.float32, torch.bfloat16]
THETA = 1e6


def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    rounding = 1e-2 if dtype == torch.bfloat16 else 2e-5
    return torch.allclose(found.float(), wanted.float(), rtol=rounding, atol=rounding)


def _angles(width: int, positions: int = 300) -> torch.Tensor:
    angle = torch.arange(positions)[:, None] * THETA ** (-torch.arange(0, width, 2) / width)
    return torch.cat([angle.cos(), angle.sin()], -1).float().contiguous()


def _turned(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """RoPE of interleaved pairs: x [..., width] and its [cos | sin] [..., width]."""
    cos, sin = table.chunk(2, -1)
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(1, 40),
    inner=st.sampled_from([2, 64, 130, 576, 1024]),
    outer=st.sampled_from([1, 8, 64, 100, 864]),
)
@settings(max_examples=25, deadline=None)
def test_product(dtype: torch.dtype, rows: int, inner: int, outer: int) -> None:
    x, weight = _randn(rows, inner, dtype=dtype), _randn(outer, inner, dtype=dtype, seed=1)
    packed = Weight(weight)
    whole = packed(x)
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    bound = inner * 2.0**-23 * size + (2.0**-8 * exact.abs() if dtype == torch.bfloat16 else 0.0)
    assert whole.shape == (rows, outer)
    assert bool(((whole.double() - exact).abs() <= bound).all())
    for start in range(0, rows, 7):
        stop = min(rows, start + 7)
        assert torch.equal(packed(x[start:stop]), whole[start:stop])
        assert torch.equal(packed(x[start : start + 1]), whole[start : start + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_product_of_a_view_and_of_several_weights(dtype: torch.dtype) -> None:
    wide = _randn(5, 192, dtype=dtype)
    weight = _randn(3, 128, 64, dtype=dtype, seed=1)
    stacked = Weight(weight)
    one = Weight(weight[2])
    assert torch.equal(one(wide[:, 64:128]), one(wide[:, 64:128].contiguous()))
    size = 64 * 128
    assert torch.equal(stacked.data.view(-1)[2 * size : 3 * size], one.data.view(-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm(dtype: torch.dtype) -> None:
    rows, width, half = 7, 256, dtype == torch.bfloat16
    x, residual, weight = (_randn(rows, width, dtype=dtype, seed=s) for s in range(3))
    weight = weight[0].contiguous()
    total = x + residual
    out = torch.empty_like(x)
    cpu_ops.add_norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), 1e-6, out.data_ptr(), rows, width, half)
    assert torch.equal(residual, total)
    assert _close(out, F.rms_norm(total.float(), (width,), weight.float(), 1e-6), dtype)
    cpu_ops.add_norm(0, residual.data_ptr(), weight.data_ptr(), 1e-6, out.data_ptr(), rows, width, half)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent(dtype: torch.dtype) -> None:
    rows, q_width, kv_width, rope, half = 5, 128, 512, 64, dtype == torch.bfloat16
    x = _randn(rows, q_width + kv_width + rope + 32, dtype=dtype)
    q_weight, kv_weight = _randn(q_width, dtype=dtype, seed=1), _randn(kv_width, dtype=dtype, seed=2)
    positions, table = torch.tensor([0, 1, 299, 64, 7]), _angles(rope)
    q, row = x.new_empty(rows, q_width), x.new_empty(rows, kv_width + rope)
    step = x.stride(0) * x.element_size()
    cpu_ops.latent(
        x.data_ptr(), step, q_weight.data_ptr(), 1e-6, q.data_ptr(), q_width, kv_weight.data_ptr(), 1e-5,
        row.data_ptr(), kv_width, rope, positions.data_ptr(), table.data_ptr(), rows, half,
    )  # fmt: skip
    low, latent, key = x[:, :q_width], x[:, q_width:][:, :kv_width], x[:, q_width + kv_width :][:, :rope]
    assert _close(q, F.rms_norm(low.float(), (q_width,), q_weight.float(), 1e-6), dtype)
    assert _close(row[:, :kv_width], F.rms_norm(latent.float(), (kv_width,), kv_weight.float(), 1e-5), dtype)
    assert _close(row[:, kv_width:], _turned(key, table[positions]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_turn_leaves_the_rest(dtype: torch.dtype) -> None:
    rows, heads, width, rope = 4, 3, 128, 64
    q = _randn(rows, heads, width, dtype=dtype)
    before = q.clone()
    positions, table = torch.tensor([3, 0, 250, 9]), _angles(rope)
    size = q.element_size()
    cpu_ops.turn(
        q.data_ptr(), heads * width * size, heads, width * size, rope, positions.data_ptr(), table.data_ptr(), rows,
        dtype == torch.bfloat16,
    )  # fmt: skip
    assert _close(q[..., :rope], _turned(before[..., :rope], table[positions][:, None]), dtype)
    assert torch.equal(q[..., rope:], before[..., rope:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_index_key(dtype: torch.dtype) -> None:
    rows, width, rope = 4, 128, 64
    x, weight, bias = _randn(rows, 160, dtype=dtype), _randn(width, seed=1), _randn(width, seed=2)
    positions, table = torch.tensor([3, 0, 250, 9]), _angles(rope)
    key = x.new_empty(rows, width)
    cpu_ops.index_key(
        x.data_ptr(), x.stride(0) * x.element_size(), weight.data_ptr(), bias.data_ptr(), 1e-6, width, rope,
        positions.data_ptr(), table.data_ptr(), key.data_ptr(), rows, dtype == torch.bfloat16,
    )  # fmt: skip
    normed = F.layer_norm(x[:, :width].float(), (width,), weight, bias, 1e-6)
    wanted = torch.cat([_turned(normed[:, :rope], table[positions]), normed[:, rope:]], -1)
    loose = 3e-2 if dtype == torch.bfloat16 else 2e-5
    assert torch.allclose(key.float(), wanted, rtol=loose, atol=loose)


def test_gate_at_extremes() -> None:
    g = torch.cat([torch.linspace(-200, 200, 61), torch.tensor([0.0, -0.0, 1e-30])])
    x = torch.cat([g, torch.full_like(g, 1.5)])[None].contiguous()
    out = torch.empty(1, 64)
    cpu_ops.gate(x.data_ptr(), out.data_ptr(), 1, 64, False)
    exact = g.double() * torch.sigmoid(g.double()) * 1.5
    assert torch.allclose(out[0].double(), exact, rtol=1e-6, atol=1e-36)


@given(st.integers(1, 9), st.integers(2, 40), st.integers(1, 8), st.booleans())
@settings(max_examples=60, deadline=None)
def test_route(rows: int, count: int, k: int, renormalise: bool) -> None:
    k = min(k, count)
    logits, bias = _randn(rows, count), _randn(count, seed=1) * 0.1
    scores = logits.sigmoid()
    wanted = torch.sort(-(scores + bias), dim=-1, stable=True).indices[:, :k]
    weights = scores.gather(1, wanted)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    ids, found = torch.empty(rows, k, dtype=torch.int32), torch.empty(rows, k)
    cpu_ops.route(
        logits.data_ptr(), 4 * count, bias.data_ptr(), rows, count, k, renormalise, ids.data_ptr(), found.data_ptr()
    )
    assert torch.equal(ids.long(), wanted)
    assert torch.allclose(found, weights, rtol=1e-5)


def test_route_takes_the_lowest_of_equals() -> None:
    logits, bias = torch.zeros(1, 6), torch.zeros(6)
    ids, weights = torch.empty(1, 3, dtype=torch.int32), torch.empty(1, 3)
    cpu_ops.route(logits.data_ptr(), 24, bias.data_ptr(), 1, 6, 3, True, ids.data_ptr(), weights.data_ptr())
    assert ids.tolist() == [[0, 1, 2]]


def _experts(x: torch.Tensor, ids: torch.Tensor, w13: Weight, w2: Weight) -> torch.Tensor:
    rows, hidden = x.shape
    k, inner, count = ids.shape[1], w2.inner, w2.data.numel() // (w2.inner * hidden)
    starts, order = torch.empty(count + 1, dtype=torch.int32), torch.empty(rows * k, dtype=torch.int32)
    gathered, down = torch.empty_like(x), torch.empty_like(x)
    up, act, parts = x.new_empty(rows, 2 * inner), x.new_empty(rows, inner), x.new_empty(rows, k, hidden)
    buffers = (starts, order, gathered, up, act, down, parts)
    experts(
        x.data_ptr(), rows, hidden, inner, count, k, ids.data_ptr(), w13.start, w2.start,
        *(t.data_ptr() for t in buffers), x.dtype == torch.bfloat16,
    )  # fmt: skip
    return parts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 13])
def test_experts(dtype: torch.dtype, rows: int) -> None:
    hidden, inner, count, k = 128, 64, 6, 2
    x = _randn(rows, hidden, dtype=dtype)
    up, down = _randn(count, 2 * inner, hidden, seed=1).to(dtype), _randn(count, hidden, inner, seed=2).to(dtype)
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(count, generator=generator)[:k] for _ in range(rows)]).int()
    w13, w2 = Weight(up), Weight(down)
    parts = _experts(x, ids, w13, w2)
    for row in range(rows):
        for j, e in enumerate(ids[row].tolist()):
            g, u = (x[row].float() @ up[e].float().t()).chunk(2)
            wanted = (F.silu(g) * u) @ down[e].float().t()
            scale = wanted.abs().max()
            assert bool(
                ((parts[row, j].float() - wanted).abs() <= (2e-2 if dtype == torch.bfloat16 else 1e-5) * scale).all()
            )
        alone = _experts(x[row : row + 1].clone(), ids[row : row + 1].clone(), w13, w2)
        assert torch.equal(alone[0], parts[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine(dtype: torch.dtype) -> None:
    rows, k, width = 5, 3, 128
    parts, shared = _randn(rows, k, width, dtype=dtype), _randn(rows, width, dtype=dtype, seed=1)
    weights, out = _randn(rows, k, seed=2), torch.empty(rows, width, dtype=dtype)
    cpu_ops.combine(
        parts.data_ptr(), weights.data_ptr(), k, 2.5, shared.data_ptr(), out.data_ptr(), rows, width,
        dtype == torch.bfloat16,
    )  # fmt: skip
    assert _close(out, (parts.float() * weights[..., None]).sum(1) * 2.5 + shared.float(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_do_not_see_the_batch(dtype: torch.dtype) -> None:
    width, half = 192, dtype == torch.bfloat16
    weight = _randn(width, dtype=dtype)
    whole_in = _randn(33, width, dtype=dtype, seed=1)

    def normed(x: torch.Tensor) -> torch.Tensor:
        residual, out = x.clone(), torch.empty_like(x)
        cpu_ops.add_norm(0, residual.data_ptr(), weight.data_ptr(), 1e-6, out.data_ptr(), x.shape[0], width, half)
        return out

    check: Callable[[int], bool] = lambda i: torch.equal(normed(whole_in[i : i + 1].clone()), whole[i : i + 1])  # noqa: E731
    whole = normed(whole_in)
    assert all(check(i) for i in range(33))
