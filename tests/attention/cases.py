"""Random batches over caches whose unused bytes are poison: NaN in plain kinds, 0xFF in fp8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.batch import AttentionBatch
from attention.layouts import IndexCache, LatentCache, store_index, store_latent
from attention.sizes import INDEX_PAGE_BYTES, LATENT_DIM, NOPE_DIM, PACKED_BYTES, PAGE_SIZE

INDEX_KINDS = ("float32", "bfloat16", "fp8")
LATENT_KINDS = ("float32", "bfloat16", "fp8_packed")


@dataclass
class Case:
    """One batch with its caches and per-row inputs; rows of request r are those of ``batch``."""

    batch: AttentionBatch
    index: IndexCache
    latent: LatentCache
    q: Tensor
    head_weights: Tensor
    q_nope: Tensor
    q_rope: Tensor


def poisoned_index(kind: str, pages: int, dim: int = 128) -> IndexCache:
    if kind == "fp8":
        return IndexCache(torch.full((pages, INDEX_PAGE_BYTES), 0xFF, dtype=torch.uint8), kind)
    return IndexCache(torch.full((pages * PAGE_SIZE, dim), float("nan"), dtype=getattr(torch, kind)), kind)


def poisoned_latent(kind: str, pages: int) -> LatentCache:
    if kind == "fp8_packed":
        return LatentCache(torch.full((pages * PAGE_SIZE, PACKED_BYTES), 0xFF, dtype=torch.uint8), kind)
    return LatentCache(torch.full((pages * PAGE_SIZE, LATENT_DIM), float("nan"), dtype=getattr(torch, kind)), kind)


def make(
    requests: list[tuple[int, int]],
    kind: str = "float32",
    dtype: torch.dtype = torch.float32,
    index_heads: int = 4,
    heads: int = 4,
    seed: int = 0,
    spare_pages: int = 2,
) -> Case:
    """A case of (query rows, context length) requests; ``kind`` float32, bfloat16 or fp8 names both caches."""
    rng = torch.Generator().manual_seed(seed)
    needed = [-(-length // PAGE_SIZE) for _, length in requests]
    pages = sum(needed) + spare_pages
    order = torch.randperm(pages, generator=rng).to(torch.int32)
    table = torch.full((len(requests), max([*needed, 1])), -7, dtype=torch.int32)
    at = 0
    for r, count in enumerate(needed):
        table[r, :count] = order[at : at + count]
        at += count
    starts = torch.tensor([0, *[rows for rows, _ in requests]]).cumsum(0).to(torch.int32)
    batch = AttentionBatch(starts, torch.tensor([n for _, n in requests], dtype=torch.int32), table)
    index = poisoned_index(kind, pages)
    latent = poisoned_latent("fp8_packed" if kind == "fp8" else kind, pages)
    for r in range(len(requests)):
        slots = batch.context_slots(r)
        n = slots.shape[0]
        store_index(index, slots, torch.randn((n, 128), generator=rng))
        store_latent(
            latent,
            slots,
            torch.randn((n, NOPE_DIM), generator=rng),
            torch.randn((n, LATENT_DIM - NOPE_DIM), generator=rng),
        )
    n = batch.rows
    return Case(
        batch=batch,
        index=index,
        latent=latent,
        q=torch.randn((n, index_heads, 128), generator=rng).to(dtype),
        head_weights=torch.randn((n, index_heads), generator=rng),
        q_nope=torch.randn((n, heads, NOPE_DIM), generator=rng).to(dtype),
        q_rope=torch.randn((n, heads, LATENT_DIM - NOPE_DIM), generator=rng).to(dtype),
    )


def part(case: Case, request: int, first: int, stop: int) -> Case:
    """The same request alone, only query rows ``first`` to ``stop`` of it, as one chunk of its prompt."""
    start = int(case.batch.query_start[request])
    rows = int(case.batch.query_start[request + 1]) - start
    rows_at = slice(start + first, start + stop)
    length = int(case.batch.seq_lens[request]) - (rows - stop)
    return Case(
        batch=AttentionBatch(
            torch.tensor([0, stop - first], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            case.batch.page_table[request : request + 1],
        ),
        index=case.index,
        latent=case.latent,
        q=case.q[rows_at],
        head_weights=case.head_weights[rows_at],
        q_nope=case.q_nope[rows_at],
        q_rope=case.q_rope[rows_at],
    )
