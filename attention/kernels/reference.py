"""The plain torch expression of each kernel: no tiles, no tricks. Tests and benchmarks measure against it.

scores = einsum("mhd,sd->mhs", q, k).relu() * w  summed over h, times the key's scale
ids    = stable descending sort of the visible scores, first topk, ascending
out    = softmax(q latent^T * scale) latent[:, :512]
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.batch import AttentionBatch
from attention.layouts import INDEX_AMAX_FLOOR, IndexCache, LatentCache, load_index, load_latent, quantise
from attention.scratch import Scratch
from attention.sizes import NOPE_DIM, PAGE_SIZE


def scores(q: Tensor, head_weights: Tensor, keys: Tensor, key_scale: Tensor | None = None) -> Tensor:
    """Index scores float32 [m, s] of q [m, H, d], head weights [m, H], keys [s, d] and key scales [s]; no mask."""
    dots = torch.einsum("mhd,sd->mhs", q.float(), keys.float())
    total = (dots.relu() * head_weights.unsqueeze(-1)).sum(1)
    return total if key_scale is None else total * key_scale


def best(row: Tensor, topk: int) -> Tensor:
    """Positions of the ``topk`` largest of row [s], ascending, int32; ties to the lowest position."""
    order = torch.sort(row, descending=True, stable=True).indices[:topk]
    return order.sort().values.to(torch.int32)


def select(
    batch: AttentionBatch,
    q: Tensor,
    head_weights: Tensor,
    cache: IndexCache,
    topk: int,
    scratch: Scratch,
    out: Tensor,
) -> None:
    """Fill out int32 [n, topk]. Rows are scored in cuts of what heads x context float32 leaves room for."""
    out.fill_(-1)
    if cache.kind == "fp8":
        values, scale = quantise(q, INDEX_AMAX_FLOOR)
        q, head_weights = values.float(), head_weights * scale
    for r in range(batch.requests):
        first, last, length = int(batch.query_start[r]), int(batch.query_start[r + 1]), int(batch.seq_lens[r])
        if first == last:
            continue
        keys, key_scale = load_index(cache, batch.context_slots(r))
        step = max(1, scratch.nbytes // (4 * length * q.shape[1]))
        for at in range(first, last, step):
            stop = min(at + step, last)
            block = scores(q[at:stop], head_weights[at:stop], keys, key_scale)
            for i in range(at, stop):
                seen = length - (last - i) + 1
                found = best(block[i - at, :seen], topk)
                out[i, : found.shape[0]] = found


def gather(cache: LatentCache, slots: Tensor, out: Tensor) -> None:
    """Fill out [n, 576] with the rows at slots [n], in out's type."""
    out.copy_(load_latent(cache, slots, out.dtype))


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
    """Fill out [n, heads, 512] and lse [n, heads], one row at a time, in float32."""
    out.zero_()
    lse.fill_(float("-inf"))
    owners = range(ids.shape[0]) if batch is None else batch.row_requests().tolist()
    for i, r in enumerate(owners):
        picked = ids[i][ids[i] >= 0].long()
        if picked.numel() == 0:
            continue
        if batch is not None:
            picked = batch.page_table[r].long()[picked // PAGE_SIZE] * PAGE_SIZE + picked % PAGE_SIZE
        kept = q_nope.dtype if cache.kind.startswith("fp8") else torch.float32
        latent = load_latent(cache, picked, kept).float()
        logits = torch.cat([q_nope[i], q_rope[i]], dim=-1).float() @ latent.T * scale
        lse[i] = logits.logsumexp(-1)
        out[i] = (logits.softmax(-1) @ latent[:, :NOPE_DIM]).to(out.dtype)
