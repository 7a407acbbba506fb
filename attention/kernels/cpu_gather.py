"""Latent rows gathered into contiguous rows of one float type.

    slots [n] -> cache row -> copied, widened, or fp8 scaled in float32 -> out [n, 576]

The values are those that sparse MLA takes from the cache in place, so both ways of reading give the same bits. Raw
e4m3 rows (fp8_raw), which no CPU pool has, go through torch, 4,096 at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attention.kernels.sparse import copy, narrow, widen_row
from attention.kernels.vector import ask, compiled, get_i64, stamp
from attention.layouts import RAW, LatentCache, load_latent
from attention.sizes import LATENT_DIM

_COPY, _NARROW, _WIDEN, _PACKED = 0, 1, 2, 3
_AHEAD = 4
_RAW_ROWS = 4096


def _build(version: str) -> Callable[..., int]:
    @compiled
    def run(slots: int, count: int, cache: int, total: int, row_bytes: int, mode: int, half: int, out: int) -> int:
        """0, or 1 + the index of a slot outside the cache."""
        if len(version) == 0:
            return -1
        step = LATENT_DIM * (2 if half else 4)
        for i in range(count):
            slot = get_i64(slots + 8 * i)
            if slot < 0 or slot >= total:
                return 1 + i
            if i + _AHEAD < count:
                coming = get_i64(slots + 8 * (i + _AHEAD))
                if 0 <= coming < total:
                    ask(cache + coming * row_bytes, row_bytes)
            source, target = cache + slot * row_bytes, out + i * step
            if mode == _COPY:
                copy(source, target, step)
            elif mode == _NARROW:
                narrow(source, target, LATENT_DIM)
            else:
                widen_row(source, target, mode == _PACKED, half != 0)
        return 0

    return run  # type: ignore[no-any-return]


_run = _build(stamp())


def gather(cache: LatentCache, slots: Tensor, out: Tensor) -> None:
    """Fill out [n, 576], float32 or bfloat16, with the rows at int64 slots [n].

    Raises:
        ValueError: naming the argument that does not fit, or a slot outside the cache.
    """
    if out.shape != (slots.shape[0], LATENT_DIM) or not out.is_contiguous():
        raise ValueError(f"out: a contiguous [{slots.shape[0]}, {LATENT_DIM}] tensor is needed, not {list(out.shape)}")
    if out.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"out: float32 or bfloat16 is needed, not {out.dtype}")
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise ValueError("slots: a contiguous int64 tensor of one dimension is needed")
    half = out.dtype == torch.bfloat16
    if cache.kind == RAW:
        _gather_raw(cache, slots, out)
        return
    if cache.kind == "fp8_packed":
        mode = _PACKED
    elif cache.buffer.dtype == out.dtype:
        mode = _COPY
    else:
        mode = _NARROW if half else _WIDEN
    row_bytes = cache.buffer.shape[1] * cache.buffer.element_size()
    failed = _run(
        slots.data_ptr(),
        slots.shape[0],
        cache.buffer.data_ptr(),
        cache.slots,
        row_bytes,
        mode,
        int(half),
        out.data_ptr(),
    )
    if failed:
        raise ValueError(f"slots: entry {failed - 1} is outside the latent cache of {cache.slots} slots")


def _gather_raw(cache: LatentCache, slots: Tensor, out: Tensor) -> None:
    outside = (slots < 0) | (slots >= cache.slots)
    if bool(outside.any()):
        raise ValueError(
            f"slots: entry {int(outside.int().argmax())} is outside the latent cache of {cache.slots} slots"
        )
    for start in range(0, slots.shape[0], _RAW_ROWS):
        part = slice(start, start + _RAW_ROWS)
        out[part] = load_latent(cache, slots[part], out.dtype)
