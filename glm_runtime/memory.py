"""Bytes of one token in the KV pool, and how many tokens the machine's memory holds.

    token = layers * latent_row + full_layers * index_row        (bytes)

    latent_row  float32 2,304   bfloat16 1,152   fp8 packed 656       (512 latent + 64 RoPE)
    index_row   float32   512   bfloat16   256   fp8 page share 132   (128 key values, + fp32 scale for fp8)

Only layers with an indexer of their own ("full") keep index keys. Source: the layouts of `attention/layouts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INDEX_HEAD_DIM = 128
PAGE = 64
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def latent_row_bytes(kind: str, kv_lora_rank: int = 512, rope_dim: int = 64) -> int:
    """Bytes of one token's latent row; `kind` is a float dtype name or "fp8_e4m3" (packed)."""
    if kind == "fp8_e4m3":
        return kv_lora_rank + kv_lora_rank // 128 * 4 + rope_dim * 2
    return (kv_lora_rank + rope_dim) * ELEMENT_BYTES[kind]


def index_row_bytes(kind: str, head_dim: int = INDEX_HEAD_DIM) -> int:
    """Bytes of one token's index key in one full layer."""
    if kind == "fp8_e4m3":
        return head_dim + 4
    return head_dim * ELEMENT_BYTES[kind]


def full_layers(config: Mapping[str, Any]) -> int:
    """Layers of the main model that own an indexer: `indexer_types`, else all."""
    types = config.get("indexer_types")
    layers = int(config["num_hidden_layers"])
    return layers if types is None else sum(t == "full" for t in types[:layers])


def token_bytes(config: Mapping[str, Any], kind: str) -> int:
    """Bytes that one token takes in the whole pool of one rank (the latent is replicated over TP ranks)."""
    latent = latent_row_bytes(kind, int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"]))
    index = index_row_bytes(kind, int(config["index_head_dim"]))
    return int(config["num_hidden_layers"]) * latent + full_layers(config) * index


def pool_tokens(free_bytes: int, config: Mapping[str, Any], kind: str) -> int:
    """Tokens, whole pages, that `free_bytes` hold, one page being reserved for padding."""
    return max(0, free_bytes // token_bytes(config, kind) // PAGE - 1) * PAGE
