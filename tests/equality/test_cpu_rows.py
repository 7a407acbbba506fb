"""The arithmetic below batch invariance: a row gives equal bits in every batch, on one thread and on several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_runtime import cpu_rows

COUNTS = (4, 5, 6, 7, 10, 13, 15, 31, 33, 100, 400, 1001, 1290)
TOTAL = 1400


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _rows(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(TOTAL, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(256, 704), (128, 4096), (512, 256), (64, 256), (256, 512)])
def test_packed_product(threads: int, inner: int, outer: int, dtype: torch.dtype) -> None:
    x = _rows(inner, dtype)
    weight = cpu_rows.pack(_rows(inner, dtype)[:1].new_empty(outer, inner).normal_())
    whole = cpu_rows.linear(x, weight)
    for count in COUNTS:
        for start in (0, 3, TOTAL - count):
            assert torch.equal(cpu_rows.linear(x[start : start + count], weight), whole[start : start + count]), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul(threads: int, dtype: torch.dtype) -> None:
    x = _rows(2 * 128, dtype)
    whole = cpu_rows.silu_mul(*x.chunk(2, -1))
    for count in COUNTS:
        for start in (0, 3, TOTAL - count):
            part = cpu_rows.silu_mul(*x[start : start + count].chunk(2, -1))
            assert torch.equal(part, whole[start : start + count]), count


def test_silu_mul_is_silu() -> None:
    gate = torch.cat([torch.linspace(-120, 120, 4801), torch.tensor([0.0, -0.0, 1e-30])])
    up = torch.full_like(gate, 1.5)
    exact = gate.double() * torch.sigmoid(gate.double()) * 1.5
    assert torch.allclose(cpu_rows.silu_mul(gate, up).double(), exact, rtol=4e-7, atol=1e-36)


@pytest.mark.parametrize("experts", [8, 16, 60, 160, 256])
def test_router_scores(threads: int, experts: int) -> None:
    logits = _rows(experts)

    def scores(x: torch.Tensor) -> torch.Tensor:
        return cpu_rows.pad_rows(x, cpu_rows.even_rows(*x.shape, threads)).sigmoid()[: x.shape[0]]

    whole = scores(logits)
    for count in COUNTS:
        for start in (0, 3, TOTAL - count):
            assert torch.equal(scores(logits[start : start + count]), whole[start : start + count]), count


def test_no_rows_stay_none() -> None:
    assert cpu_rows.even_rows(0, 8, 2) == 0


@given(st.integers(1, 20000), st.integers(1, 384), st.integers(1, 64))
def test_even_rows_leave_no_rest(rows: int, width: int, threads: int) -> None:
    padded = cpu_rows.even_rows(rows, width, threads)
    numbers = padded * width
    shares = min(threads, -(-numbers // cpu_rows.GRAIN))
    assert rows <= padded
    assert numbers % (cpu_rows.LANES * shares) == 0
    if width % cpu_rows.LANES == 0 and shares == 1:
        assert padded == rows
