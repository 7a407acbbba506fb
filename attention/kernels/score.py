"""Index scores of one key page for a block of query rows, product and head sum in one pass.

    page (64 keys)            packed, word-major                       registers, 4 heads x 64 keys
    key 0  | w0 w1 ... |      w0 of key 0..63                          acc[h][key] = sum_w q[h][w] * packed[w][key]
    key 1  | w0 w1 ... |  ->  w1 of key 0..63                     ->   score[key] += weight[h] * max(acc[h][key], 0)
    ...                       ...

heads x queries x keys is never stored: four heads live in registers at a time. Each score is summed over words and over
heads in one order, whatever else is in the batch, so its bits do not depend on it.
"""

from __future__ import annotations

from typing import Any

from numba import njit
from numba.core import types

from attention.kernels.vector import (
    F32,
    I32,
    LINE,
    VF,
    VI,
    Code,
    W,
    ask,
    block,
    get_i32,
    half_floats,
    put_exact,
    put_i32,
    small_floats,
)
from attention.layouts import E4M3_MAX, INDEX_AMAX_FLOOR
from attention.sizes import INDEX_DIM

KEYS = 64
HEADS = 4

# How the keys of a page are stored: as the words that are multiplied, as bfloat16 to be widened, or as scaled e4m3.
DIRECT, HALF, SMALL = 0, 1, 2

i64 = types.int64


@block(types.void, i64, i64, i64, i64)
def _transpose(code: Code, source: Any, source_step: Any, target: Any, target_step: Any) -> None:
    """16 x 16 words from rows at ``source`` to columns at ``target``; steps in bytes."""
    rows = [code.load(code.at(source, code.b.mul(source_step, code.i64(i))), VI) for i in range(W)]
    for i, column in enumerate(code.transposed(rows)):
        code.store(column, code.at(target, code.b.mul(target_step, code.i64(i))))


def _tile(heads: int, pairs: bool) -> Any:
    """Emitter of ``score(q, q_step, words, packed, weights, out)`` for ``heads`` heads and 64 keys."""
    lanes = KEYS // W

    def emit(code: Code, q: Any, q_step: Any, words: Any, packed: Any, weights: Any, out: Any) -> None:
        rows = [code.at(q, code.b.mul(q_step, code.i64(h))) for h in range(heads)]

        def step(i: Any, acc: list[Any]) -> list[Any]:
            line = code.at(packed, code.b.mul(i, code.i64(4 * KEYS)))
            keys = [code.load(code.at(line, LINE * v), VI if pairs else VF) for v in range(lanes)]
            offset = code.b.mul(i, code.i64(4))
            done = []
            for h in range(heads):
                word = code.splat(code.load(code.at(rows[h], offset), I32 if pairs else F32))
                for v in range(lanes):
                    old = acc[h * lanes + v]
                    done.append(code.pair(word, keys[v], old) if pairs else code.fma(word, keys[v], old))
            return done

        zero = code.constant(VF, 0.0)
        acc = code.loop(words, [zero] * (heads * lanes), step)
        for v in range(lanes):
            total = code.load(code.at(out, LINE * v), VF)
            for h in range(heads):
                weight = code.splat(code.load(code.at(weights, 4 * h), F32))
                total = code.fma(weight, code.greater(acc[h * lanes + v], zero), total)
            code.store(total, code.at(out, LINE * v))

    return emit


_six = (i64, i64, i64, i64, i64, i64)
_score4 = block(types.void, *_six)(_tile(HEADS, False))
_score1 = block(types.void, *_six)(_tile(1, False))
_score4_pairs = block(types.void, *_six)(_tile(HEADS, True))
_score1_pairs = block(types.void, *_six)(_tile(1, True))


