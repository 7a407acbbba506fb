"""Index scores over gathered keys on the CPU: keys packed once for a request group, then read by all its query slices.

    gather   slots [n] -> 64 keys at a time: copied or widened -> packed word-major -> keys (and fp8 scales)
    select   64 rows of a request at a time
                 for each block of 64 keys:  scores of the rows that see it
                 for each row:               threshold and ids

A score has the bits of ``cpu_select``: the same products in the same order, wherever the key lies in its block. With
key slices a row of the logits holds its running best in front, positions ascending: a tie again goes to the lowest.

    unsliced | scores of all visible keys |            sliced | best so far, <= topk | scores of this slice | 63 spare |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from numba import njit
from torch import Tensor

from attention.kernels.score import pack, quantise, scale_keys, score, widen
from attention.kernels.topk import collect
from attention.kernels.vector import compiled, get_f32, get_i32, get_i64, put_f32, put_i32, stamp
from attention.layouts import IndexCache
from attention.scratch import Scratch
from attention.sizes import INDEX_DIM, INDEX_PAGE_BYTES, INDEX_SCALE_AT

BLOCK = 64
"""Keys a block."""
TILE = 64
"""Query rows that share a pass over the keys: their scores stay in the second-level cache."""
SPARE = 63
"""Floats behind the last row of scores that the selection may overwrite."""

# How keys are brought in, and what is done to the queries.
_DIRECT, _HALF, _SMALL = 0, 1, 2
_AS_IT_IS, _WIDEN, _QUANTISE_FLOAT, _QUANTISE_HALF = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Form:
    """Types that a cache kind and a query dtype meet in: ``words`` of 32 bits a key, pairs of bfloat16 or float32."""

    words: int
    pairs: int
    mode: int
    prepare: int

    @property
    def key_bytes(self) -> int:
        """Bytes of one gathered key, without its scale."""
        return 4 * self.words

    @property
    def scaled(self) -> bool:
        """Whether each key has a float32 scale beside it."""
        return self.mode == _SMALL


def form(kind: str, dim: int, dtype: torch.dtype) -> Form:
    """How keys of ``dim`` values in a cache of ``kind`` meet queries of ``dtype`` (float32 or bfloat16)."""
    if dim % 16:
        raise ValueError(f"cache: keys of {dim} values; a multiple of 16 is needed")
    half = dtype == torch.bfloat16
    if kind == "fp8":
        return Form(dim // 2, 1, _SMALL, _QUANTISE_HALF if half else _QUANTISE_FLOAT)
    if kind == "bfloat16":
        return Form(dim // 2, 1, _DIRECT, _AS_IT_IS) if half else Form(dim, 0, _HALF, _AS_IT_IS)
    return Form(dim, 0, _DIRECT, _WIDEN if half else _AS_IT_IS)


@njit(nogil=True)
def _in_a_row(slots: int) -> bool:
    """Whether 64 slots are one after another."""
    first = get_i64(slots)
    for i in range(1, 64):  # noqa: SIM110
        if get_i64(slots + 8 * i) != first + i:
            return False
    return True


@njit(nogil=True)
def _key(cache: int, row_bytes: int, mode: int, slot: int) -> int:
    """Address of a key."""
    if mode == _SMALL:
        return cache + slot // 64 * INDEX_PAGE_BYTES + slot % 64 * INDEX_DIM
    return cache + slot * row_bytes


def _build_gather(version: str) -> Callable[..., int]:
    @compiled
    def run(
        slots: int,
        count: int,
        cache: int,
        total: int,
        row_bytes: int,
        dim: int,
        words: int,
        mode: int,
        staging: int,
        keys: int,
        scales: int,
    ) -> int:
        """0, or 1 + the index of a slot outside the cache."""
        if len(version) == 0:
            return -1
        for start in range(0, count, 64):
            taken = min(64, count - start)
            block = keys + start * 4 * words
            for i in range(start, start + taken):
                slot = get_i64(slots + 8 * i)
                if slot < 0 or slot >= total:
                    return 1 + i
            first = get_i64(slots + 8 * start)
            whole = taken == 64 and _in_a_row(slots + 8 * start) and (mode != _SMALL or first % 64 == 0)
            if whole and mode == _DIRECT:
                pack(_key(cache, row_bytes, mode, first), row_bytes, words, block)
            elif whole:
                widen(_key(cache, row_bytes, mode, first), 64 * dim, mode == _SMALL, staging)
                pack(staging, 4 * words, words, block)
            else:
                for i in range(taken):
                    source = _key(cache, row_bytes, mode, get_i64(slots + 8 * (start + i)))
                    target = staging + i * 4 * words
                    if mode == _DIRECT:
                        for w in range(words):
                            put_i32(target + 4 * w, get_i32(source + 4 * w))
                    else:
                        widen(source, dim, mode == _SMALL, target)
                for w in range(taken * words, 64 * words):
                    put_i32(staging + 4 * w, 0)
                pack(staging, 4 * words, words, block)
            if mode == _SMALL:
                for i in range(taken):
                    slot = get_i64(slots + 8 * (start + i))
                    scale = cache + slot // 64 * INDEX_PAGE_BYTES + INDEX_SCALE_AT + 4 * (slot % 64)
                    put_f32(scales + 4 * (start + i), get_f32(scale))
                for i in range(taken, 64):
                    put_f32(scales + 4 * (start + i), 0.0)
        return 0

    return run  # type: ignore[no-any-return]


@njit(nogil=True)
def _turned_back(row: int, count: int) -> None:
    """Ordered integers to the floats that they stand for, in place."""
    for i in range(count):
        bits = get_i32(row + 4 * i)
        put_i32(row + 4 * i, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@njit(nogil=True)
def _merged(row: int, before: int, fresh: int, start: int, topk: int, picked: int, out: int) -> None:
    """Fold the scores of a slice behind the ``before`` best so far; ``start`` is the position of its first key."""
    if before + fresh <= topk:
        for j in range(fresh):
            put_i32(out + 4 * (before + j), start + j)
        for j in range(before + fresh, topk):
            put_i32(out + 4 * j, -1)
        return
    collect(row, before + fresh, topk, picked)
    for t in range(topk):
        # NOTE: picked ascends, so what lies at or behind t is still unread.
        j = get_i32(picked + 4 * t)
        put_i32(out + 4 * t, get_i32(out + 4 * j) if j < before else start + j - before)
        put_i32(row + 4 * t, get_i32(row + 4 * j))
    _turned_back(row, topk)


def _build_select(version: str) -> Callable[..., int]:
    @compiled
    def run(
        rows: int,
        low: int,
        high: int,
        before: int,
        seen: int,
        sliced: int,
        start: int,
        q: int,
        heads: int,
        dim: int,
        words: int,
        pairs: int,
        prepare: int,
        weights: int,
        keys: int,
        scales: int,
        topk: int,
        stride: int,
        tile: int,
        prepared: int,
        edge: int,
        picked: int,
        logits: int,
        out: int,
    ) -> int:
        """0. Rows of one request, and of one ``low``, lie together, ``high`` ascending."""
        if len(version) == 0:
            return -1
        row_bytes = 4 * heads * words
        given_bytes = heads * dim * (2 if prepare in (_WIDEN, _QUANTISE_HALF) else 4)
        row = 0
        while row < rows:
            if get_i32(seen + 4 * row) <= topk:
                for j in range(topk):
                    put_i32(out + 4 * (row * topk + j), j if j < get_i32(seen + 4 * row) else -1)
                row += 1
                continue
            first = get_i32(low + 4 * row)
            stop = row + 1
            while stop < rows and stop - row < tile and get_i32(low + 4 * stop) == first:
                stop += 1
            last = get_i32(high + 4 * (stop - 1))
            queries = q + row * row_bytes
            gains = weights + 4 * row * heads
            if prepare != _AS_IT_IS:
                queries = prepared
                gains = prepared + (stop - row) * row_bytes
                for i in range(row, stop):
                    target = queries + (i - row) * row_bytes
                    gain = gains + 4 * (i - row) * heads
                    if prepare == _WIDEN:
                        widen(q + i * given_bytes, heads * dim, False, target)
                        for h in range(heads):
                            put_i32(gain + 4 * h, get_i32(weights + 4 * (i * heads + h)))
                    else:
                        quantise(
                            q + i * given_bytes, heads, prepare == _QUANTISE_HALF, target, weights + 4 * i * heads, gain
                        )
            begin = row
            for block in range(first // 64, (last + 63) // 64):
                at = 64 * block
                while begin < stop and get_i32(high + 4 * begin) <= max(at, first):
                    begin += 1
                packed = keys + at * 4 * words
                coming = 256 * words if at + 64 < last else 0
                for i in range(begin, stop):
                    end = get_i32(high + 4 * i)
                    line = logits + 4 * ((i - row) * stride + min(get_i32(before + 4 * i), topk))
                    inside = at >= first and at + 64 <= end
                    place = line + 4 * (at - first) if inside else edge
                    score(
                        queries + (i - row) * row_bytes,
                        heads,
                        words,
                        pairs != 0,
                        packed,
                        gains + 4 * (i - row) * heads,
                        place,
                        packed + 256 * words,
                        coming if i == begin else 0,
                    )
                    if scales != 0:
                        scale_keys(place, scales + 4 * at)
                    if not inside:
                        for k in range(max(at, first), min(at + 64, end)):
                            put_i32(line + 4 * (k - first), get_i32(edge + 4 * (k - at)))
            # NOTE: last row first: a selection may spend up to 63 floats behind its row, where the next row began.
            for back in range(stop - row):
                i = stop - 1 - back
                line = logits + 4 * (i - row) * stride
                fresh = get_i32(high + 4 * i) - first
                if sliced == 0:
                    collect(line, fresh, topk, out + 4 * i * topk)
                elif fresh > 0:
                    held = min(get_i32(before + 4 * i), topk)
                    _merged(line, held, fresh, start, topk, picked, out + 4 * i * topk)
            row = stop
        return 0

    return run  # type: ignore[no-any-return]


_gather = _build_gather(stamp())
_select = _build_select(stamp())


def gather_keys(cache: IndexCache, slots: Tensor, how: Form, keys: Tensor, scales: Tensor, scratch: Scratch) -> None:
    """Pack index keys into ``keys``, 64 a block; lanes behind the last key are 0.

    Args:
        cache: index keys. slots: int64 [n], where they lie.
        how: of the cache's kind and the queries' dtype.
        keys: uint8, contiguous, room for n keys rounded up to 64. scales: float32, the same number, read for fp8 only.
        scratch: one block.

    Raises:
        ValueError: naming the argument that does not fit, or a slot outside the cache.
    """
    count = slots.shape[0]
    room = -(-count // BLOCK) * BLOCK
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise ValueError("slots: a contiguous int64 tensor of one dimension is needed")
    if keys.numel() * keys.element_size() < room * how.key_bytes or (how.scaled and scales.numel() < room):
        raise ValueError(f"keys: no room for {room} index keys of {how.key_bytes} bytes")
    row_bytes = cache.dim * cache.buffer.element_size()
    failed = _gather(
        slots.data_ptr(),
        count,
        cache.buffer.data_ptr(),
        cache.slots,
        row_bytes,
        cache.dim,
        how.words,
        how.mode,
        scratch.address(BLOCK * how.key_bytes, "index keys of one block"),
        keys.data_ptr(),
        scales.data_ptr(),
    )
    if failed:
        raise ValueError(f"slots: entry {failed - 1} is outside the index cache of {cache.slots} slots")


@dataclass(frozen=True, slots=True)
class Span:
    """What a call scores, int32 [rows] each: gathered keys [low, high), visible keys ``before`` and ``seen`` in all.

    Rows of one request lie together in the order of their positions. ``start`` is the position of the first key of a
    slice; None where the span is not sliced and ``before`` is 0.
    """

    low: Tensor
    high: Tensor
    before: Tensor
    seen: Tensor
    start: int | None = None


def select_keys(
    q: Tensor,
    head_weights: Tensor,
    how: Form,
    keys: Tensor,
    scales: Tensor,
    span: Span,
    topk: int,
    logits: Tensor,
    stride: int,
    scratch: Scratch,
    out: Tensor,
) -> None:
    """Score gathered keys and keep the best: all of them at once, or one slice after another into the same ``out``.

    Args:
        q, head_weights: [rows, heads, dim] and float32 [rows, heads], contiguous.
        how, keys, scales: as gathered.
        logits: float32, flat; min(rows, TILE) rows of ``stride`` floats and, unsliced, SPARE more. Between the slices
            of a row its running scores stay here, so rows of slices are at most TILE, and the same in each call.
        stride: at least the longest span; sliced, topk + SPARE more.
        scratch: prepared queries of one tile.
        out: int32 [rows, topk], contiguous; positions, ascending, then -1.
    """
    rows, heads, dim = q.shape
    if rows == 0:
        return
    tile = min(rows, TILE)
    if span.start is not None and rows > TILE:
        raise ValueError(f"q: {rows} rows of key slices at once; at most {TILE}")
    row_bytes = 4 * heads * (how.words + 1)
    _select(
        rows,
        span.low.data_ptr(),
        span.high.data_ptr(),
        span.before.data_ptr(),
        span.seen.data_ptr(),
        0 if span.start is None else 1,
        span.start or 0,
        q.data_ptr(),
        heads,
        dim,
        how.words,
        how.pairs,
        how.prepare,
        head_weights.data_ptr(),
        keys.data_ptr(),
        scales.data_ptr() if how.scaled else 0,
        topk,
        stride,
        tile,
        scratch.address(tile * row_bytes, f"queries of {tile} rows") if how.prepare != _AS_IT_IS else 0,
        scratch.address(4 * BLOCK, "scores of one block"),
        scratch.address(4 * topk, "ids of one row"),
        logits.data_ptr(),
        out.data_ptr(),
    )
