"""Sparse MLA of one query row over 64 latent rows at a time, wherever they lie.

    products    s[h][j] = q[h] . row[j]           4 heads x 4 rows in registers, 16 lanes along 576 values, then folded
    softmax     m' = max(m, s);  p = exp(s - m');  l = l exp(m - m') + sum p        (running, one head at a time)
    values      o[h][:] = o[h][:] exp(m - m') + sum_j p[h][j] * row[j][:512]        4 heads x 64 values in registers

The latent row is read in place, by address: no gathered copy of plain rows is made. Tiles are counted along the row's
own list of ids, so the order of every sum belongs to the row alone.
"""

from __future__ import annotations

from typing import Any

from numba import njit
from numba.core import types

from attention.kernels.vector import (
    F32,
    I64,
    LINE,
    VF,
    VI,
    Code,
    W,
    ask,
    block,
    get_f32,
    get_i64,
    half_floats,
    put_f32,
    put_rounded,
    small_floats,
)
from attention.sizes import LATENT_DIM, NOPE_DIM, ROPE_AT, ROPE_DIM, SCALE_AT, TILE

KEYS = 64
HEADS = 4
QUAD = 4

i64 = types.int64
f32 = types.float32


def _products(pairs: bool) -> Any:
    """Emitter of ``products(q, q_step, addresses, out, out_step)``: 4 x 4 dot products over 576 values."""
    count = LATENT_DIM // (2 * W if pairs else W)
    kind = VI if pairs else VF

    def emit(code: Code, q: Any, q_step: Any, addresses: Any, out: Any, out_step: Any) -> None:
        heads = [code.at(q, code.b.mul(q_step, code.i64(h))) for h in range(HEADS)]
        rows = [code.load(code.at(addresses, 8 * j), I64, 8) for j in range(QUAD)]

        def step(i: Any, acc: list[Any]) -> list[Any]:
            offset = code.b.mul(i, code.i64(LINE))
            left = [code.load(code.at(head, offset), kind) for head in heads]
            right = [code.load(code.at(row, offset), kind) for row in rows]
            join = code.pair if pairs else code.fma
            return [join(left[h], right[j], acc[h * QUAD + j]) for h in range(HEADS) for j in range(QUAD)]

        sums = code.loop(code.i64(count), [code.constant(VF, 0.0)] * (HEADS * QUAD), step)
        folded = code.fold(sums)
        for h in range(HEADS):
            part = code.shuffle(folded, folded, [h * QUAD + j for j in range(QUAD)])
            code.store(part, code.at(out, code.b.mul(out_step, code.i64(h))))

    return emit


_products_float = block(types.void, i64, i64, i64, i64, i64)(_products(False))
_products_pairs = block(types.void, i64, i64, i64, i64, i64)(_products(True))


def _values(half: bool, heads: int, columns: int) -> Any:
    """Emitter of ``values(p, p_step, addresses, count, column, acc, acc_step, keep)`` for heads x columns values."""
    lanes = columns // W

    def emit(
        code: Code, p: Any, p_step: Any, addresses: Any, count: Any, column: Any, acc: Any, acc_step: Any, keep: Any
    ) -> None:
        places = [code.at(acc, code.b.mul(acc_step, code.i64(h))) for h in range(heads)]
        weights = [code.at(p, code.b.mul(p_step, code.i64(h))) for h in range(heads)]
        start = []
        for h in range(heads):
            factor = code.splat(code.load(code.at(keep, 4 * h), F32))
            start += [code.b.fmul(code.load(code.at(places[h], LINE * v), VF), factor) for v in range(lanes)]
        size = 2 if half else 4
        offset = code.b.mul(column, code.i64(size))

        def step(j: Any, sums: list[Any]) -> list[Any]:
            row = code.at(code.load(code.at(addresses, code.b.mul(j, code.i64(8))), I64, 8), offset)
            if half:
                latent = [half_floats(code, code.at(row, size * W * v)) for v in range(lanes)]
            else:
                latent = [code.load(code.at(row, size * W * v), VF) for v in range(lanes)]
            along = code.b.mul(j, code.i64(4))
            done = []
            for h in range(heads):
                weight = code.splat(code.load(code.at(weights[h], along), F32))
                done += [code.fma(weight, latent[v], sums[h * lanes + v]) for v in range(lanes)]
            return done

        sums = code.loop(count, start, step)
        for h in range(heads):
            for v in range(lanes):
                code.store(sums[h * lanes + v], code.at(places[h], LINE * v))

    return emit


