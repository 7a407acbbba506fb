"""Products of a few or many rows with a resident weight, every output summed in one order whatever the batch.

    weight [outer, inner]  ->  blocks of 64 outputs, word-major            registers, 6 rows x 64 outputs

        | w0 of outputs 0..63 | w1 of outputs 0..63 | ...                  acc[r][n] = sum_w x[r][w] * block[w][n]

    a word is one float32, or two bfloat16 (summed in float32, rounded once at the end)

The sum runs over the words from the first to the last, so a row has equal bits alone, among others and in a chunk: no
padding of rows. At few rows this is some 2.5 times as fast as oneDNN's packed linear, whose calls cost more than the
product; at many rows the two are about even. Outputs are padded with zeros to a multiple of 64.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from numba import njit
from numba.core import types

from attention.kernels.vector import F32, I32, LINE, VF, VI, Code, W, block, compiled, put_rounded, stamp

BLOCK = 64
LANES = BLOCK // W
TILE = 6  # rows in registers: 24 sums, 4 weights, 1 input of 32

i64 = types.int64


def _tile(rows: int, pairs: bool) -> Any:
    """Emitter of ``tile(x, x_step, words, weight, out, out_step)``: ``rows`` rows times one block."""

    def emit(code: Code, x: Any, x_step: Any, words: Any, weight: Any, out: Any, out_step: Any) -> None:
        places = [code.at(x, code.b.mul(x_step, code.i64(r))) for r in range(rows)]

        def step(i: Any, acc: list[Any]) -> list[Any]:
            line = code.at(weight, code.b.mul(i, code.i64(4 * BLOCK)))
            right = [code.load(code.at(line, LINE * v), VI if pairs else VF) for v in range(LANES)]
            offset = code.b.mul(i, code.i64(4))
            done = []
            for r in range(rows):
                word = code.splat(code.load(code.at(places[r], offset), I32 if pairs else F32))
                for v in range(LANES):
                    old = acc[r * LANES + v]
                    done.append(code.pair(word, right[v], old) if pairs else code.fma(word, right[v], old))
            return done

        acc = code.loop(words, [code.constant(VF, 0.0)] * (rows * LANES), step)
        for r in range(rows):
            target = code.at(out, code.b.mul(out_step, code.i64(r)))
            for v in range(LANES):
                if pairs:
                    put_rounded(code, acc[r * LANES + v], code.at(target, 2 * W * v))
                else:
                    code.store(acc[r * LANES + v], code.at(target, LINE * v))

    return emit


_six = (i64,) * 6
_tile6, _tile2, _tile1 = (block(types.void, *_six)(_tile(rows, False)) for rows in (TILE, 2, 1))
_tile6_pairs, _tile2_pairs, _tile1_pairs = (block(types.void, *_six)(_tile(rows, True)) for rows in (TILE, 2, 1))


@njit(nogil=True)
def multiply(
    x: int, x_step: int, rows: int, inner: int, weight: int, outer: int, out: int, out_step: int, half: bool
) -> None:
    """out[r] = weight x[r] for packed ``weight``; steps in bytes, ``outer`` a multiple of 64."""
    words = inner // 2 if half else inner
    size = 2 if half else 4
    for b in range(0, outer, BLOCK):
        piece = weight + 4 * words * b
        r = 0
        if half:
            while r + TILE <= rows:
                _tile6_pairs(x + r * x_step, x_step, words, piece, out + r * out_step + size * b, out_step)
                r += TILE
            while r + 2 <= rows:
                _tile2_pairs(x + r * x_step, x_step, words, piece, out + r * out_step + size * b, out_step)
                r += 2
            if r < rows:
                _tile1_pairs(x + r * x_step, x_step, words, piece, out + r * out_step + size * b, out_step)
        else:
            while r + TILE <= rows:
                _tile6(x + r * x_step, x_step, words, piece, out + r * out_step + size * b, out_step)
                r += TILE
            while r + 2 <= rows:
                _tile2(x + r * x_step, x_step, words, piece, out + r * out_step + size * b, out_step)
                r += 2
            if r < rows:
                _tile1(x + r * x_step, x_step, words, piece, out + r * out_step + size * b, out_step)


@njit(nogil=True)
def multiply_heads(
    x: int,
    x_step: int,
    x_head: int,
    rows: int,
    inner: int,
    weight: int,
    outer: int,
    out: int,
    out_step: int,
    out_head: int,
    heads: int,
    half: bool,
) -> None:
    """``multiply`` of every head with its own weight, heads ``x_head`` and ``out_head`` bytes apart."""
    for h in range(heads):
        piece = weight + h * inner * outer * (2 if half else 4)
        multiply(x + h * x_head, x_step, rows, inner, piece, outer, out + h * out_head, out_step, half)


def version() -> str:
    """What compiled code of this folder is cached under: a digest of its compiled sources and of the vector blocks."""
    digest = hashlib.sha256(stamp().encode())
    for path in sorted(Path(__file__).parent.glob("cpu_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _build(version: str) -> Any:
    @compiled
    def product(
        x: int, x_step: int, rows: int, inner: int, weight: int, outer: int, out: int, out_step: int, half: int
    ) -> int:
        multiply(x, x_step, rows, inner, weight, outer, out, out_step, half != 0)
        return len(version)

    return product


product = _build(version())


class Weight:
    """A packed weight [..., outer, inner], float32 or bfloat16; inner even. Leading dimensions are kept."""

    def __init__(self, weight: torch.Tensor) -> None:
        outer, inner = weight.shape[-2:]
        self.outer, self.inner = outer, inner
        self.padded = (outer + BLOCK - 1) // BLOCK * BLOCK
        self.half = int(weight.dtype == torch.bfloat16)
        per = 2 if self.half else 1
        whole = weight.detach().new_zeros(*weight.shape[:-2], self.padded, inner)
        whole[..., :outer, :] = weight.detach()
        split = whole.view(-1, self.padded // BLOCK, BLOCK, inner // per, per)
        self.data = split.transpose(2, 3).contiguous()
        self.start = self.data.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inner] contiguous rows -> [rows, outer], a view where outer is no multiple of 64."""
        rows = x.shape[0]
        out = x.new_empty(rows, self.padded)
        size = x.element_size()
        product(
            x.data_ptr(),
            x.stride(0) * size,
            rows,
            self.inner,
            self.start,
            self.padded,
            out.data_ptr(),
            self.padded * size,
            self.half,
        )
        return out if self.padded == self.outer else out[:, : self.outer]
