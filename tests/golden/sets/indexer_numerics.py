"""The whole indexer, from hidden states to the selected positions, against transformers in float32."""

from __future__ import annotations

from typing import Any

import torch

from attention.batch import AttentionBatch
from attention.indexer import ragged
from attention.indexer.numerics import IndexerWeights, project
from attention.kernels.reference import scores
from attention.layouts import IndexCache
from attention.scratch import Scratch
from attention.sizes import PAGE_SIZE

TOLERANCE = 2e-5


def check(case: dict[str, Any]) -> str | None:
    cfg = case["cfg"]
    weight = {name: torch.tensor(value) for name, value in case["weights"].items()}
    weights = IndexerWeights(
        wq_b=weight["wq_b.weight"],
        wk=weight["wk.weight"],
        k_norm_weight=weight["k_norm.weight"],
        k_norm_bias=weight["k_norm.bias"],
        weights_proj=weight["weights_proj.weight"],
    )
    q, k, head_weights = project(
        torch.tensor(case["hidden"]),
        torch.tensor(case["q_resid"]),
        torch.tensor(case["positions"]),
        weights,
        cfg["rope_dim"],
        cfg["rope_theta"],
        cfg["ln_eps"],
    )
    if q.shape[1:] != (cfg["n_heads"], cfg["head_dim"]):
        return f"query shape {list(q.shape)}"
    ours = scores(q, head_weights, k)
    for i, row in enumerate(case["scores"]):
        for j, want in enumerate(row):
            if (want is None) != (j > i):
                return f"row {i}: key {j} is masked where it should not be, or the reverse"
            if want is not None and abs(ours[i, j].item() - want) > TOLERANCE * max(1.0, abs(want)):
                return f"row {i}, key {j}: score {ours[i, j].item()} wanted {want}"
    n, topk = k.shape[0], cfg["index_topk"]
    pages = -(-n // PAGE_SIZE)
    cache = IndexCache(torch.full((pages * PAGE_SIZE, k.shape[1]), float("nan")), "float32")
    cache.buffer[:n] = k
    batch = AttentionBatch(
        query_start=torch.tensor([0, n], dtype=torch.int32),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        page_table=torch.arange(pages, dtype=torch.int32).view(1, -1),
    )
    picked = ragged.select(batch, q, head_weights, cache, topk, Scratch(1 << 20))
    for i, want in enumerate(case["topk_sets"]):
        found = [p for p in picked[i].tolist() if p >= 0]
        if found != sorted(want) and not _tied(ours[i], found, want):
            return f"row {i}: ids {found} wanted {sorted(want)}"
    return None


def _tied(row: torch.Tensor, found: list[int], want: list[int]) -> bool:
    """The sets differ only in positions whose scores are equal (to rounding) at the cut; ours are the lower ones."""
    extra, missing = sorted(set(found) - set(want)), sorted(set(want) - set(found))
    if len(extra) != len(missing):
        return False
    return all(abs(float(row[a] - row[b])) <= TOLERANCE and a < b for a, b in zip(extra, missing, strict=True))
