"""The loop of sparse MLA on the CPU: one query row, 64 of its ids at a time.

ids of the row -> addresses of latent rows -> [fp8, or mixed types: widened into the tile] -> running softmax -> out

scratch | q [heads up to a multiple of 4, 576] | 64 addresses | logits | m, l | keep | o [heads, 512] | tile [64, 576] |
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attention.batch import AttentionBatch
from attention.kernels.sparse import copy, fill, put_row, tile, widen_row
from attention.kernels.vector import compiled, get_f32, get_i32, get_i64, put_f32, put_i64, stamp
from attention.layouts import LATENT_DIM, NOPE_DIM, ROPE_DIM, LatentCache
from attention.scratch import Scratch


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
        r = 0
        for i in range(rows):
            limit = slots
            if requests >= 0:
                while r < requests and get_i32(query_start + 4 * r + 4) <= i:
                    r += 1
                limit = get_i32(seq_lens + 4 * r) if r < requests else 0
            for h in range(heads):
                place = q + h * LATENT_DIM * size
                copy(q_nope + i * nope_row + h * nope_head, place, NOPE_DIM * size)
                copy(q_rope + i * rope_row + h * rope_head, place + NOPE_DIM * size, ROPE_DIM * size)
            for h in range(padded):
                put_f32(state + 8 * h, -math.inf)
                put_f32(state + 8 * h + 4, 0.0)
            fill(acc, padded * NOPE_DIM, 0.0)
            count = 0
            for j in range(width + 1):
                if j < width:
                    found = get_i32(ids + 4 * (i * width + j))
                    if found >= 0 and (requests < 0 or r < requests):
                        if found >= limit:
                            return 1 + i
                        slot = found
                        if requests >= 0:
                            page = get_i32(table + 4 * (r * table_width + found // 64))
                            slot = 64 * page + found % 64
                            if page < 0 or slot >= slots:
                                return 1 + i
                        row = cache + slot * row_bytes
                        if mode != 0:
                            target = wide + count * LATENT_DIM * size
                            widen_row(row, target, mode == 2, half != 0)
                            row = target
                        put_i64(addresses + 8 * count, row)
                        count += 1
                if count == 64 or (j == width and count > 0):
                    for k in range(count, (count + 3) // 4 * 4):
                        put_i64(addresses + 8 * k, get_i64(addresses + 8 * count - 8))
                    tile(q, padded, half != 0, addresses, count, scale, logits, state, keep, acc)
                    count = 0
            for h in range(heads):
                mass = get_f32(state + 8 * h + 4)
                target = out + (i * heads + h) * NOPE_DIM * size
                put_row(acc + 4 * NOPE_DIM * h, target, 1.0 / mass if mass > 0 else 0.0, half != 0)
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
    if q_nope.dtype == torch.bfloat16 and cache.kind == "float32":
        wide = torch.empty(out.shape, dtype=torch.float32)
        attend(batch, q_nope.float(), q_rope.float(), cache, ids, scale, scratch, wide, lse)
        out.copy_(wide)
        return
    half = q_nope.dtype == torch.bfloat16
    mode = 2 if cache.kind == "fp8_packed" else int(cache.kind == "bfloat16" and not half)
    if q_nope.stride(2) != 1:
        q_nope = q_nope.contiguous()
    if q_rope.stride(2) != 1:
        q_rope = q_rope.contiguous()
    heads, size = q_nope.shape[1], q_nope.element_size()
    padded = (heads + 3) // 4 * 4
    q = scratch.address(padded * LATENT_DIM * size, "one query row")
    addresses = scratch.address(8 * 64, "addresses of one tile")
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
        q_nope.stride(0) * size,
        q_nope.stride(1) * size,
        q_rope.data_ptr(),
        q_rope.stride(0) * size,
        q_rope.stride(1) * size,
        heads,
        ids.data_ptr(),
        ids.shape[1],
        cache.buffer.data_ptr(),
        cache.slots,
        cache.buffer.shape[1] * cache.buffer.element_size(),
        mode,
        scale,
        int(half),
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
