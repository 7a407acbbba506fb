"""The topk best of a row of scores, by bisection of the threshold; nothing is sorted.

    ordered(x)  = x's bits, low 31 flipped when negative          int32, same order as the floats
    T           = the largest t with count(ordered >= t) >= topk  31 counting passes at most, 16 scores an instruction
    ids         = i with ordered[i] > T, and the first of those equal to T, ascending

A pass reads the row once; the search ends early when some t splits off exactly topk. Ties go to the lowest position.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types

from attention.kernels.vector import I1, I32, I64, LINE, VI, Code, W, block, get_i32, put_i32

KEYS = 64
LOWEST = -(1 << 31)

i64 = types.int64


@block(types.void, i64, i64)
def _order(code: Code, row: Any, blocks: Any) -> None:
    """Scores to ordered integers in place, or back, 64 at a time; -0 becomes 0 first."""

    def step(i: Any, _: list[Any]) -> list[Any]:
        for v in range(KEYS // W):
            at = code.at(code.at(row, code.b.mul(i, code.i64(4 * KEYS))), LINE * v)
            bits = code.load(at, VI)
            minus_zero = code.b.icmp_signed("==", bits, code.constant(VI, LOWEST))
            bits = code.b.select(minus_zero, code.constant(VI, 0), bits)
            flip = code.b.and_(code.b.ashr(bits, code.constant(VI, 31)), code.constant(VI, 0x7FFFFFFF))
            code.store(code.b.xor(bits, flip), at)
        return []

    code.loop(blocks, [], step)


@block(i64, i64, i64)
def _bounds(code: Code, row: Any, blocks: Any) -> Any:
    """Largest ordered value of the row."""

    def step(i: Any, best: list[Any]) -> list[Any]:
        line = code.at(row, code.b.mul(i, code.i64(4 * KEYS)))
        found = []
        for v in range(KEYS // W):
            value = code.load(code.at(line, LINE * v), VI)
            found.append(code.b.select(code.b.icmp_signed(">", value, best[v]), value, best[v]))
        return found

    best = code.loop(blocks, [code.constant(VI, LOWEST)] * (KEYS // W), step)
    while len(best) > 1:
        a, b = best.pop(), best.pop()
        best.append(code.b.select(code.b.icmp_signed(">", a, b), a, b))
    top = code.call("llvm.vector.reduce.smax.v16i32", I32, best)
    return code.b.sext(top, I64)


@block(i64, i64, i64, i64)
def _count(code: Code, row: Any, blocks: Any, threshold: Any) -> Any:
    """How many ordered values of the row are >= threshold."""
    bar = code.splat(code.b.trunc(threshold, I32))

    def step(i: Any, counts: list[Any]) -> list[Any]:
        line = code.at(row, code.b.mul(i, code.i64(4 * KEYS)))
        found = []
        for v in range(KEYS // W):
            hit = code.b.icmp_signed(">=", code.load(code.at(line, LINE * v), VI), bar)
            found.append(code.b.sub(counts[v], code.b.sext(hit, VI)))
        return found

    counts = code.loop(blocks, [code.constant(VI, 0)] * (KEYS // W), step)
    while len(counts) > 1:
        counts.append(code.b.add(counts.pop(), counts.pop()))
    return code.b.zext(code.call("llvm.vector.reduce.add.v16i32", I32, counts), I64)


@block(i64, i64, i64)
def _hits(code: Code, line: Any, threshold: Any) -> Any:
    """Bit i is set where ordered value i of 64 is >= threshold."""
    bar = code.splat(code.b.trunc(threshold, I32))
    mask = code.i64(0)
    for v in range(KEYS // W):
        hit = code.b.icmp_signed(">=", code.load(code.at(line, LINE * v), VI), bar)
        bits = code.b.zext(code.b.bitcast(hit, ir.IntType(W)), I64)
        mask = code.b.or_(mask, code.b.shl(bits, code.i64(W * v)))
    return mask


@block(i64, i64)
def _lowest_bit(code: Code, mask: Any) -> Any:
    """Position of the lowest set bit; mask is not 0."""
    return code.call("llvm.cttz.i64", I64, [mask, ir.Constant(I1, 1)])


@njit(nogil=True)
def order(row: int, blocks: int) -> None:
    """Turn 64 * ``blocks`` scores into ordered integers in place, or such integers back into scores."""
    _order(row, blocks)


@njit(nogil=True)
def threshold(row: int, count: int, topk: int) -> tuple[int, int]:
    """(T, how many equal to T are taken) for ``count`` > ``topk`` scores at ``row``.

    The row has room for a multiple of 64 and is left as ordered integers, padded with the lowest.
    """
    blocks = (count + 63) // 64
    _order(row, blocks)
    for i in range(count, 64 * blocks):
        put_i32(row + 4 * i, LOWEST)
    low = LOWEST
    high = _bounds(row, blocks)
    while low < high:
        middle = (low + high + 1) >> 1
        found = _count(row, blocks, middle)
        if found == topk:
            return middle, topk
        if found > topk:
            low = middle
        else:
            high = middle - 1
    above = 0 if low == (1 << 31) - 1 else _count(row, blocks, low + 1)
    return low, topk - above


@njit(nogil=True)
def collect(row: int, count: int, topk: int, out: int) -> None:
    """Write the ids of the ``topk`` best of ``count`` > ``topk`` scores, int32, to ``out``; spends the row."""
    bar, equal = threshold(row, count, topk)
    taken = 0
    for start in range(0, count, 64):
        mask = _hits(row + 4 * start, bar)
        while mask != 0:
            i = start + _lowest_bit(mask)
            mask &= mask - 1
            if get_i32(row + 4 * i) == bar:
                if equal == 0:
                    continue
                equal -= 1
            put_i32(out + 4 * taken, i)
            taken += 1
            if taken == topk:
                return
