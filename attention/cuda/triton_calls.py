"""Our Triton kernels as the device calls. Needs torch and triton alone, so that a bare GPU machine can try them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attention.kernels import triton_attend, triton_gather, triton_remap, triton_score, triton_topk
from attention.kernels.triton import device_facts
from attention.layouts import IndexCache, LatentCache
from attention.sizes import NOPE_DIM, PAGE_SIZE

Take = Callable[..., Tensor]


class TritonCalls:
    """See `attention.cuda.calls.Calls`. `topk` here is `best`: ids ascend, ties go to the lowest position."""

    allocates_scores = False
    head_multiple = 1

    def gather_keys(self, cache: IndexCache, slots: Tensor, keys: Tensor, scales: Tensor) -> None:
        triton_gather.gather_index(cache, slots, keys, scales)

    def scores(
        self, q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, ks: Tensor, ke: Tensor, width: int, room: Tensor
    ) -> Tensor:
        out = room[: q.shape[0] * width].view(q.shape[0], width)
        triton_score.score_gathered(q, weights, keys, scales, ks, ke, out)
        return out

    def page_scores(
        self, q: Tensor, weights: Tensor, cache: IndexCache, pages: Tensor, seen: Tensor, width: int, room: Tensor
    ) -> Tensor:
        rows = q.shape[0]
        out = room[: rows * width].view(rows, width)
        each = torch.arange(rows, dtype=torch.int32, device=q.device)
        tiles = (each, torch.ones_like(each), each)
        triton_score.score_paged(q, weights, cache, pages, tiles, seen, width, out)
        return out

    def topk(self, scores: Tensor, lengths: Tensor, out: Tensor) -> None:
        triton_topk.topk(scores, lengths, out.shape[1], out, _take(scores))

    def best(self, scores: Tensor, lengths: Tensor, ids: Tensor | None, out: Tensor, out_scores: Tensor) -> None:
        triton_topk.topk(scores, lengths, out.shape[1], out, _take(scores), ids=ids, out_scores=out_scores)

    def gather_rows(self, cache: LatentCache, slots: Tensor, out: Tensor) -> None:
        triton_gather.gather(cache, slots, out)

    def remap(self, ids: Tensor, owner: Tensor, starts: Tensor, pages: Tensor, out: Tensor) -> None:
        counts = torch.empty(ids.shape[0], dtype=torch.int32, device=ids.device)
        triton_remap.remap(ids, owner, owner, pages, PAGE_SIZE, PAGE_SIZE, starts, 0, out, counts)

    def attend_rows(self, q: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return self._attend(q, LatentCache(rows, "bfloat16"), ids, scale)

    def attend_pages(
        self, q: Tensor, cache: LatentCache, pages: Tensor, owner: Tensor, ids: Tensor, counts: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self._attend(q, cache, ids, scale, owner, pages)

    @staticmethod
    def _attend(
        q: Tensor,
        cache: LatentCache,
        ids: Tensor,
        scale: float,
        owner: Tensor | None = None,
        pages: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        n, heads = q.shape[:2]
        out = torch.empty((n, heads, NOPE_DIM), dtype=q.dtype, device=q.device)
        lse = torch.empty((n, heads), dtype=torch.float32, device=q.device)
        major, processors = device_facts(q.device)
        shape = triton_attend.shape_for(heads, major)
        triton_attend.attend(
            q[..., :NOPE_DIM],
            q[..., NOPE_DIM:],
            cache.buffer,
            ids,
            scale,
            out,
            lse,
            owner,
            pages,
            layer_scale=cache.scale,
            splits=triton_attend.splits_for(n, heads, ids.shape[1], processors, shape),
            take=_take(q),
            shape=shape,
        )
        return out, lse


def _take(near: Tensor) -> Take:
    """`Scratch.take` by the allocator of `near`'s device."""

    def take(shape: tuple[int, ...], dtype: torch.dtype, what: str = "") -> Tensor:
        return torch.empty(shape, dtype=dtype, device=near.device)

    return take