_eight = (i64,) * 8
_values_float = block(types.void, *_eight)(_values(False, 4, 64))
_values_half = block(types.void, *_eight)(_values(True, 4, 64))
_values_half8 = block(types.void, *_eight)(_values(True, 8, 32))


@block(types.void, i64, i64, f32, i64, i64)
def _softmax(code: Code, logits: Any, count: Any, scale: Any, state: Any, keep: Any) -> None:
    """64 logits to weights in place; state is (m, l) of the head, keep its exp(m - m')."""
    ramp = VI(list(range(W)))
    limit = code.splat(code.b.trunc(count, ramp.type.element))
    factor = code.splat(scale)
    lowest = code.constant(VF, float("-inf"))
    tiles = []
    for v in range(KEYS // W):
        x = code.b.fmul(code.load(code.at(logits, LINE * v), VF), factor)
        lane = code.b.add(ramp, code.constant(VI, W * v))
        tiles.append(code.b.select(code.b.icmp_signed("<", lane, limit), x, lowest))
    best = tiles[0]
    for tile in tiles[1:]:
        best = code.greater(best, tile)
    before = code.load(state, F32)
    peak = code.max(best)
    peak = code.b.select(code.b.fcmp_ordered(">", before, peak), before, peak)
    top = code.splat(peak)
    total = code.constant(VF, 0.0)
    for v, tile in enumerate(tiles):
        weight = code.exp(code.b.fsub(tile, top))
        code.store(weight, code.at(logits, LINE * v))
        total = code.b.fadd(total, weight)
    kept = code.exp(code.splat(code.b.fsub(before, peak)))
    kept = code.b.extract_element(kept, I64(0))
    mass = code.b.fadd(code.b.fmul(code.load(code.at(state, 4), F32), kept), code.sum(total))
    code.store(peak, state)
    code.store(mass, code.at(state, 4))
    code.store(kept, keep)


@block(types.void, i64, i64, f32)
def _put_float(code: Code, source: Any, target: Any, factor: Any) -> None:
    """16 float32 times a factor."""
    code.store(code.b.fmul(code.load(source, VF), code.splat(factor)), target)


@block(types.void, i64, i64, f32)
def _put_half(code: Code, source: Any, target: Any, factor: Any) -> None:
    """16 float32 times a factor, rounded to bfloat16."""
    put_rounded(code, code.b.fmul(code.load(source, VF), code.splat(factor)), target)


@block(types.void, i64, i64, f32)
def _small_to_float(code: Code, source: Any, target: Any, scale: Any) -> None:
    """16 e4m3 times a scale, to float32."""
    code.store(small_floats(code, source, code.splat(scale)), target)


@block(types.void, i64, i64, f32)
def _small_to_half(code: Code, source: Any, target: Any, scale: Any) -> None:
    """16 e4m3 times a scale in float32, rounded to bfloat16."""
    put_rounded(code, small_floats(code, source, code.splat(scale)), target)


@block(types.void, i64, i64)
def _half_to_float(code: Code, source: Any, target: Any) -> None:
    """16 bfloat16 to float32."""
    code.store(half_floats(code, source), target)


@block(types.void, i64, i64)
def _copy_line(code: Code, source: Any, target: Any) -> None:
    """64 bytes."""
    code.store(code.load(source, VI), target)


@njit(nogil=True)
def ask_rows(addresses: int, first: int, stop: int, row_bytes: int) -> None:
    """Prefetch the rows number ``first`` to ``stop`` of an address list."""
    for j in range(first, stop):
        ask(get_i64(addresses + 8 * j), row_bytes)


@njit(nogil=True)
def copy(source: int, target: int, nbytes: int) -> None:
    """Copy a multiple of 64 bytes."""
    for i in range(0, nbytes, 64):
        _copy_line(source + i, target + i)


@njit(nogil=True)
def widen(source: int, target: int, count: int) -> None:
    """``count`` (a multiple of 16) bfloat16 to float32."""
    for i in range(0, count, 16):
        _half_to_float(source + 2 * i, target + 4 * i)


@njit(nogil=True)
def narrow(source: int, target: int, count: int) -> None:
    """``count`` (a multiple of 16) float32 to bfloat16, rounded to nearest even."""
    for i in range(0, count, 16):
        _put_half(source + 4 * i, target + 2 * i, 1.0)


@njit(nogil=True)
def widen_row(source: int, target: int, packed: bool, half: bool) -> None:
    """One cache row to 576 float32, or to 576 bfloat16 when ``half``; ``packed`` names the 656-byte layout."""
    if not packed:
        widen(source, target, LATENT_DIM)
        return
    for i in range(0, NOPE_DIM, 16):
        scale = get_f32(source + SCALE_AT + 4 * (i // TILE))
        if half:
            _small_to_half(source + i, target + 2 * i, scale)
        else:
            _small_to_float(source + i, target + 4 * i, scale)
    if half:
        copy(source + ROPE_AT, target + 2 * NOPE_DIM, 2 * ROPE_DIM)
    else:
        widen(source + ROPE_AT, target + 4 * NOPE_DIM, ROPE_DIM)


@njit(nogil=True)
def tile(
    q: int,
    heads: int,
    half: bool,
    addresses: int,
    count: int,
    scale: float,
    logits: int,
    state: int,
    keep: int,
    acc: int,
    coming: int,
    expected: int,
    row_bytes: int,
) -> None:
    """Fold ``count`` (1 to 64) latent rows into a query row's running softmax.

    q [heads, 576] float32 or bfloat16, heads a multiple of 4; addresses int64, repeated up to a multiple of 4;
    logits float32 [heads, 64]; state float32 [heads, 2]; keep float32 [heads]; acc float32 [heads, 512].
    Meanwhile the ``expected`` cache rows of the next tile, listed at ``coming``, are prefetched: two for each four
    rows of the products, four for each eighth of the values.
    """
    q_step = (2 if half else 4) * LATENT_DIM
    for j in range(0, count, 4):
        ask_rows(coming, min(j // 2, expected), min(j // 2 + 2, expected), row_bytes)
        for h in range(0, heads, 4):
            if half:
                _products_pairs(q + h * q_step, q_step, addresses + 8 * j, logits + 4 * (64 * h + j), 256)
            else:
                _products_float(q + h * q_step, q_step, addresses + 8 * j, logits + 4 * (64 * h + j), 256)
    for h in range(heads):
        _softmax(logits + 256 * h, count, scale, state + 8 * h, keep + 4 * h)
    asked = (count + 3) // 4 * 2
    rest = (max(expected - asked, 0) + 7) // 8
    step = 4 * NOPE_DIM
    for column in range(0, NOPE_DIM, 64):
        ask_rows(coming, min(asked, expected), min(asked + rest, expected), row_bytes)
        asked += rest
        h = 0
        while h < heads:
            p = logits + 256 * h
            place = acc + h * step + 4 * column
            if half and h + 8 <= heads:
                _values_half8(p, 256, addresses, count, column, place, step, keep + 4 * h)
                _values_half8(p, 256, addresses, count, column + 32, place + 128, step, keep + 4 * h)
                h += 8
                continue
            if half:
                _values_half(p, 256, addresses, count, column, place, step, keep + 4 * h)
            else:
                _values_float(p, 256, addresses, count, column, place, step, keep + 4 * h)
            h += 4


@njit(nogil=True)
def put_row(source: int, target: int, factor: float, half: bool) -> None:
    """512 float32 times ``factor``, stored as float32 or bfloat16."""
    for i in range(0, NOPE_DIM, 16):
        if half:
            _put_half(source + 4 * i, target + 2 * i, factor)
        else:
            _put_float(source + 4 * i, target + 4 * i, factor)


@njit(nogil=True)
def fill(address: int, count: int, value: float) -> None:
    """``count`` float32 of one value."""
    for i in range(count):
        put_f32(address + 4 * i, value)
