"""Sparse MLA on a GPU: one program per query row, block of heads and share of the row's ids, in flash order.

    ids of the row -> rows of the buffer            by number, or through the page table (64 positions a page)
    tile of 32 or 64 latent rows                    bf16 in place; e4m3 scaled in float32 and rounded once
        s    = (q_nope . k[:512] + q_rope . k[512:]) scale          bf16 products, float32 sums
        m, l = running maximum and sum;   acc[heads, 512] += exp(s - m) k[:512]

    the 512 values are four tiles of 128: that is the width of a scale, and of one product
    splits > 1: each share leaves (acc / l, m + ln l) in float32, and a second kernel adds them up

Heads are padded to the block. An id of -1 is skipped wherever it stands. Compiled and interpreted in tests; not yet run
on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.triton_gather import latent_views, load_nope, load_rope
from attention.sizes import NOPE_DIM, PAGE_SIZE, ROPE_DIM, TILE

_NOPE = tl.constexpr(NOPE_DIM)
_ROPE = tl.constexpr(ROPE_DIM)
_TILE = tl.constexpr(TILE)
_PAGE = tl.constexpr(PAGE_SIZE)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class Shape:
    """Launch shape of ``attend_kernel``: heads and ids a tile, warps, pipeline stages, programs a set of values.

    With 2 parts a program keeps half of the 512 values and works out the scores for itself: 64 heads of all values
    leave no room for the scores in Blackwell's tensor memory. On Hopper 64 heads spill registers either way.
    """

    heads: int
    ids: int
    warps: int
    stages: int
    parts: int


_NARROW = {16: Shape(16, 32, 4, 2, 1), 32: Shape(32, 32, 8, 2, 1)}
SHAPES = {9: _NARROW, 10: {**_NARROW, 64: Shape(64, 32, 8, 2, 2)}}
"""By major compute capability, then heads: the shapes that the assembler builds without spilling registers."""

COMBINE_WARPS = 4


@triton.jit
def _fold(acc: tl.tensor, keep: tl.tensor, p: tl.tensor, k: tl.tensor) -> tl.tensor:
    """acc [h, 128] scaled by keep [h], plus p [h, n] times k [n, 128]."""
    return tl.dot(p, k, acc * keep[:, None])


@triton.jit(do_not_specialize=["slots", "table_width"])
def attend_kernel(
    q_nope: tl.tensor,
    q_rope: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    halves: tl.tensor,
    layer_scale: tl.tensor,
    ids: tl.tensor,
    row_request: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    slots: tl.tensor,
    nope_row: tl.tensor,
    nope_head: tl.tensor,
    rope_row: tl.tensor,
    rope_head: tl.tensor,
    table_width: tl.tensor,
    share: tl.tensor,
    scale: tl.tensor,
    KIND: tl.constexpr,
    PAGED: tl.constexpr,
    HEADS: tl.constexpr,
    IDS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Row and head block ``program 0`` (head blocks of a row side by side), ids share ``program 1``."""
    blocks = tl.cdiv(heads, HEADS) * PARTS
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # Tiles of 128 values in the order in which this program takes them: its own ones first.
    part = tl.program_id(0) % PARTS
    t0 = part * 2
    t1 = t0 + 1
    t2 = (t0 + 2) % 4
    t3 = t2 + 1
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    h = (tl.program_id(0) % blocks) // PARTS * HEADS + tl.arange(0, HEADS)
    known = h < heads
    d = tl.arange(0, _TILE)
    e = tl.arange(0, _ROPE)

    query = q_nope + row * nope_row + h[:, None] * nope_head + d[None, :]
    q0 = tl.load(query + t0 * _TILE, mask=known[:, None], other=0.0)
    q1 = tl.load(query + t1 * _TILE, mask=known[:, None], other=0.0)
    q2 = tl.load(query + t2 * _TILE, mask=known[:, None], other=0.0)
    q3 = tl.load(query + t3 * _TILE, mask=known[:, None], other=0.0)
    qr = tl.load(q_rope + row * rope_row + h[:, None] * rope_head + e[None, :], mask=known[:, None], other=0.0)

    line = table
    readable = True
    if PAGED:
        request = tl.load(row_request + row)
        line = table + tl.maximum(request, 0).to(tl.int64) * table_width
        readable = request >= 0

    first = split * share
    everything = tl.arange(0, WIDTH)
    mine = (everything >= first) & (everything < tl.minimum(first + share, width))
    listed = tl.load(ids + row * width + everything, mask=mine, other=-1)
    stop = tl.max(tl.where(listed >= 0, everything + 1, 0))
    stop = tl.where(readable, stop, 0)

    m = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    a0 = tl.zeros([HEADS, _TILE], tl.float32)
    a1 = tl.zeros([HEADS, _TILE], tl.float32)
    if PARTS == 1:
        a2 = tl.zeros([HEADS, _TILE], tl.float32)
        a3 = tl.zeros([HEADS, _TILE], tl.float32)
    for at in tl.range(first, stop, IDS):
        j = at + tl.arange(0, IDS)
        position = tl.load(ids + row * width + j, mask=j < stop, other=-1)
        if PAGED:
            page = tl.load(line + position // _PAGE, mask=position >= 0, other=0)
            slot = page.to(tl.int64) * _PAGE + position % _PAGE
        else:
            slot = position.to(tl.int64)
        inside = (position >= 0) & (slot >= 0) & (slot < slots)
        slot = tl.where(inside, slot, 0)
        k0 = load_nope(values, scales, slot, inside, layer_scale, t0, KIND)
        k1 = load_nope(values, scales, slot, inside, layer_scale, t1, KIND)
        k2 = load_nope(values, scales, slot, inside, layer_scale, t2, KIND)
        k3 = load_nope(values, scales, slot, inside, layer_scale, t3, KIND)
        kr = load_rope(values, halves, slot, inside, layer_scale, KIND)
        s = tl.dot(qr, tl.trans(kr))
        s = tl.dot(q0, tl.trans(k0), s)
        s = tl.dot(q1, tl.trans(k1), s)
        s = tl.dot(q2, tl.trans(k2), s)
        s = tl.dot(q3, tl.trans(k3), s)
        s = tl.where(inside[None, :], s * (scale * _LOG2E), float("-inf"))
        higher = tl.maximum(m, tl.max(s, 1))
        # NOTE: a tile of absent ids leaves the maximum at -inf; 0 in its place keeps exp2 away from inf - inf.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        keep = tl.exp2(m - base)
        total = total * keep + tl.sum(p, 1)
        m = higher
        half = p.to(tl.bfloat16)
        a0 = _fold(a0, keep, half, k0)
        a1 = _fold(a1, keep, half, k1)
        if PARTS == 1:
            a2 = _fold(a2, keep, half, k2)
            a3 = _fold(a3, keep, half, k3)

    some = total > 0
    share_of = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
    place = (row * splits + split) * heads + h
    natural = tl.where(some, (m + tl.log2(tl.where(some, total, 1.0))) * _LN2, float("-inf"))
    tl.store(lse + place, natural, mask=known & (part == 0))
    target = out + place[:, None] * _NOPE + d[None, :]
    kind = out.dtype.element_ty
    tl.store(target + t0 * _TILE, (a0 * share_of[:, None]).to(kind), mask=known[:, None])
    tl.store(target + t1 * _TILE, (a1 * share_of[:, None]).to(kind), mask=known[:, None])
    if PARTS == 1:
        tl.store(target + t2 * _TILE, (a2 * share_of[:, None]).to(kind), mask=known[:, None])
        tl.store(target + t3 * _TILE, (a3 * share_of[:, None]).to(kind), mask=known[:, None])


@triton.jit
def combine_kernel(
    part: tl.tensor,
    part_lse: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    heads: tl.tensor,
    splits: tl.tensor,
    SPLITS: tl.constexpr,
) -> None:
    """Row ``program 0``, head ``program 1``: the shares weighted by exp(lse - max)."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    s = tl.arange(0, SPLITS)
    there = s < splits
    at = (row * splits + s) * heads + h
    part_of = tl.load(part_lse + at, mask=there, other=float("-inf"))
    most = tl.max(part_of)
    base = tl.where(most == float("-inf"), 0.0, most)
    weight = tl.exp(part_of - base)
    mass = tl.sum(weight)
    some = mass > 0
    weight = tl.where(some, weight / tl.where(some, mass, 1.0), 0.0)
    tl.store(lse + row * heads + h, tl.where(some, base + tl.log(tl.where(some, mass, 1.0)), float("-inf")))
    d = tl.arange(0, _NOPE)
    parts = tl.load(part + at[:, None] * _NOPE + d[None, :], mask=there[:, None], other=0.0)
    found = tl.sum(parts * weight[:, None], 0)
    tl.store(out + (row * heads + h) * _NOPE + d, found.to(out.dtype.element_ty))


def shape_for(heads: int, major: int = 9) -> Shape:
    """Launch shape for a rank's heads: the narrowest block that holds them, else the widest."""
    known = SHAPES.get(major, SHAPES[9])
    return known[next((block for block in sorted(known) if heads <= block), max(known))]


def splits_for(rows: int, heads: int, width: int, processors: int, shape: Shape) -> int:
    """Shares of the ids, at most 16: doubled until the programs fill the processors twice or a share has four tiles."""
    programs = rows * triton.cdiv(heads, shape.heads) * shape.parts
    most = max(1, width // (4 * shape.ids))
    splits = 1
    while splits < min(16, most) and programs * splits < 2 * processors:
        splits *= 2
    return min(splits, most)


def attend(
    q_nope: Tensor,
    q_rope: Tensor,
    buffer: Tensor,
    ids: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
    row_request: Tensor | None = None,
    page_table: Tensor | None = None,
    layer_scale: float = 1.0,
    splits: int = 1,
    take: Any = None,
    shape: Shape | None = None,
) -> None:
    """Fill out [n, heads, 512] and lse float32 [n, heads]; see ``paged.attend`` for the sum.

    Args:
        q_nope, q_rope: bfloat16 [n, heads, 512] and [n, heads, 64], last stride 1.
        buffer: latent rows as in ``triton_gather.latent_views``; ``layer_scale`` is that of float8_e4m3fn rows.
        ids: int32 [n, k]: rows of ``buffer``, or positions when ``row_request`` is given; -1 is skipped.
        scale: softmax scale.
        out, lse: bfloat16 or float32, and float32, contiguous.
        row_request: int32 [n], request of each row, -1 for a padding row (result 0, lse -inf).
        page_table: int32 [requests, pages], with ``row_request``.
        splits: shares of the ids; the result's bits depend on it.
        take: ``take(shape, dtype, what)`` for the temporaries of splits > 1.
        shape: launch shape; that of ``shape_for`` on Hopper when not given.

    An id past the buffer is treated as absent and not reported, which would take a wait for the device.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    rows, heads = q_nope.shape[:2]
    kind, values, scales, halves = latent_views(buffer)
    if q_nope.dtype != torch.bfloat16 or q_rope.dtype != torch.bfloat16:
        raise ValueError(f"q_nope: bfloat16 is needed on a GPU, not {q_nope.dtype}")
    if q_nope.stride(2) != 1 or q_rope.stride(2) != 1:
        raise ValueError("q_nope: the last dimension of both query parts must be dense")
    if not (ids.is_contiguous() and out.is_contiguous() and lse.is_contiguous()):
        raise ValueError("ids, out, lse: contiguous tensors are needed")
    if (row_request is None) != (page_table is None):
        raise ValueError("page_table: given exactly with row_request")
    if splits < 1 or (splits > 1 and take is None):
        raise ValueError(f"splits: {splits}; at least 1 is needed, and take with more than 1")
    if rows == 0:
        return
    width = ids.shape[1]
    if width == 0:
        out.zero_()
        lse.fill_(float("-inf"))
        return
    shape = shape or shape_for(heads)
    target, sums = out, lse
    if splits > 1:
        target = take((rows, splits, heads, NOPE_DIM), torch.float32, "shares of sparse MLA")
        sums = take((rows, splits, heads), torch.float32, "log-sum-exp of the shares")
    share = triton.cdiv(triton.cdiv(width, splits), shape.ids) * shape.ids
    attend_kernel[(rows * triton.cdiv(heads, shape.heads) * shape.parts, splits)](
        q_nope,
        q_rope,
        values,
        scales,
        halves,
        layer_scale,
        ids,
        ids if row_request is None else row_request,
        ids if page_table is None else page_table,
        target,
        sums,
        heads,
        width,
        buffer.shape[0],
        q_nope.stride(0),
        q_nope.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        0 if page_table is None else page_table.stride(0),
        share,
        scale,
        KIND=kind,
        PAGED=page_table is not None,
        HEADS=shape.heads,
        IDS=shape.ids,
        PARTS=shape.parts,
        WIDTH=triton.next_power_of_2(width),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if splits > 1:
        combine_kernel[(rows, heads)](
            target, sums, out, lse, heads, splits, SPLITS=triton.next_power_of_2(splits), num_warps=COMBINE_WARPS
        )
