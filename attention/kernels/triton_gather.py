"""Cache rows gathered into contiguous buffers on a GPU.

    slots [n] -> latent row -> bf16 [n, 576]
        bfloat16     576 bf16                                    copied
        fp8_packed   512 e4m3 | 4 fp32 scales | 64 bf16          value . scale of its 128, rounded once
        fp8_raw      576 e4m3                                    value . scale of the layer, rounded once

    slots [n] -> index key -> [n, 128] as stored, and its fp32 scale [n] from the page's tail

The slots of a request group are the same in every layer, so they are listed once a step. Compiled and interpreted in
tests; not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.layouts import IndexCache, LatentCache
from attention.sizes import (
    INDEX_DIM,
    INDEX_PAGE_BYTES,
    INDEX_SCALE_AT,
    LATENT_DIM,
    NOPE_DIM,
    PACKED_BYTES,
    PAGE_SIZE,
    ROPE_AT,
    ROPE_DIM,
    SCALE_AT,
    TILE,
)

ROWS = 8
WARPS = 4

PLAIN, PACKED, RAW = 0, 1, 2

_PLAIN = tl.constexpr(PLAIN)
_PACKED = tl.constexpr(PACKED)
_NOPE = tl.constexpr(NOPE_DIM)
_ROPE = tl.constexpr(ROPE_DIM)
_DIM = tl.constexpr(LATENT_DIM)
_TILE = tl.constexpr(TILE)
_ROW_BYTES = tl.constexpr(PACKED_BYTES)
_ROW_FLOATS = tl.constexpr(PACKED_BYTES // 4)
_ROW_HALVES = tl.constexpr(PACKED_BYTES // 2)
_SCALE_FLOAT = tl.constexpr(SCALE_AT // 4)
_ROPE_HALF = tl.constexpr(ROPE_AT // 2)
_PAGE = tl.constexpr(PAGE_SIZE)
_PAGE_BYTES = tl.constexpr(INDEX_PAGE_BYTES)
_PAGE_FLOATS = tl.constexpr(INDEX_PAGE_BYTES // 4)
_INDEX_SCALE_FLOAT = tl.constexpr(INDEX_SCALE_AT // 4)
_INDEX = tl.constexpr(INDEX_DIM)


@triton.jit
def load_nope(
    values: tl.tensor,
    scales: tl.tensor,
    slot: tl.tensor,
    inside: tl.tensor,
    layer_scale: tl.tensor,
    t: tl.tensor,
    KIND: tl.constexpr,
) -> tl.tensor:
    """Values [128 t, 128 t + 128) of the no-PE part of the latent rows at ``slot`` [n], bfloat16 [n, 128]."""
    d = tl.arange(0, _TILE) + t * _TILE
    mask = inside[:, None]
    if KIND == _PLAIN:
        return tl.load(values + slot[:, None] * _DIM + d[None, :], mask=mask, other=0.0)
    elif KIND == _PACKED:
        raw = tl.load(values + slot[:, None] * _ROW_BYTES + d[None, :], mask=mask, other=0.0)
        scale = tl.load(scales + slot * _ROW_FLOATS + (_SCALE_FLOAT + t), mask=inside, other=0.0)
        return (raw.to(tl.float32) * scale[:, None]).to(tl.bfloat16)
    else:
        raw = tl.load(values + slot[:, None] * _DIM + d[None, :], mask=mask, other=0.0)
        return (raw.to(tl.float32) * layer_scale).to(tl.bfloat16)


@triton.jit
def load_rope(
    values: tl.tensor, halves: tl.tensor, slot: tl.tensor, inside: tl.tensor, layer_scale: tl.tensor, KIND: tl.constexpr
) -> tl.tensor:
    """RoPE part of the latent rows at ``slot`` [n], bfloat16 [n, 64]."""
    d = tl.arange(0, _ROPE)
    mask = inside[:, None]
    if KIND == _PLAIN:
        return tl.load(values + slot[:, None] * _DIM + (d + _NOPE)[None, :], mask=mask, other=0.0)
    elif KIND == _PACKED:
        return tl.load(halves + slot[:, None] * _ROW_HALVES + (d + _ROPE_HALF)[None, :], mask=mask, other=0.0)
    else:
        raw = tl.load(values + slot[:, None] * _DIM + (d + _NOPE)[None, :], mask=mask, other=0.0)
        return (raw.to(tl.float32) * layer_scale).to(tl.bfloat16)


@triton.jit(do_not_specialize=["count"])
def latent_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    halves: tl.tensor,
    layer_scale: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Rows [ROWS * program 0 ...) of out."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < count
    slot = tl.load(slots + i, mask=inside, other=0).to(tl.int64)
    target = out + i.to(tl.int64)[:, None] * _DIM
    d = tl.arange(0, _TILE)
    for t in tl.static_range(_NOPE // _TILE):
        part = load_nope(values, scales, slot, inside, layer_scale, t, KIND)
        tl.store(target + (d + t * _TILE)[None, :], part.to(out.dtype.element_ty), mask=inside[:, None])
    rope = load_rope(values, halves, slot, inside, layer_scale, KIND)
    at = tl.arange(0, _ROPE) + _NOPE
    tl.store(target + at[None, :], rope.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["count"])
def index_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    out_scales: tl.tensor,
    count: tl.tensor,
    PAGED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Rows [ROWS * program 0 ...) of out; ``values`` are moved as they are."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < count
    slot = tl.load(slots + i, mask=inside, other=0).to(tl.int64)
    d = tl.arange(0, _INDEX)
    if PAGED:
        at = (slot // _PAGE) * _PAGE_BYTES + (slot % _PAGE) * _INDEX
        scale = tl.load(scales + (slot // _PAGE) * _PAGE_FLOATS + _INDEX_SCALE_FLOAT + slot % _PAGE, mask=inside)
        tl.store(out_scales + i, scale, mask=inside)
    else:
        at = slot * _INDEX
    row = tl.load(values + at[:, None] + d[None, :], mask=inside[:, None])
    tl.store(out + i.to(tl.int64)[:, None] * _INDEX + d[None, :], row, mask=inside[:, None])


def latent_views(buffer: Tensor) -> tuple[int, Tensor, Tensor, Tensor]:
    """(kind, values, scales, halves): one latent buffer as the kernels read it.

    ``buffer`` is [slots, 576] bfloat16, [slots, 656] uint8, or [slots, 576] float8_e4m3fn. Raises ``ValueError`` for
    anything else.
    """
    if buffer.dim() == 2 and buffer.is_contiguous():
        if buffer.dtype == torch.bfloat16 and buffer.shape[1] == LATENT_DIM:
            return PLAIN, buffer, buffer, buffer
        if buffer.dtype == torch.uint8 and buffer.shape[1] == PACKED_BYTES:
            return PACKED, buffer.view(torch.float8_e4m3fn), buffer.view(torch.float32), buffer.view(torch.bfloat16)
        if buffer.dtype == torch.float8_e4m3fn and buffer.shape[1] == LATENT_DIM:
            return RAW, buffer, buffer, buffer
    raise ValueError(
        f"cache: a contiguous [slots, {LATENT_DIM}] bfloat16 or float8_e4m3fn, or [slots, {PACKED_BYTES}] uint8 buffer "
        f"is needed on a GPU, not {list(buffer.shape)} {buffer.dtype}"
    )


def gather_latent(buffer: Tensor, slots: Tensor, out: Tensor, layer_scale: float = 1.0) -> None:
    """Fill out [n, 576], bfloat16, with the latent rows at int64 or int32 slots [n].

    ``buffer`` as in ``latent_views``; ``layer_scale`` is that of float8_e4m3fn rows. Slots are not checked: a read
    outside the buffer is the caller's error.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    kind, values, scales, halves = latent_views(buffer)
    count = slots.shape[0]
    if out.shape != (count, LATENT_DIM) or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise ValueError(
            f"out: contiguous bfloat16 [{count}, {LATENT_DIM}] is needed, not {list(out.shape)} {out.dtype}"
        )
    if count:
        latent_kernel[(triton.cdiv(count, ROWS),)](
            values, scales, halves, layer_scale, slots, out, count, KIND=kind, ROWS=ROWS, num_warps=WARPS
        )


