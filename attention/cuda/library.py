"""The device calls by the libraries that SGLang brings along; our Triton kernels for what the choice leaves to them.

    scores         DeepGEMM fp8_mqa_logits, compressed: key j of row i at column j - ks[i]
    page_scores    DeepGEMM fp8_paged_mqa_logits, at most one row a multiprocessor at once (its limit on 10.x)
    topk           SGLang's DSATopKBackend: sgl-kernel, FlashInfer or torch
    attend_rows    FlashMLA flash_mla_sparse_fwd
    attend_pages   FlashMLA flash_mla_with_kvcache over packed rows

Heads below 32 are padded for DeepGEMM by SGLang's own function; with more, DeepGEMM's calls need no SGLang. Each call
has the arguments that SGLang's backend gives it; `glm_runtime.symbols_gpu` checks the signatures before launch. Not yet
run on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attention.cuda.choice import Choice
from attention.cuda.triton_calls import TritonCalls
from attention.kernels import triton_remap
from attention.layouts import IndexCache, LatentCache
from attention.sizes import INDEX_PAGE_BYTES, NOPE_DIM, PACKED_BYTES, PAGE_SIZE

INDEX_TOKEN_BYTES = INDEX_PAGE_BYTES // PAGE_SIZE
DEEPGEMM_HEADS = 32
LN_2 = math.log(2)
"""The sums of FlashMLA's prefill kernel, as SGLang calls it, are in base 2; those of its decode kernel are natural."""


def _padded(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """At least `DEEPGEMM_HEADS` index heads, those behind with weight 0."""
    if q.shape[1] >= DEEPGEMM_HEADS:
        return q, weights
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    q, weights, _ = Indexer._pad_heads_for_deep_gemm(q, weights)
    return q, weights


class LibraryCalls(TritonCalls):
    """See `attention.cuda.calls.Calls`.

    Args:
        choice: which calls are whose.
        topk_backend: SGLang's DSATopKBackend; not read where the choice says Triton.
    """

    def __init__(self, choice: Choice, topk_backend: Any) -> None:
        self.choice, self.topk_backend = choice, topk_backend
        self.allocates_scores = choice.score == "DeepGEMM"
        self.head_multiple = choice.head_multiple
        self._schedule: tuple[Tensor, Any, Any] | None = None

    def scores(
        self, q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, ks: Tensor, ke: Tensor, width: int, room: Tensor
    ) -> Tensor:
        if self.choice.score != "DeepGEMM":
            return super().scores(q, weights, keys, scales, ks, ke, width, room)
        import deep_gemm

        q, weights = _padded(q, weights)
        if scales.data_ptr() % 16:  # a key slice that starts off the alignment of its copies
            scales = scales.clone()
        found: Tensor = deep_gemm.fp8_mqa_logits(
            q, (keys, scales), weights, ks, ke, clean_logits=False, max_seqlen_k=width
        )
        return found[:, :width]

    def page_scores(
        self, q: Tensor, weights: Tensor, cache: IndexCache, pages: Tensor, seen: Tensor, width: int, room: Tensor
    ) -> Tensor:
        if self.choice.score != "DeepGEMM":
            return super().page_scores(q, weights, cache, pages, seen, width, room)
        import deep_gemm

        processors = deep_gemm.get_num_sms()
        keys = cache.buffer.view(-1, PAGE_SIZE, 1, INDEX_TOKEN_BYTES)
        q, weights = _padded(q, weights)
        parts = []
        for first in range(0, q.shape[0], processors):
            rows = slice(first, first + processors)
            lengths = seen[rows].contiguous().view(-1, 1)
            schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE_SIZE, processors)
            parts.append(
                deep_gemm.fp8_paged_mqa_logits(
                    q[rows].unsqueeze(1),
                    keys,
                    weights[rows],
                    lengths,
                    pages[rows],
                    schedule,
                    pages.shape[1] * PAGE_SIZE,
                    clean_logits=False,
                )
            )
        found: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found[:, :width]

    def topk(self, scores: Tensor, lengths: Tensor, out: Tensor) -> None:
        if self.choice.topk == "Triton":
            super().topk(scores, lengths, out)
            return
        k = out.shape[1]
        out.copy_(self.topk_backend.topk_func(scores, lengths, k, row_starts=None))
        if self.choice.topk != "sgl-kernel":
            # NOTE: these put the -1 of a row with fewer than k keys anywhere; FlashMLA reads the first ids only.
            columns = torch.arange(k, dtype=torch.int32, device=out.device)
            seen = lengths.unsqueeze(1)
            every = torch.where(columns < seen, columns, columns.new_tensor(-1))
            out.copy_(torch.where(seen <= k, every, out))

    def attend_rows(self, q: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if self.choice.attend != "FlashMLA":
            return super().attend_rows(q, rows, ids, counts, scale)
        from sglang.kernels.ops.attention.flash_mla_interface import flash_mla_sparse_fwd

        out, _, lse = flash_mla_sparse_fwd(
            q=q,
            kv=rows.unsqueeze(1),
            indices=ids.unsqueeze(1),
            sm_scale=scale,
            d_v=NOPE_DIM,
            topk_length=counts,
        )
        return out, lse * LN_2

    def attend_pages(
        self, q: Tensor, cache: LatentCache, pages: Tensor, owner: Tensor, ids: Tensor, counts: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        if self.choice.pages != "FlashMLA":
            return super().attend_pages(q, cache, pages, owner, ids, counts, scale)
        from sglang.kernels.ops.attention.flash_mla_interface import flash_mla_with_kvcache

        slots, count = torch.empty_like(ids), torch.empty_like(counts)
        triton_remap.remap(ids, owner, None, pages, PAGE_SIZE, PAGE_SIZE, None, 0, slots, count)
        schedule, splits = self._scheduled(counts, q.shape[1], ids.shape[1])
        out, lse = flash_mla_with_kvcache(
            q=q.unsqueeze(1),
            k_cache=cache.buffer.view(torch.float8_e4m3fn).view(-1, PAGE_SIZE, 1, PACKED_BYTES),
            block_table=torch.empty((q.shape[0], 0), dtype=torch.int32, device=q.device),
            cache_seqlens=counts,
            head_dim_v=NOPE_DIM,
            tile_scheduler_metadata=schedule,
            num_splits=splits,
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=slots.unsqueeze(1),
            kv_format="V32",
        )
        return out.squeeze(1), lse.squeeze(-1)

    def _scheduled(self, counts: Tensor, heads: int, topk: int) -> tuple[Any, Any]:
        """FlashMLA's split schedule of these rows, made once a step: `counts` is the same tensor in every layer."""
        from sglang.kernels.ops.attention.flash_mla_interface import get_mla_metadata

        if self._schedule is None or self._schedule[0] is not counts:
            schedule, splits = get_mla_metadata(
                cache_seqlens=counts,
                num_q_tokens_per_head_k=heads,
                num_heads_k=1,
                num_heads_q=heads,
                is_fp8_kvcache=True,
                topk=topk,
            )
            self._schedule = (counts, schedule, splits)
        return self._schedule[1], self._schedule[2]
