"""The indexer's loop on the CPU: pack a page once, score it for every row of the cut, then keep each row's best.

for each request
    rows that see <= topk keys: 0 .. position
    for each cut of the other rows (as many as fit in the score block)
        for each page of the context:  widen, pack, then 64 scores for each row that sees it
        for each row:                  threshold and ids

scratch | 64 keys widened | 64 keys packed | scores, float32 [cut, pages * 64] |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attention.batch import AttentionBatch
from attention.kernels.score import pack, scale_keys, score, widen
from attention.kernels.topk import collect
from attention.kernels.vector import compiled, get_i32, put_i32, stamp
from attention.layouts import INDEX_PAGE_BYTES, INDEX_SCALE_AT, IndexCache
from attention.scratch import Scratch

_DIRECT, _HALF, _SMALL = 0, 1, 2


def _build(version: str) -> Callable[..., int]:
    @compiled
    def run(
        requests: int,
        query_start: int,
        seq_lens: int,
        table: int,
        table_width: int,
        q: int,
        heads: int,
        dim: int,
        words: int,
        pairs: int,
        weights: int,
        cache: int,
        pages: int,
        page_bytes: int,
        mode: int,
        topk: int,
        widened: int,
        packed: int,
        capacity: int,
        out: int,
    ) -> int:
        """0, or 1 + the request whose page table names a page outside the cache."""
        if len(version) == 0:
            return -1
        block = packed + 256 * words
        step = page_bytes // 64
        for r in range(requests):
            first = get_i32(query_start + 4 * r)
            last = get_i32(query_start + 4 * r + 4)
            length = get_i32(seq_lens + 4 * r)
            if first == last:
                continue
            row = first
            while row < last and length - last + row < topk:
                seen = length - last + row + 1
                for j in range(seen):
                    put_i32(out + 4 * (row * topk + j), j)
                for j in range(seen, topk):
                    put_i32(out + 4 * (row * topk + j), -1)
                row += 1
            stride = (length + 63) // 64 * 256
            while row < last:
                stop = min(last, row + capacity // stride)
                deepest = length - last + stop
                for page in range((deepest + 63) // 64):
                    physical = get_i32(table + 4 * (r * table_width + page))
                    if physical < 0 or physical >= pages:
                        return 1 + r
                    source = cache + physical * page_bytes
                    keys = source
                    key_step = step
                    if mode != _DIRECT:
                        widen(source, 64 * dim, mode == _SMALL, widened)
                        keys = widened
                        key_step = 4 * words
                    pack(keys, key_step, words, packed)
                    begin = max(row, last - length + 64 * page)
                    for i in range(begin, stop):
                        place = block + (i - row) * stride + 256 * page
                        score(
                            q + i * heads * words * 4, heads, words, pairs != 0, packed, weights + 4 * i * heads, place
                        )
                        if mode == _SMALL:
                            scale_keys(place, source + INDEX_SCALE_AT)
                for i in range(row, stop):
                    collect(block + (i - row) * stride, length - last + i + 1, topk, out + 4 * i * topk)
                row = stop
        return 0

    return run  # type: ignore[no-any-return]


_run = _build(stamp())


def select(
    batch: AttentionBatch,
    q: Tensor,
    head_weights: Tensor,
    cache: IndexCache,
    topk: int,
    scratch: Scratch,
    out: Tensor,
) -> None:
    """Fill out int32 [n, topk]; see ``indexer.ragged.select`` for the arguments."""
    dim = cache.dim
    if cache.kind == "fp8":
        mode, pairs, page_bytes, pages = _SMALL, 1, INDEX_PAGE_BYTES, cache.buffer.shape[0]
    else:
        pairs = int(cache.kind == "bfloat16" and q.dtype == torch.bfloat16 and dim % 2 == 0)
        mode = _HALF if cache.kind == "bfloat16" and not pairs else _DIRECT
        page_bytes, pages = 64 * dim * cache.buffer.element_size(), cache.buffer.shape[0] // 64
    if not pairs and q.dtype != torch.float32:
        q = q.float()
    words = dim // 2 if pairs else dim
    widened = scratch.address(256 * words, "index keys of one page")
    packed = scratch.address(256 * words, "packed index keys of one page")
    longest = int(batch.seq_lens.max()) if batch.requests else 0
    one = (longest + 63) // 64 * 256
    capacity = scratch.free
    if one > capacity:
        scratch.address(one, f"index scores of one row over {longest} keys")
    scratch.address(min(capacity, one * q.shape[0]), "index scores")
    if batch.rows < q.shape[0]:
        out[batch.rows :].fill_(-1)
    failed = _run(
        batch.requests,
        batch.query_start.data_ptr(),
        batch.seq_lens.data_ptr(),
        batch.page_table.data_ptr(),
        batch.page_table.shape[1],
        q.data_ptr(),
        q.shape[1],
        dim,
        words,
        pairs,
        head_weights.data_ptr(),
        cache.buffer.data_ptr(),
        pages,
        page_bytes,
        mode,
        topk,
        widened,
        packed,
        capacity,
        out.data_ptr(),
    )
    if failed:
        raise ValueError(f"page_table: request {failed - 1} names a page outside the index cache of {pages} pages")
