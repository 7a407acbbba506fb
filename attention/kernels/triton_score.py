"""Index scores on a GPU: the ReLU-weighted head sum is finished in registers, heads x queries x keys is never stored.

    program = 128 keys x ROWS query rows             keys of the tile stay in shared memory
        for each row i:   dots[keys, heads] = K q_i^T        tensor cores; bf16 x bf16 or e4m3 x e4m3
                          score[keys]       = key_scale . sum_h relu(dots[:, h]) w[i, h]
        -> out[i, position - first position of the row's request]

    gathered   keys [n, 128] of several requests in one buffer, row i sees keys ks[i] .. ke[i]
    paged      keys where they lie: page_table, 64 tokens a page; a tile of rows belongs to one request

Cells of ``out`` that a row does not see are left as they are. Compiled and interpreted in tests; not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.batch import AttentionBatch
from attention.layouts import IndexCache
from attention.sizes import INDEX_DIM, INDEX_PAGE_BYTES, INDEX_SCALE_AT, PAGE_SIZE

KEYS = 128
ROWS = 32
PAGED_ROWS = 8
WARPS = 4
STAGES = 3

_PAGE = tl.constexpr(PAGE_SIZE)
_PAGE_BYTES = tl.constexpr(INDEX_PAGE_BYTES)
_PAGE_FLOATS = tl.constexpr(INDEX_PAGE_BYTES // 4)
_SCALE_FLOAT = tl.constexpr(INDEX_SCALE_AT // 4)


@triton.jit
def _row_scores(
    keys: tl.tensor,
    key_scale: tl.tensor,
    q: tl.tensor,
    weights: tl.tensor,
    i: tl.tensor,
    heads: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """Scores float32 [KEYS] of query row i (int64) against a tile of keys [KEYS, DIM]."""
    h = tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    row = i * heads
    known = h < heads
    query = tl.load(q + (row + h[:, None]) * DIM + d[None, :], mask=known[:, None], other=0.0)
    w = tl.load(weights + row + h, mask=known, other=0.0)
    dots = tl.dot(keys, tl.trans(query))
    return tl.sum(tl.maximum(dots, 0.0) * w[None, :], axis=1) * key_scale


@triton.jit(do_not_specialize=["rows", "total_keys"])
def gathered_kernel(
    q: tl.tensor,
    weights: tl.tensor,
    keys: tl.tensor,
    scales: tl.tensor,
    ks: tl.tensor,
    ke: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    total_keys: tl.tensor,
    heads: tl.tensor,
    out_stride: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """One tile: keys [KEYS * program 0 ...) by rows [ROWS * program 1 ...)."""
    n = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    first = tl.program_id(1) * ROWS
    mine = first + tl.arange(0, ROWS)
    lowest = tl.min(tl.load(ks + mine, mask=mine < rows, other=2147483647))
    highest = tl.max(tl.load(ke + mine, mask=mine < rows, other=0))
    if (tl.program_id(0) * KEYS < highest) & (tl.program_id(0) * KEYS + KEYS > lowest):
        inside = n < total_keys
        d = tl.arange(0, DIM)
        tile = tl.load(keys + n.to(tl.int64)[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0)
        scale = tl.load(scales + n, mask=inside, other=0.0) if SCALED else tl.full([KEYS], 1.0, tl.float32)
        for step in tl.range(0, tl.minimum(ROWS, rows - first)):
            i = first.to(tl.int64) + step
            found = _row_scores(tile, scale, q, weights, i, heads, HEADS, DIM)
            start = tl.load(ks + i)
            seen = (n >= start) & (n < tl.load(ke + i))
            tl.store(out + i * out_stride + (n - start), found, mask=seen)


@triton.jit(do_not_specialize=["table_width"])
def paged_kernel(
    q: tl.tensor,
    weights: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    tile_row: tl.tensor,
    tile_rows: tl.tensor,
    tile_request: tl.tensor,
    seen: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    table_width: tl.tensor,
    out_stride: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PACKED: tl.constexpr,
) -> None:
    """One tile: positions [KEYS * program 0 ...) by the rows of tile ``program 1``; row i sees ``seen[i]`` keys."""
    n = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    first = tl.load(tile_row + tl.program_id(1))
    count = tl.load(tile_rows + tl.program_id(1))
    limit = tl.load(seen + first + count - 1)
    if tl.program_id(0) * KEYS < limit:
        inside = n < limit
        line = table + tl.load(tile_request + tl.program_id(1)).to(tl.int64) * table_width
        page = tl.load(line + n // _PAGE, mask=inside, other=0).to(tl.int64)
        d = tl.arange(0, DIM)
        if PACKED:
            at = page * _PAGE_BYTES + (n % _PAGE) * DIM
            scale = tl.load(scales + page * _PAGE_FLOATS + _SCALE_FLOAT + n % _PAGE, mask=inside, other=0.0)
        else:
            at = (page * _PAGE + n % _PAGE) * DIM
            scale = tl.full([KEYS], 1.0, tl.float32)
        tile = tl.load(cache + at[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        for step in tl.range(0, count):
            i = first.to(tl.int64) + step
            found = _row_scores(tile, scale, q, weights, i, heads, HEADS, DIM)
            tl.store(out + i * out_stride + n, found, mask=n < tl.load(seen + i))


def padded_heads(heads: int) -> int:
    """Heads of the product: a power of two, at least 16, the narrowest that tensor cores take."""
    return max(16, int(triton.next_power_of_2(heads)))


def score_gathered(
    q: Tensor, head_weights: Tensor, keys: Tensor, key_scale: Tensor | None, ks: Tensor, ke: Tensor, out: Tensor
) -> None:
    """Fill ``out[i, j - ks[i]]`` with the score of key j for query row i, for ks[i] <= j < ke[i].

    Args:
        q: [m, H, 128] contiguous, float8_e4m3fn or bfloat16.
        head_weights: float32 [m, H]; a quantised q has its scale folded in.
        keys: [n, 128] contiguous, q's dtype.
        key_scale: float32 [n], None for bfloat16 keys.
        ks, ke: int32 [m], windows into ``keys``.
        out: float32 [m, at least max(ke - ks)], rows apart by any stride.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    _check(q, head_weights, keys.dtype, "keys")
    if (key_scale is None) == (keys.dtype == torch.float8_e4m3fn):
        raise ValueError(f"key_scale: given exactly for float8_e4m3fn keys, not for {keys.dtype}")
    rows, heads, dim = q.shape
    if rows == 0 or keys.shape[0] == 0:
        return
    gathered_kernel[(triton.cdiv(keys.shape[0], KEYS), triton.cdiv(rows, ROWS))](
        q,
        head_weights,
        keys,
        head_weights if key_scale is None else key_scale,
        ks,
        ke,
        out,
        rows,
        keys.shape[0],
        heads,
        out.stride(0),
        HEADS=padded_heads(heads),
        DIM=dim,
        ROWS=ROWS,
        KEYS=KEYS,
        SCALED=key_scale is not None,
        num_warps=WARPS,
        num_stages=STAGES,
    )


