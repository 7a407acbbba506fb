"""Top-k of each row on a GPU, ids ascending, ties to the lowest position, without a sort.

    row      | segment 0 | segment 1 | segment 2 |        one program a segment, held in registers
               \\ best k    \\ best k    \\ best k
    level 1  |  k        |  k        |  k  |              candidates stay in the order of their positions
               \\ ... until one segment is left -> ids [row, k], then -1

    in a segment   key = bits of the score in an order that compares as integers, -0 as +0
                   T   = largest value with at least k keys >= T: found bit by bit, 32 counts
                   take all above T, and of those equal to T the first ones

Each level reads its scores once and shrinks them to k of 8,192. The order kept between levels is what makes the tie
rule hold over segments. Compiled and interpreted in tests; not yet run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SEGMENT = 8192
WARPS = 8
SCORED_WARPS = 16
"""A level that also writes scores needs over 200 registers with 8 warps: one program a multiprocessor either way."""


@triton.jit
def _sortable(x: tl.tensor) -> tl.tensor:
    """uint32 that orders as the float32 x does; -0 and +0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _score_of(key: tl.tensor) -> tl.tensor:
    """The float32 of a key; -0 comes back as +0."""
    return tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def segment_kernel(
    scores: tl.tensor,
    ids: tl.tensor,
    lengths: tl.tensor,
    out_ids: tl.tensor,
    out_scores: tl.tensor,
    out_lengths: tl.tensor,
    k: tl.tensor,
    scores_stride: tl.tensor,
    ids_stride: tl.tensor,
    out_stride: tl.tensor,
    SEGMENT: tl.constexpr,
    MAPPED: tl.constexpr,
    FINAL: tl.constexpr,
    SCORED: tl.constexpr,
) -> None:
    """Best k of segment ``program 1`` of row ``program 0``, in order, at column k * segment of the outputs."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    length = tl.load(lengths + row)
    begin = segment * SEGMENT
    count = tl.minimum(length - begin, SEGMENT)
    lane = tl.arange(0, SEGMENT)
    kept = tl.maximum(tl.minimum(count, k), 0)
    target = row * out_stride + segment * k
    if (count > 0) | (segment == 0):
        inside = lane < count
        score = tl.load(scores + row * scores_stride + begin + lane, mask=inside, other=float("-inf")).to(tl.float32)
        # NOTE: lanes past the count have key 0, below that of any number, and T is never 0.
        key = tl.where(inside, _sortable(score), 0)
        take = inside
        if count > k:
            threshold = tl.full([], 0, tl.uint32)
            bit = tl.full([], 0x80000000, tl.uint32)
            for _ in tl.range(0, 32):
                trial = threshold | bit
                bit = bit >> 1
                threshold = tl.where(tl.sum((key >= trial).to(tl.int32)) >= k, trial, threshold)
            above = key > threshold
            equal = key == threshold
            want = k - tl.sum(above.to(tl.int32))
            take = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= want))
        place = tl.cumsum(take.to(tl.int32), 0) - 1
        # Names are read and scores taken back from the keys only here: registers hold no more than keys in the search.
        if MAPPED:
            name = tl.load(ids + row * ids_stride + begin + lane, mask=take)
        else:
            name = begin + lane
        tl.store(out_ids + target + place, name, mask=take)
        if SCORED:
            tl.store(out_scores + target + place, _score_of(key), mask=take)
        if FINAL:
            tl.store(out_ids + target + lane, -1, mask=(lane >= kept) & (lane < k))
        elif (length <= begin + SEGMENT) & ((count > 0) | (segment == 0)):
            tl.store(out_lengths + row, segment * k + kept)


def levels(width: int, k: int, segment: int = SEGMENT) -> list[int]:
    """Segments of each level for rows of ``width`` scores; the last entry is 1."""
    counts = [max(1, triton.cdiv(width, segment))]
    while counts[-1] > 1:
        counts.append(triton.cdiv(counts[-1] * k, segment))
    return counts


def scratch_bytes(rows: int, width: int, k: int, segment: int = SEGMENT) -> int:
    """Bytes of candidates that ``topk`` takes beside its result."""
    inner = levels(width, k, segment)[:-1]
    return sum(rows * (8 * k * count + 4) + 3 * 64 for count in inner)


def topk(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    out: Tensor,
    take: Any,
    ids: Tensor | None = None,
    out_scores: Tensor | None = None,
    width: int | None = None,
    segment: int = SEGMENT,
) -> None:
    """Fill out int32 [rows, k] with the ids of the k best of each row, ascending by column, then -1.

    Args:
        scores: float32 or bfloat16 [rows, w], no NaN; columns from ``lengths`` on are not read.
        lengths: int32 [rows].
        k: at most ``segment // 2``.
        out: int32 [rows, k], last stride 1.
        take: ``take(shape, dtype, what)`` gives a temporary tensor on the device, such as ``Scratch.take``.
        ids: int32 [rows, w], what to write for a column instead of its number; for merging earlier results.
        out_scores: float32, shaped and strided as ``out``; scores of the ids, where wanted.
        width: largest of ``lengths``, w when not given.
        segment: columns a program, a power of two.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    rows = scores.shape[0]
    if not 1 <= k <= segment // 2:
        raise ValueError(f"k: {k}; 1 to {segment // 2} are supported")
    if out.shape != (rows, k) or out.dtype != torch.int32 or out.stride(1) != 1:
        raise ValueError(f"out: int32 [{rows}, {k}] with dense rows is needed, not {list(out.shape)} {out.dtype}")
    if out_scores is not None and (out_scores.dtype != torch.float32 or out_scores.stride() != out.stride()):
        raise ValueError("out_scores: float32 with the strides of out is needed")
    if rows == 0:
        return
    counts = levels(scores.shape[1] if width is None else width, k, segment)
    for level, count in enumerate(counts):
        final = level == len(counts) - 1
        best = out if final else take((rows, count * k), torch.int32, "top-k candidates")
        kept = out_scores if final else take((rows, count * k), torch.float32, "scores of top-k candidates")
        sizes = lengths if final else take((rows,), torch.int32, "counts of top-k candidates")
        segment_kernel[(rows, count)](
            scores,
            best if ids is None else ids,
            lengths,
            best,
            scores if kept is None else kept,
            sizes,
            k,
            scores.stride(0),
            0 if ids is None else ids.stride(0),
            best.stride(0),
            SEGMENT=segment,
            MAPPED=ids is not None,
            FINAL=final,
            SCORED=kept is not None,
            num_warps=WARPS if kept is None else SCORED_WARPS,
        )
        if not final:
            assert kept is not None
            scores, ids, lengths = kept, best, sizes
