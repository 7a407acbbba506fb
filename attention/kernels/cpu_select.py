"""The indexer's loop on the CPU: pack a page once, score it for every row of the cut, then keep each row's best.

for each request
    rows that see <= topk keys: 0 .. position
    for each cut of the other rows (as many as fit in the scratch)
        queries that need it: quantised (fp8) or widened (mixed types)
        for each page of the context:  widen, pack, then 64 scores for each row that sees it
        for each row:                  threshold and ids

    a row whose scores do not fit at all: its keys in slices (cpu_slices)

scratch | 64 keys widened | 64 keys packed | scores [cut, pages * 64] | queries [cut, H, d] | weights [cut, H] |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from numba import njit
from torch import Tensor

from attention.batch import AttentionBatch
from attention.kernels.cpu_slices import least_bytes, select_in_slices
from attention.kernels.score import DIRECT, HALF, SMALL, load_page, quantise, scale_keys, score, widen
from attention.kernels.topk import collect
from attention.kernels.vector import compiled, get_i32, put_i32, stamp
from attention.layouts import IndexCache
from attention.scratch import Scratch
from attention.sizes import INDEX_PAGE_BYTES, INDEX_SCALE_AT

# What is done to the queries before they are scored.
_AS_IT_IS, _WIDEN, _QUANTISE_FLOAT, _QUANTISE_HALF = 0, 1, 2, 3


@njit(nogil=True)
def _all_seen(seen: int, topk: int, out: int) -> None:
    """Ids 0 to seen - 1, then -1."""
    for j in range(topk):
        put_i32(out + 4 * j, j if j < seen else -1)


@njit(nogil=True)
def _prepared(prepare: int, q: int, weights: int, heads: int, dim: int, target: int, gain: int) -> None:
    """One query row and its head weights in the form that the scores are taken in."""
    if prepare == _WIDEN:
        widen(q, heads * dim, False, target)
        for h in range(heads):
            put_i32(gain + 4 * h, get_i32(weights + 4 * h))
    else:
        quantise(q, heads, prepare == _QUANTISE_HALF, target, weights, gain)


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
        prepare: int,
        weights: int,
        cache: int,
        pages: int,
        page_bytes: int,
        mode: int,
        topk: int,
        widened: int,
        packed: int,
        block: int,
        capacity: int,
        out: int,
    ) -> int:
        """0, or 1 + the request whose page table names a page outside the cache."""
        if len(version) == 0:
            return -1
        row_bytes = 4 * heads * words
        given_bytes = heads * dim * (2 if prepare in (_WIDEN, _QUANTISE_HALF) else 4)
        own = 0 if prepare == _AS_IT_IS else row_bytes + 4 * heads
        for r in range(requests):
            first = get_i32(query_start + 4 * r)
            last = get_i32(query_start + 4 * r + 4)
            if first == last:
                continue
            length = get_i32(seq_lens + 4 * r)
            row = first
            while row < last and length - last + row < topk:
                _all_seen(length - last + row + 1, topk, out + 4 * row * topk)
                row += 1
            stride = (length + 63) // 64 * 256
            sliced = stride + own > capacity
            while row < last:
                stop = row + 1 if sliced else min(last, row + capacity // (stride + own))
                queries = q + row * row_bytes
                gains = weights + 4 * row * heads
                if prepare != _AS_IT_IS:
                    queries = block if sliced else block + (stop - row) * stride
                    gains = queries + (stop - row) * row_bytes
                    for i in range(row, stop):
                        target = queries + (i - row) * row_bytes
                        gain = gains + 4 * (i - row) * heads
                        _prepared(prepare, q + i * given_bytes, weights + 4 * i * heads, heads, dim, target, gain)
                if sliced:
                    seen = length - last + row + 1
                    line = table + 4 * r * table_width
                    if not select_in_slices(
                        queries,
                        heads,
                        dim,
                        words,
                        pairs != 0,
                        gains,
                        seen,
                        line,
                        cache,
                        pages,
                        page_bytes,
                        mode,
                        topk,
                        widened,
                        packed,
                        block + (own + 63) // 64 * 64,
                        capacity - (own + 63) // 64 * 64,
                        out + 4 * row * topk,
                    ):
                        return 1 + r
                    row = stop
                    continue
                for page in range((length - last + stop + 63) // 64):
                    physical = get_i32(table + 4 * (r * table_width + page))
                    if physical < 0 or physical >= pages:
                        return 1 + r
                    source = cache + physical * page_bytes
                    load_page(source, page_bytes, mode, dim, words, widened, packed)
                    begin = max(row, last - length + 64 * page)
                    coming = 0
                    if page + 1 < (length - last + stop + 63) // 64:
                        coming = cache + page_bytes * get_i32(table + 4 * (r * table_width + page + 1))
                    for i in range(begin, stop):
                        k = i - row
                        place = block + k * stride + 256 * page
                        gain = gains + 4 * k * heads
                        fresh = page_bytes if i == begin and coming != 0 else 0
                        score(queries + k * row_bytes, heads, words, pairs != 0, packed, gain, place, coming, fresh)
                        if mode == SMALL:
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
    dim, half = cache.dim, q.dtype == torch.bfloat16
    if dim % 16:
        raise ValueError(f"cache: keys of {dim} values; a multiple of 16 is needed")
    prepare, mode, pairs = _AS_IT_IS, DIRECT, 0
    page_bytes, pages = 64 * dim * cache.buffer.element_size(), cache.slots // 64
    if cache.kind == "fp8":
        prepare, mode, pairs = _QUANTISE_HALF if half else _QUANTISE_FLOAT, SMALL, 1
        page_bytes = INDEX_PAGE_BYTES
    elif cache.kind == "bfloat16" and half:
        pairs = 1
    elif cache.kind == "bfloat16":
        mode = HALF
    elif half:
        prepare = _WIDEN
    heads, words = q.shape[1], dim // 2 if pairs else dim
    widened = 0 if mode == DIRECT else scratch.address(256 * words, "index keys of one page")
    packed = scratch.address(256 * words, "packed index keys of one page")
    longest = int(batch.seq_lens.max()) if batch.requests else 0
    own = 0 if prepare == _AS_IT_IS else 4 * heads * (words + 1)
    least = least_bytes(topk) + own + 64
    capacity = min(scratch.free, max(least, ((longest + 63) // 64 * 256 + own) * q.shape[0]))
    block = scratch.address(max(capacity, least), f"index scores of one row at top-k {topk}")
    if batch.rows < q.shape[0]:
        out[batch.rows :].fill_(-1)
    failed = _run(
        batch.requests,
        batch.query_start.data_ptr(),
        batch.seq_lens.data_ptr(),
        batch.page_table.data_ptr(),
        batch.page_table.shape[1],
        q.data_ptr(),
        heads,
        dim,
        words,
        pairs,
        prepare,
        head_weights.data_ptr(),
        cache.buffer.data_ptr(),
        pages,
        page_bytes,
        mode,
        topk,
        widened,
        packed,
        block,
        capacity,
        out.data_ptr(),
    )
    if failed:
        raise ValueError(f"page_table: request {failed - 1} names a page outside the index cache of {pages} pages")
