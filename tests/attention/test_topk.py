"""Threshold selection against a stable sort."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.kernels.reference import best
from attention.kernels.topk import collect


def select(row: torch.Tensor, topk: int) -> list[int]:
    room = torch.full((-(-row.shape[0] // 64) * 64,), float("nan"))
    room[: row.shape[0]] = row
    out = torch.full((topk,), -5, dtype=torch.int32)
    collect(room.data_ptr(), row.shape[0], topk, out.data_ptr())
    return out.tolist()


VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, float("inf"), float("-inf"), 0.5])


@settings(deadline=None, max_examples=200)
@given(row=st.lists(VALUES | st.floats(width=32, allow_nan=False), min_size=2, max_size=200), data=st.data())
def test_any_row(row: list[float], data: st.DataObject) -> None:
    topk = data.draw(st.integers(1, len(row) - 1))
    values = torch.tensor(row, dtype=torch.float32)
    assert select(values, topk) == best(values, topk).tolist()


def test_long_rows() -> None:
    for seed, n in enumerate([65, 4096, 8192, 100_000]):
        row = torch.randn(n, generator=torch.Generator().manual_seed(seed))
        row[n // 2 :] = row[n // 2 :].round(decimals=1)
        for topk in (1, 64, n // 2, n - 1):
            assert select(row, topk) == best(row, topk).tolist()


def test_nan_in_the_row_ends_and_stays_in_bounds() -> None:
    row = torch.randn(300)
    row[::7] = float("nan")
    found = select(row, 50)
    assert found == sorted(set(found)) and found[0] >= 0 and found[-1] < 300
