"""Start-up check of decode context parallel: attention over the ranks' shares must equal attention over one cache.

    lengths 8, 118, 205, 400          every rank makes the same random cache, queries and ids
    one cache of all rows   ──> paged.attend, heads of this rank ──┐
    this rank's share       ──> Shards.attend, a collective call ──┴─> equal within the tolerance, or the launch ends
    this rank's share       ──> Shards.gather, ids rank-major    ──┘

It runs on the ranks, sizes, group and cache layout of the launch, before the first request. Ranks that were told
different sizes would answer nonsense quietly: they are compared first. 118 and 205 are the lengths at which a served
model once answered well and at random (a report on vLLM's decode context parallel).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention import kernels, paged
from attention.batch import AttentionBatch
from attention.layouts import LatentCache, store_latent
from attention.scratch import Scratch
from attention.shards import ShardedCache, Shards
from attention.sizes import LATENT_DIM, NOPE_DIM, PACKED_BYTES, PAGE_SIZE
from attention.topk_remap import WorkspaceRows, remap
from parallel.collectives import all_gather_equal

LENGTHS = (8, 118, 205, 400)
ROWS = (1, 3, 1, 5)  # query rows of each: decodes and chunks
HEADS = 2
IDS = 64
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
SCALE = LATENT_DIM**-0.5


class ShardCheckError(RuntimeError):
    """The shares do not add up to the whole; the text says where."""


@dataclass(frozen=True)
class _Trial:
    batch: AttentionBatch
    whole: LatentCache
    q: Tensor
    ids: Tensor


def run(shards: Shards, kind: str, dtype: torch.dtype) -> None:
    """Raise ShardCheckError where attention over the shares is not attention over the whole; a collective call.

    Args:
        kind: layout of the latent cache. dtype: of the queries, float32 or bfloat16.
    """
    _agree(shards)
    trial = _trial(shards, kind, dtype)
    first = 0 if shards.same_heads else shards.rank * HEADS
    own = trial.q[:, first : first + HEADS]
    q_nope, q_rope = own[..., :NOPE_DIM], own[..., NOPE_DIM:]
    want = paged.attend(trial.batch, q_nope, q_rope, trial.whole, trial.ids, SCALE, Scratch(1 << 20))
    share = _share(trial, shards)
    merged = paged.attend(trial.batch, q_nope, q_rope, share, trial.ids, SCALE, Scratch(1 << 20))
    _compare(trial, shards, "merged by log-sum-exp", merged, want)
    gathered, rows = _gathered(trial, share, dtype)
    read = paged.attend_rows(q_nope, q_rope, gathered, rows, SCALE, Scratch(1 << 20))
    _compare(trial, shards, "gathered rank by rank", read, want)


def _agree(shards: Shards) -> None:
    mine = torch.tensor([shards.size, shards.interleave, shards.page_tokens, shards.rank], dtype=torch.int64)
    told = all_gather_equal(mine, shards.group)
    ranks = told[:, 3].tolist()
    if bool((told[:, :3] != mine[:3]).any()) or ranks != list(range(shards.size)):
        raise ShardCheckError(
            f"decode context parallel: the ranks were told different things (size, interleave, page, rank): "
            f"{told.tolist()}"
        )


def _trial(shards: Shards, kind: str, dtype: torch.dtype) -> _Trial:
    """The same on every rank."""
    rng = torch.Generator().manual_seed(54300)
    step = shards.page_tokens // PAGE_SIZE
    needed = [-(-length // shards.page_tokens) for length in LENGTHS]
    order = torch.randperm(sum(needed) + 1, generator=rng)  # pages of the allocator, each `step` pages of 64
    table = torch.zeros((len(LENGTHS), max(needed) * step), dtype=torch.int32)
    at = 0
    for r, count in enumerate(needed):
        pages = order[at : at + count, None] * step + torch.arange(step)
        table[r, : count * step] = pages.flatten().to(torch.int32)
        at += count
    start = torch.tensor([0, *ROWS]).cumsum(0).to(torch.int32)
    batch = AttentionBatch(start, torch.tensor(LENGTHS, dtype=torch.int32), table)
    slots = (sum(needed) + 1) * shards.page_tokens
    whole = _empty(kind, slots)
    values = torch.randn((slots, LATENT_DIM), generator=rng)
    store_latent(whole, torch.arange(slots), values[:, :NOPE_DIM], values[:, NOPE_DIM:])
    q = torch.randn((batch.rows, shards.size * HEADS, LATENT_DIM), generator=rng).to(dtype)
    ids = torch.full((batch.rows, IDS), -1, dtype=torch.int32)
    for row, position in enumerate(batch.row_positions().tolist()):
        picked = torch.randperm(position + 1, generator=rng)[:IDS].sort().values
        ids[row, : picked.numel()] = picked.to(torch.int32)
    return _Trial(batch, whole, q, ids)


def _empty(kind: str, rows: int) -> LatentCache:
    if kind == "fp8_packed":
        return LatentCache(torch.zeros((rows, PACKED_BYTES), dtype=torch.uint8), kind)
    return LatentCache(torch.zeros((rows, LATENT_DIM), dtype=getattr(torch, kind)), kind)


def _share(trial: _Trial, shards: Shards) -> ShardedCache:
    """This rank's rows of the whole."""
    empty = _empty(trial.whole.kind, trial.whole.slots // shards.size)
    which, rows = shards.owned(torch.arange(trial.whole.slots))
    empty.buffer.index_copy_(0, rows, trial.whole.buffer.index_select(0, which))
    return ShardedCache(empty.buffer, empty.kind, shards=shards)


def _gathered(trial: _Trial, share: ShardedCache, dtype: torch.dtype) -> tuple[LatentCache, Tensor]:
    """(workspace of all ranks' rows, its rows of the trial's ids)."""
    shards, batch = share.shards, trial.batch
    slots = [shards.context_rows(batch, r) for r in range(batch.requests)]
    starts = np.cumsum([0, *[len(part) for part in slots[:-1]]])
    stride = sum(len(part) for part in slots)
    kept = torch.bfloat16 if dtype == torch.bfloat16 and share.kind != "float32" else torch.float32
    own = torch.empty((stride, LATENT_DIM), dtype=kept)
    kernels.active().gather(share, torch.cat(slots), own)
    out = torch.empty((stride * shards.size, LATENT_DIM), dtype=kept)
    shards.gather(own, out)
    owner = batch.row_requests().numpy().astype(np.int32)
    pages, places = shards.pages(batch.page_table), WorkspaceRows(starts, stride)
    rows, _ = remap(trial.ids.numpy(), owner, owner, pages, places, shards.placement)
    return LatentCache(out, str(kept).removeprefix("torch.")), torch.from_numpy(rows)


def _compare(trial: _Trial, shards: Shards, what: str, found: Tensor, want: Tensor) -> None:
    far = (found.float() - want.float()).abs().amax(dim=(1, 2))
    far = torch.where(far.isnan(), torch.inf, far)
    worst = int(far.argmax())
    if float(far[worst]) > TOLERANCE[want.dtype]:
        length = LENGTHS[int(trial.batch.row_requests()[worst])]
        raise ShardCheckError(
            f"decode context parallel: keys {what} on rank {shards.rank} of {shards.size} (interleave "
            f"{shards.interleave}) differ from one cache by {float(far[worst]):.3g} in a context of {length} tokens; "
            "set --decode-context-parallel-size 1"
        )