def gather_index(cache: IndexCache, slots: Tensor, out: Tensor, out_scales: Tensor | None) -> None:
    """Fill out [n, 128] with the index keys at slots [n], and ``out_scales`` float32 [n] from an fp8 cache.

    ``out`` is float8_e4m3fn for an fp8 cache, else bfloat16. Raises ``ValueError`` naming what does not fit.
    """
    packed = cache.kind == "fp8"
    want = torch.float8_e4m3fn if packed else torch.bfloat16
    count = slots.shape[0]
    if cache.kind == "float32":
        raise ValueError("cache: float32 index keys are for the CPU; fp8 or bfloat16 is needed on a GPU")
    if out.shape != (count, INDEX_DIM) or out.dtype != want or not out.is_contiguous():
        raise ValueError(f"out: contiguous {want} [{count}, {INDEX_DIM}] is needed, not {list(out.shape)} {out.dtype}")
    if (out_scales is None) == packed:
        raise ValueError(f"out_scales: given exactly for an fp8 cache, this one is {cache.kind}")
    if count == 0:
        return
    # Bytes, not float8: the values are moved, not read as numbers.
    values, target = (cache.buffer, out.view(torch.uint8)) if packed else (cache.buffer, out)
    index_kernel[(triton.cdiv(count, 4 * ROWS),)](
        values,
        cache.buffer.view(torch.float32) if packed else values,
        slots,
        target,
        target if out_scales is None else out_scales,
        count,
        PAGED=packed,
        ROWS=4 * ROWS,
        num_warps=WARPS,
    )


def gather(cache: LatentCache, slots: Tensor, out: Tensor) -> None:
    """``gather_latent`` of a ``LatentCache``."""
    gather_latent(cache.buffer, slots, out, cache.scale)
