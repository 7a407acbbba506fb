"""The loop of sparse MLA on the CPU: one query row, 64 of its ids at a time.

ids of the row -> addresses of latent rows -> [fp8, or mixed types: widened into the tile] -> running softmax -> out

scratch | q [heads up to a multiple of 4, 576] | 64 addresses | logits | m, l | keep | o [heads, 512] | tile [64, 576] |
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from numba import njit
from torch import Tensor

from attention.batch import AttentionBatch
from attention.kernels.sparse import copy, fill, put_row, tile, widen, widen_row
from attention.kernels.vector import compiled, get_f32, get_i32, get_i64, put_f32, put_i64, stamp
from attention.layouts import RAW, LatentCache
from attention.scratch import Scratch
from attention.sizes import LATENT_DIM, NOPE_DIM, ROPE_DIM


@njit(nogil=True)
def _owner(requests: int, query_start: int, row: int, r: int) -> int:
    """Request of a row, searched upwards from ``r``; ``requests`` for a padding row."""
    while r < requests and get_i32(query_start + 4 * r + 4) <= row:
        r += 1
    return r


@njit(nogil=True)
def _limit(requests: int, seq_lens: int, r: int, slots: int) -> int:
    """Ids of a row of request ``r`` are below this; 0 for a padding row, the slots when there are no pages."""
    if requests < 0:
        return slots
    return get_i32(seq_lens + 4 * r) if r < requests else 0


@njit(nogil=True)
def _gather(
    ids: int,
    start: int,
    width: int,
    requests: int,
    limit: int,
    line: int,
    slots: int,
    cache: int,
    row_bytes: int,
    addresses: int,
) -> tuple[int, int]:
    """Addresses of the next 64 latent rows of a row's ids from ``start`` on.

    Returns (where to go on, how many); (-1, 0) for an id or a page out of bounds. A limit of 0 gives none.
    """
    count = 0
    j = start if limit > 0 else width
    while j < width and count < 64:
        found = get_i32(ids + 4 * j)
        j += 1
        if found < 0:
            continue
        if found >= limit:
            return -1, 0
        slot = found
        if requests >= 0:
            page = get_i32(line + 4 * (found // 64))
            slot = 64 * page + found % 64
            if page < 0 or slot >= slots:
                return -1, 0
        put_i64(addresses + 8 * count, cache + slot * row_bytes)
        count += 1
    return j, count


def _build(version: str) -> Callable[..., int]:
    @compiled
    def run(
        requests: int,
        query_start: int,
        seq_lens: int,
        table: int,
        table_width: int,
        rows: int,
        q_nope: int,
        nope_row: int,
        nope_head: int,
        q_rope: int,
        rope_row: int,
        rope_head: int,
        heads: int,
        ids: int,
        width: int,
        cache: int,
        slots: int,
        row_bytes: int,
        mode: int,
        scale: float,
        half: int,
        given_half: int,
        q: int,
        addresses: int,
        logits: int,
        state: int,
        keep: int,
        acc: int,
        wide: int,
        out: int,
        lse: int,
    ) -> int:
        """0, or 1 + the row that has an id outside its context or the cache."""
        if len(version) == 0:
            return -1
        size = 2 if half else 4
        padded = (heads + 3) // 4 * 4
        fill(q, padded * LATENT_DIM * size // 4, 0.0)
        here, there = addresses, addresses + 8 * 64
        r = _owner(requests, query_start, 0, 0)
        place = 0
        count = -1
        for i in range(rows):
            for h in range(heads):
                head = q + h * LATENT_DIM * size
                nope, rope = q_nope + i * nope_row + h * nope_head, q_rope + i * rope_row + h * rope_head
                if given_half == half:
                    copy(nope, head, NOPE_DIM * size)
                    copy(rope, head + NOPE_DIM * size, ROPE_DIM * size)
                else:
                    widen(nope, head, NOPE_DIM)
                    widen(rope, head + NOPE_DIM * size, ROPE_DIM)
            for h in range(padded):
                put_f32(state + 8 * h, -math.inf)
                put_f32(state + 8 * h + 4, 0.0)
            fill(acc, padded * NOPE_DIM, 0.0)
            if count < 0:
                limit = _limit(requests, seq_lens, r, slots)
                line = table + 4 * r * table_width
                place, count = _gather(
                    ids + 4 * i * width, 0, width, requests, limit, line, slots, cache, row_bytes, here
                )
                if place < 0:
                    return 1 + i
            more = True
            while more:
                line = table + 4 * r * table_width
                limit = _limit(requests, seq_lens, r, slots)
                place, coming = _gather(
                    ids + 4 * i * width, place, width, requests, limit, line, slots, cache, row_bytes, there
                )
                if place < 0:
                    return 1 + i
                if coming == 0:
                    more = False
                    if i + 1 < rows:
                        r = _owner(requests, query_start, i + 1, r)
                        line = table + 4 * r * table_width
                        limit = _limit(requests, seq_lens, r, slots)
                        place, coming = _gather(
                            ids + 4 * (i + 1) * width, 0, width, requests, limit, line, slots, cache, row_bytes, there
                        )
                        if place < 0:
                            return 2 + i
                if count > 0:
                    if mode != 0:
                        for k in range(count):
                            target = wide + k * LATENT_DIM * size
                            widen_row(get_i64(here + 8 * k), target, mode == 2, half != 0)
                            put_i64(here + 8 * k, target)
                    for k in range(count, (count + 3) // 4 * 4):
                        put_i64(here + 8 * k, get_i64(here + 8 * count - 8))
                    tile(
                        q,
                        padded,
                        half != 0,
                        here,
                        count,
                        scale,
                        logits,
                        state,
                        keep,
                        acc,
                        there,
                        coming,
                        row_bytes,
                    )
                here, there = there, here
                count = coming
            for h in range(heads):
                mass = get_f32(state + 8 * h + 4)
                target = out + (i * heads + h) * NOPE_DIM * (2 if given_half else 4)
                put_row(acc + 4 * NOPE_DIM * h, target, 1.0 / mass if mass > 0 else 0.0, given_half != 0)
                put_f32(lse + 4 * (i * heads + h), get_f32(state + 8 * h) + math.log(mass) if mass > 0 else -math.inf)
        return 0

    return run  # type: ignore[no-any-return]


_run = _build(stamp())


def attend(
    batch: AttentionBatch | None,
    q_nope: Tensor,
    q_rope: Tensor,
    cache: LatentCache,
    ids: Tensor,
    scale: float,
    scratch: Scratch,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Fill out [n, heads, 512] and lse [n, heads]; see ``paged.attend`` for the arguments."""
    if cache.kind == RAW:
        raise ValueError(f"cache: {RAW} rows are read in place on a GPU only; gather them into a workspace")
    given_half = q_nope.dtype == torch.bfloat16
    half = given_half and cache.kind != "float32"
    mode = 2 if cache.kind == "fp8_packed" else int(cache.kind == "bfloat16" and not half)
    if q_nope.stride(2) != 1:
        q_nope = q_nope.contiguous()
    if q_rope.stride(2) != 1:
        q_rope = q_rope.contiguous()
    heads, given, size = q_nope.shape[1], q_nope.element_size(), 2 if half else 4
    padded = (heads + 3) // 4 * 4
    q = scratch.address(padded * LATENT_DIM * size, "one query row")
    addresses = scratch.address(2 * 8 * 64, "addresses of two tiles")
    logits = scratch.address(4 * 64 * padded, "logits of one tile")
    state = scratch.address(8 * padded, "softmax state")
    keep = scratch.address(4 * padded, "softmax factors")
    acc = scratch.address(4 * NOPE_DIM * padded, "one output row")
    tile_at = scratch.address(64 * LATENT_DIM * size, "widened latent rows") if mode else 0
    failed = _run(
        -1 if batch is None else batch.requests,
        0 if batch is None else batch.query_start.data_ptr(),
        0 if batch is None else batch.seq_lens.data_ptr(),
        0 if batch is None else batch.page_table.data_ptr(),
        0 if batch is None else batch.page_table.shape[1],
        q_nope.shape[0],
        q_nope.data_ptr(),
        q_nope.stride(0) * given,
        q_nope.stride(1) * given,
        q_rope.data_ptr(),
        q_rope.stride(0) * given,
        q_rope.stride(1) * given,
        heads,
        ids.data_ptr(),
        ids.shape[1],
        cache.buffer.data_ptr(),
        cache.slots,
        cache.buffer.shape[1] * cache.buffer.element_size(),
        mode,
        scale,
        int(half),
        int(given_half),
        q,
        addresses,
        logits,
        state,
        keep,
        acc,
        tile_at,
        out.data_ptr(),
        lse.data_ptr(),
    )
    if failed:
        raise ValueError(f"topk_ids: row {failed - 1} has an id outside its context or the latent cache")