def row_tiles(batch: AttentionBatch, first: int, stop: int, rows: int = PAGED_ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """(first row, rows, request) int32 of tiles that cover batch rows [first, stop), none across two requests."""
    low = batch.query_start[:-1].clamp(first, stop).long()
    count = batch.query_start[1:].clamp(first, stop).long() - low
    tiles = -(-count // rows)
    request = torch.repeat_interleave(torch.arange(batch.requests), tiles)
    step = (torch.arange(request.shape[0]) - (tiles.cumsum(0) - tiles)[request]) * rows
    length = (count[request] - step).clamp_max(rows)
    return (low[request] + step).int(), length.int(), request.int()


def score_paged(
    q: Tensor,
    head_weights: Tensor,
    cache: IndexCache,
    page_table: Tensor,
    tiles: tuple[Tensor, Tensor, Tensor],
    seen: Tensor,
    width: int,
    out: Tensor,
) -> None:
    """Fill ``out[i, p]`` with the score of position p for query row i, for p < seen[i], reading keys from their pages.

    Args:
        q: [m, H, 128] contiguous, float8_e4m3fn for an fp8 cache, else bfloat16.
        head_weights: float32 [m, H].
        cache: index keys, fp8 or bfloat16.
        page_table: int32 [requests, pages].
        tiles: of ``row_tiles``, on the device.
        seen: int32 [m], position + 1 of each row, not descending within a request.
        width: largest of ``seen`` among the tiles, known on the host.
        out: float32 [m, at least width].
    """
    packed = cache.kind == "fp8"
    _check(q, head_weights, torch.float8_e4m3fn if packed else cache.buffer.dtype, "cache")
    if tiles[0].shape[0] == 0 or width == 0:
        return
    paged_kernel[(triton.cdiv(width, KEYS), tiles[0].shape[0])](
        q,
        head_weights,
        cache.buffer.view(torch.float8_e4m3fn) if packed else cache.buffer,
        cache.buffer.view(torch.float32) if packed else head_weights,
        page_table,
        *tiles,
        seen,
        out,
        q.shape[1],
        page_table.stride(0),
        out.stride(0),
        HEADS=padded_heads(q.shape[1]),
        DIM=q.shape[2],
        KEYS=KEYS,
        PACKED=packed,
        num_warps=WARPS,
        num_stages=STAGES,
    )


def _check(q: Tensor, head_weights: Tensor, dtype: torch.dtype, name: str) -> None:
    if q.dim() != 3 or q.shape[2] != INDEX_DIM or not q.is_contiguous():
        raise ValueError(f"q: contiguous [m, heads, {INDEX_DIM}] is needed, not {list(q.shape)}")
    if q.dtype != dtype or dtype not in (torch.float8_e4m3fn, torch.bfloat16):
        raise ValueError(f"{name}: {dtype} beside a q of {q.dtype}; both float8_e4m3fn or both bfloat16 are needed")
    if head_weights.shape != q.shape[:2] or head_weights.dtype != torch.float32 or not head_weights.is_contiguous():
        raise ValueError(f"head_weights: contiguous float32 {list(q.shape[:2])} is needed")
