"""Top-k ids to rows of the buffer that sparse MLA reads, on a GPU: ``attention.topk_remap`` in one launch.

    id (position in its request) -> owner, local          owner = id // il mod W, local = id // (W il) . il + id mod il
        row of a gathered request   owner . rank_stride + start[prefill request] + local
        row of a paged request      table[request, local // block] . block_stride + local mod block, other owners -> -1

One program a query row; -1 stays -1; compacted rows keep their order. Compiled and interpreted in tests; not yet run on
a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4


@triton.jit(do_not_specialize=["table_width"])
def remap_kernel(
    topk: tl.tensor,
    request: tl.tensor,
    prefill_request: tl.tensor,
    table: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    counts: tl.tensor,
    width: tl.tensor,
    table_width: tl.tensor,
    block_size: tl.tensor,
    block_stride: tl.tensor,
    rank_stride: tl.tensor,
    size: tl.tensor,
    rank: tl.tensor,
    interleave: tl.tensor,
    IDS: tl.constexpr,
    GATHERED: tl.constexpr,
    COMPACT: tl.constexpr,
) -> None:
    """All ids of query row ``program 0``."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, IDS)
    ids = tl.load(topk + row * width + j, mask=j < width, other=-1)
    known = tl.maximum(ids, 0)
    owner = (known // interleave) % size
    local = known // (size * interleave) * interleave + known % interleave
    valid = (ids >= 0) & (local < table_width * block_size)
    group = -1
    if GATHERED:
        group = tl.load(prefill_request + row)
    if group >= 0:
        found = owner * rank_stride + tl.load(starts + group) + local
    else:
        mine = valid & (owner == rank)
        line = table + tl.load(request + row).to(tl.int64) * table_width
        found = tl.load(line + local // block_size, mask=mine, other=0) * block_stride + local % block_size
        found = tl.where(mine, found, -1)
    found = tl.where(valid, found, -1)
    there = found >= 0
    tl.store(counts + row, tl.sum(there.to(tl.int32)))
    if COMPACT:
        place = tl.cumsum(there.to(tl.int32), 0) - 1
        total = tl.sum(there.to(tl.int32))
        tl.store(out + row * width + place, found, mask=there)
        tl.store(out + row * width + j, -1, mask=(j >= total) & (j < width))
    else:
        tl.store(out + row * width + j, found, mask=j < width)


def remap(
    topk: Tensor,
    request: Tensor,
    prefill_request: Tensor | None,
    block_table: Tensor,
    block_size: int,
    block_stride: int,
    starts: Tensor | None,
    rank_stride: int,
    out: Tensor,
    counts: Tensor,
    size: int = 1,
    rank: int = 0,
    interleave: int = 1,
    compact_to_front: bool = False,
) -> None:
    """Fill out int32 [n, k] and counts int32 [n]; arguments as in ``topk_remap.remap``, all tensors int32.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    rows, width = topk.shape
    for name, value in (("topk", topk), ("block_table", block_table), ("out", out), ("counts", counts)):
        if value.dtype != torch.int32 or not value.is_contiguous():
            raise ValueError(f"{name}: a contiguous int32 tensor is needed, not {value.dtype}")
    if prefill_request is not None and starts is None:
        raise ValueError("starts: needed with prefill_request")
    if out.shape != topk.shape or counts.shape != (rows,) or request.shape != (rows,):
        raise ValueError(f"out, counts and request: [{rows}, {width}] and [{rows}] twice are needed")
    if rows == 0 or width == 0:
        counts.zero_()
        return
    remap_kernel[(rows,)](
        topk,
        request,
        request if prefill_request is None else prefill_request,
        block_table,
        request if starts is None else starts,
        out,
        counts,
        width,
        block_table.shape[1],
        block_size,
        block_stride,
        rank_stride,
        size,
        rank,
        interleave,
        IDS=triton.next_power_of_2(width),
        GATHERED=prefill_request is not None,
        COMPACT=compact_to_front,
        num_warps=WARPS,
    )
