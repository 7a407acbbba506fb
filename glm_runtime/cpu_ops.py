"""Row operators between the decoder's matrix products on a CPU, compiled; one call serves all rows of a step.

    add_norm     r += x;  y = w * r / sqrt(mean(r^2) + eps)                       RMSNorm after the residual sum
    latent       q = norm(q),  row = [norm(kv) | rope(k)]                         from the fused q / kv down projection
    turn         v[2i], v[2i+1] <- v[2i] cos - v[2i+1] sin, v[2i+1] cos + v[2i] sin    RoPE, interleaved, in place
    index_key    k = rope(LayerNorm(k))
    gate         y = silu(g) * u                                                  from [g | u]
    route        s = sigmoid(z);  ids = k largest of s + bias;  w = s / sum s     one expert group
    combine      y = scale * sum_j w_j e_j + shared

A row is computed alone and in one order, so its bits do not depend on the batch. Arithmetic is float32; bfloat16 is
rounded where it is stored. Arguments are addresses (int64); sizes are in values, steps in bytes, and rows without a
step are contiguous. Widths are multiples of 16.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types

from attention.kernels.sparse import copy
from attention.kernels.vector import (
    F32,
    LINE,
    VF,
    Code,
    W,
    block,
    get_f32,
    get_i32,
    get_i64,
    half_floats,
    put_f32,
    put_i32,
    put_rounded,
)

i64 = types.int64
f32 = types.float32
_V8 = ir.VectorType(F32, 8)
_TWICE = [n // 2 for n in range(W)]
_SWAP = [n ^ 1 for n in range(W)]


def _get(code: Code, address: Any, half: bool) -> Any:
    return half_floats(code, address) if half else code.load(address, VF)


def _put(code: Code, value: Any, address: Any, half: bool) -> None:
    if half:
        put_rounded(code, value, address)
    else:
        code.store(value, address)


def _place(code: Code, base: Any, i: Any, half: bool) -> Any:
    return code.at(base, code.b.mul(i, code.i64(2 * W if half else LINE)))


def _lines(code: Code, width: Any) -> Any:
    return code.b.sdiv(width, code.i64(W))


def _mean(code: Code, total: Any, width: Any) -> Any:
    return code.b.fdiv(code.sum(total), code.b.sitofp(width, F32))


def _inverse_root(code: Code, value: Any) -> Any:
    return code.b.fdiv(F32(1.0), code.call("llvm.sqrt.f32", F32, [value]))


def _norm(half: bool) -> Any:
    """Emitter of ``norm(x, weight, eps, out, width)``."""

    def emit(code: Code, x: Any, weight: Any, eps: Any, out: Any, width: Any) -> None:
        def square(i: Any, carried: list[Any]) -> list[Any]:
            value = _get(code, _place(code, x, i, half), half)
            return [code.fma(value, value, carried[0])]

        count = _lines(code, width)
        total = code.loop(count, [code.constant(VF, 0.0)], square)[0]
        factor = code.splat(_inverse_root(code, code.b.fadd(_mean(code, total, width), eps)))

        def scale(i: Any, _: list[Any]) -> list[Any]:
            value = code.b.fmul(_get(code, _place(code, x, i, half), half), factor)
            _put(
                code,
                code.b.fmul(value, _get(code, _place(code, weight, i, half), half)),
                _place(code, out, i, half),
                half,
            )
            return []

        code.loop(count, [], scale)

    return emit


def _add(half: bool) -> Any:
    """Emitter of ``add(x, into, width)``."""

    def emit(code: Code, x: Any, into: Any, width: Any) -> None:
        def step(i: Any, _: list[Any]) -> list[Any]:
            place = _place(code, into, i, half)
            _put(code, code.b.fadd(_get(code, _place(code, x, i, half), half), _get(code, place, half)), place, half)
            return []

        code.loop(_lines(code, width), [], step)

    return emit


def _layer_norm(half: bool) -> Any:
    """Emitter of ``layer_norm(x, weight, bias, eps, width)``, in place; weight and bias float32."""

    def emit(code: Code, x: Any, weight: Any, bias: Any, eps: Any, width: Any) -> None:
        count = _lines(code, width)
        zero = code.constant(VF, 0.0)

        def value(i: Any) -> Any:
            return _get(code, _place(code, x, i, half), half)

        total = code.loop(count, [zero], lambda i, c: [code.b.fadd(value(i), c[0])])[0]
        mean = code.splat(_mean(code, total, width))

        def square(i: Any, carried: list[Any]) -> list[Any]:
            away = code.b.fsub(value(i), mean)
            return [code.fma(away, away, carried[0])]

        spread = code.loop(count, [zero], square)[0]
        factor = code.splat(_inverse_root(code, code.b.fadd(_mean(code, spread, width), eps)))

        def scale(i: Any, _: list[Any]) -> list[Any]:
            away = code.b.fmul(code.b.fsub(value(i), mean), factor)
            w, b = (code.load(_place(code, at, i, False), VF) for at in (weight, bias))
            _put(code, code.fma(away, w, b), _place(code, x, i, half), half)
            return []

        code.loop(count, [], scale)

    return emit


def _turn(half: bool) -> Any:
    """Emitter of ``turn(x, table, width)``, in place; table float32 [cos | sin], width / 2 values each."""

    def emit(code: Code, x: Any, table: Any, width: Any) -> None:
        sign = ir.Constant(VF, [F32(-1.0 if n % 2 == 0 else 1.0) for n in range(W)])
        sines = code.at(table, code.b.mul(width, code.i64(2)))

        def step(i: Any, _: list[Any]) -> list[Any]:
            offset = code.b.mul(i, code.i64(LINE // 2))
            cos, sin = (code.load(code.at(base, offset), _V8) for base in (table, sines))
            cos, sin = (code.shuffle(part, part, _TWICE) for part in (cos, sin))
            place = _place(code, x, i, half)
            value = _get(code, place, half)
            swapped = code.b.fmul(code.shuffle(value, value, _SWAP), code.b.fmul(sin, sign))
            _put(code, code.fma(value, cos, swapped), place, half)
            return []

        code.loop(_lines(code, width), [], step)

    return emit


def _gate(half: bool) -> Any:
    """Emitter of ``gate(x, out, width)``: x [g | u], width values each."""

    def emit(code: Code, x: Any, out: Any, width: Any) -> None:
        up = code.at(x, code.b.mul(width, code.i64(2 if half else 4)))
        one, zero = code.constant(VF, 1.0), code.constant(VF, 0.0)

        def step(i: Any, _: list[Any]) -> list[Any]:
            g = _get(code, _place(code, x, i, half), half)
            power = code.exp(code.b.fneg(code.call("llvm.fabs.v16f32", VF, [g])))
            top = code.b.select(code.b.fcmp_ordered(">", g, zero), one, power)
            silu = code.b.fdiv(code.b.fmul(g, top), code.b.fadd(one, power))
            _put(code, code.b.fmul(silu, _get(code, _place(code, up, i, half), half)), _place(code, out, i, half), half)
            return []

        code.loop(_lines(code, width), [], step)

    return emit


def _combine(half: bool) -> Any:
    """Emitter of ``combine(parts, weights, count, scale, shared, out, width)``."""

    def emit(code: Code, parts: Any, weights: Any, count: Any, scale: Any, shared: Any, out: Any, width: Any) -> None:
        step_bytes = code.b.mul(width, code.i64(2 if half else 4))
        factor = code.splat(scale)

        def line(i: Any, _: list[Any]) -> list[Any]:
            def part(j: Any, carried: list[Any]) -> list[Any]:
                weight = code.splat(code.load(code.at(weights, code.b.mul(j, code.i64(4))), F32))
                place = _place(code, code.at(parts, code.b.mul(j, step_bytes)), i, half)
                return [code.fma(weight, _get(code, place, half), carried[0])]

            total = code.loop(count, [code.constant(VF, 0.0)], part)[0]
            _put(
                code,
                code.fma(total, factor, _get(code, _place(code, shared, i, half), half)),
                _place(code, out, i, half),
                half,
            )
            return []

        code.loop(_lines(code, width), [], line)

    return emit


_norm_f, _norm_h = (block(types.void, i64, i64, f32, i64, i64)(_norm(half)) for half in (False, True))
_add_f, _add_h = (block(types.void, i64, i64, i64)(_add(half)) for half in (False, True))
_ln_f, _ln_h = (block(types.void, i64, i64, i64, f32, i64)(_layer_norm(half)) for half in (False, True))
_turn_f, _turn_h = (block(types.void, i64, i64, i64)(_turn(half)) for half in (False, True))
_gate_f, _gate_h = (block(types.void, i64, i64, i64)(_gate(half)) for half in (False, True))
_combine_f, _combine_h = (
    block(types.void, i64, i64, i64, f32, i64, i64, i64)(_combine(half)) for half in (False, True)
)


@njit(nogil=True)
def _norm_row(x: int, weight: int, eps: float, out: int, width: int, half: bool) -> None:
    if half:
        _norm_h(x, weight, eps, out, width)
    else:
        _norm_f(x, weight, eps, out, width)


@njit(nogil=True)
def _turn_row(x: int, table: int, width: int, half: bool) -> None:
    if half:
        _turn_h(x, table, width)
    else:
        _turn_f(x, table, width)


@njit(nogil=True)
def norm(x: int, weight: int, eps: float, out: int, width: int, half: bool) -> None:
    """RMSNorm of one row."""
    if half:
        _norm_h(x, weight, eps, out, width)
    else:
        _norm_f(x, weight, eps, out, width)


@njit(nogil=True)
def turn_row(x: int, table: int, width: int, half: bool) -> None:
    """RoPE of one row; table: its [cos | sin]."""
    if half:
        _turn_h(x, table, width)
    else:
        _turn_f(x, table, width)


@njit(nogil=True)
def add_norm(x: int, residual: int, weight: int, eps: float, out: int, rows: int, width: int, half: bool) -> None:
    """x 0: nothing is added."""
    size = 2 if half else 4
    for i in range(rows):
        r = residual + i * width * size
        if x != 0:
            if half:
                _add_h(x + i * width * size, r, width)
            else:
                _add_f(x + i * width * size, r, width)
        norm(r, weight, eps, out + i * width * size, width, half)


@njit(nogil=True)
def latent(
    x: int,
    step: int,
    q_weight: int,
    q_eps: float,
    q: int,
    q_width: int,
    kv_weight: int,
    kv_eps: float,
    row: int,
    kv_width: int,
    rope: int,
    positions: int,
    table: int,
    rows: int,
    half: bool,
) -> None:
    """x: [q_width | kv_width | rope] a row; q [rows, q_width] and row [rows, kv_width + rope] are written."""
    size = 2 if half else 4
    for i in range(rows):
        source = x + i * step
        target = row + i * (kv_width + rope) * size
        norm(source, q_weight, q_eps, q + i * q_width * size, q_width, half)
        norm(source + q_width * size, kv_weight, kv_eps, target, kv_width, half)
        copy(source + (q_width + kv_width) * size, target + kv_width * size, rope * size)
        turn_row(target + kv_width * size, table + 4 * rope * get_i64(positions + 8 * i), rope, half)


@njit(nogil=True)
def turn(
    x: int, step: int, heads: int, head_step: int, rope: int, positions: int, table: int, rows: int, half: bool
) -> None:
    """The first ``rope`` values of every head."""
    for i in range(rows):
        angles = table + 4 * rope * get_i64(positions + 8 * i)
        for h in range(heads):
            turn_row(x + i * step + h * head_step, angles, rope, half)


@njit(nogil=True)
def index_key(
    x: int,
    step: int,
    weight: int,
    bias: int,
    eps: float,
    width: int,
    rope: int,
    positions: int,
    table: int,
    out: int,
    rows: int,
    half: bool,
) -> None:
    """weight and bias are float32."""
    size = 2 if half else 4
    for i in range(rows):
        row = out + i * width * size
        copy(x + i * step, row, width * size)
        if half:
            _ln_h(row, weight, bias, eps, width)
        else:
            _ln_f(row, weight, bias, eps, width)
        turn_row(row, table + 4 * rope * get_i64(positions + 8 * i), rope, half)


@njit(nogil=True)
def gate(x: int, out: int, rows: int, width: int, half: bool) -> None:
    """x [rows, 2 * width] -> out [rows, width]."""
    size = 2 if half else 4
    for i in range(rows):
        if half:
            _gate_h(x + 2 * i * width * size, out + i * width * size, width)
        else:
            _gate_f(x + 2 * i * width * size, out + i * width * size, width)


@njit(nogil=True)
def route(
    logits: int, step: int, bias: int, rows: int, experts: int, k: int, renormalise: bool, ids: int, weights: int
) -> None:
    """float32 logits become scores in place; ids int32 and weights float32 [rows, k]. Ties go to the lowest expert."""
    for i in range(rows):
        row = logits + i * step
        for e in range(experts):
            put_f32(row + 4 * e, 1.0 / (1.0 + math.exp(-get_f32(row + 4 * e))))
        total = 0.0
        for j in range(k):
            best = -1
            most = -math.inf
            for e in range(experts):
                score = get_f32(row + 4 * e) + get_f32(bias + 4 * e)
                taken = False
                for seen in range(j):
                    taken = taken or get_i32(ids + 4 * (i * k + seen)) == e
                if not taken and (best < 0 or score > most):
                    best = e
                    most = score
            weight = get_f32(row + 4 * best)
            put_i32(ids + 4 * (i * k + j), best)
            put_f32(weights + 4 * (i * k + j), weight)
            total += weight
        if renormalise:
            for j in range(k):
                put_f32(weights + 4 * (i * k + j), get_f32(weights + 4 * (i * k + j)) / (total + 1e-20))


@njit(nogil=True)
def combine(
    parts: int, weights: int, k: int, scale: float, shared: int, out: int, rows: int, width: int, half: bool
) -> None:
    """parts [rows, k, width], weights float32 [rows, k], shared and out [rows, width]."""
    size = 2 if half else 4
    for i in range(rows):
        at = i * width * size
        if half:
            _combine_h(parts + k * at, weights + 4 * i * k, k, scale, shared + at, out + at, width)
        else:
            _combine_f(parts + k * at, weights + 4 * i * k, k, scale, shared + at, out + at, width)