@block(types.void, i64)
def _clear(code: Code, out: Any) -> None:
    """64 scores to 0."""
    for v in range(KEYS // W):
        code.store(code.constant(VF, 0.0), code.at(out, LINE * v))


@block(types.void, i64, i64)
def _times(code: Code, out: Any, scale: Any) -> None:
    """64 scores times 64 key scales."""
    for v in range(KEYS // W):
        at = code.at(out, LINE * v)
        code.store(code.b.fmul(code.load(at, VF), code.load(code.at(scale, LINE * v), VF)), at)


@block(types.void, i64, i64)
def _widen_half(code: Code, source: Any, target: Any) -> None:
    """16 bfloat16 to 16 float32."""
    code.store(half_floats(code, source), target)


@block(types.void, i64, i64)
def _widen_small(code: Code, source: Any, target: Any) -> None:
    """16 e4m3 to 16 bfloat16, exact."""
    put_exact(code, small_floats(code, source), target)


def _quantise(half: bool) -> Any:
    """Emitter of ``quantise(source, target, weight, folded)``: 128 values of one head."""
    parts = INDEX_DIM // W

    def emit(code: Code, source: Any, target: Any, weight: Any, folded: Any) -> None:
        if half:
            values = [half_floats(code, code.at(source, 2 * W * v)) for v in range(parts)]
        else:
            values = [code.load(code.at(source, LINE * v), VF) for v in range(parts)]
        largest = code.constant(VF, INDEX_AMAX_FLOOR)
        for value in values:
            largest = code.greater(code.call("llvm.fabs.v16f32", VF, [value]), largest)
        scale = code.b.fdiv(code.max(largest), F32(E4M3_MAX))
        divisor = code.splat(scale)
        for v, value in enumerate(values):
            put_exact(code, code.rounded_e4m3(code.b.fdiv(value, divisor)), code.at(target, 2 * W * v))
        code.store(code.b.fmul(code.load(weight, F32), scale), folded)

    return emit


_quantise_float = block(types.void, i64, i64, i64, i64)(_quantise(False))
_quantise_half = block(types.void, i64, i64, i64, i64)(_quantise(True))


@njit(nogil=True)
def quantise(q: int, heads: int, half: bool, target: int, weights: int, folded: int) -> None:
    """A query row [heads, 128] to e4m3 values held as bfloat16, its scales folded into the head weights.

    scale = max(amax, 1e-4) / 448 of each head; folded = weight * scale.
    """
    for h in range(heads):
        if half:
            _quantise_half(q + 256 * h, target + 256 * h, weights + 4 * h, folded + 4 * h)
        else:
            _quantise_float(q + 512 * h, target + 256 * h, weights + 4 * h, folded + 4 * h)


@njit(nogil=True)
def pack(page: int, step: int, words: int, packed: int) -> None:
    """64 rows of ``words`` words, ``step`` bytes apart, to word-major order."""
    whole = words // 16 * 16
    for k in range(0, 64, 16):
        for w in range(0, whole, 16):
            _transpose(page + k * step + 4 * w, step, packed + 256 * w + 4 * k, 256)
    for w in range(whole, words):
        for k in range(64):
            put_i32(packed + 256 * w + 4 * k, get_i32(page + k * step + 4 * w))


@njit(nogil=True)
def widen(page: int, count: int, small: bool, target: int) -> None:
    """``count`` (a multiple of 16) bfloat16 to float32, or e4m3 to bfloat16."""
    for i in range(0, count, 16):
        if small:
            _widen_small(page + i, target + 2 * i)
        else:
            _widen_half(page + 2 * i, target + 4 * i)


@njit(nogil=True)
def load_page(source: int, page_bytes: int, mode: int, dim: int, words: int, widened: int, packed: int) -> None:
    """Bring the 64 keys of a page into packed order; ``mode`` is DIRECT, HALF or SMALL."""
    if mode == DIRECT:
        pack(source, page_bytes // KEYS, words, packed)
    else:
        widen(source, KEYS * dim, mode == SMALL, widened)
        pack(widened, 4 * words, words, packed)


@njit(nogil=True)
def score(
    q: int, heads: int, words: int, pairs: bool, packed: int, weights: int, out: int, coming: int, coming_bytes: int
) -> None:
    """64 scores of one query row: q [heads, words] words, weights float32 [heads].

    Meanwhile ``coming_bytes`` at ``coming``, the next page, are prefetched, a share with each four heads.
    """
    step = 4 * words
    whole = heads // 4 * 4
    share = (coming_bytes // max(heads // 4, 1) + 63) // 64 * 64
    _clear(out)
    for h in range(0, whole, 4):
        ask(coming + h // 4 * share, min(share, coming_bytes - h // 4 * share))
        if pairs:
            _score4_pairs(q + h * step, step, words, packed, weights + 4 * h, out)
        else:
            _score4(q + h * step, step, words, packed, weights + 4 * h, out)
    for h in range(whole, heads):
        if pairs:
            _score1_pairs(q + h * step, step, words, packed, weights + 4 * h, out)
        else:
            _score1(q + h * step, step, words, packed, weights + 4 * h, out)


@njit(nogil=True)
def scale_keys(out: int, scale: int) -> None:
    """Multiply 64 scores by the scales of their keys."""
    _times(out, scale)
