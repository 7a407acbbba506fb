"""Bytes of one token in the KV pool, and how many tokens the machine's memory holds.

    token = layers * latent_row + full_layers * index_row        (bytes)

    latent_row  float32 2,304   bfloat16 1,152   fp8 packed 656       (512 latent + 64 RoPE)
    index_row   float32   512   bfloat16   256   fp8 page share 132   (128 key values, + fp32 scale for fp8)

Only layers with an indexer of their own ("full") keep index keys. Source: the layouts of `attention/layouts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention.sizes import INDEX_DIM, INDEX_PAGE_BYTES, LATENT_DIM, NOPE_DIM, PACKED_BYTES, PAGE_SIZE, ROPE_DIM

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
KINDS = (*ELEMENT_BYTES, "fp8_e4m3")
WIDTHS = {"kv_lora_rank": NOPE_DIM, "qk_rope_head_dim": ROPE_DIM, "index_head_dim": INDEX_DIM}


def latent_row_bytes(kind: str) -> int:
    """Bytes of one token's latent row in one layer; `kind` is one of KINDS."""
    return PACKED_BYTES if kind == "fp8_e4m3" else LATENT_DIM * ELEMENT_BYTES[kind]


def index_row_bytes(kind: str) -> int:
    """Bytes of one token's index key in one full layer: a token's share of an fp8 page, or a plain row."""
    return INDEX_PAGE_BYTES // PAGE_SIZE if kind == "fp8_e4m3" else INDEX_DIM * ELEMENT_BYTES[kind]


def odd_width(config: Mapping[str, Any]) -> str | None:
    """The first width in the model's config that the cache rows are not laid out for; None if all fit."""
    for key, width in WIDTHS.items():
        if int(config.get(key, width)) != width:
            return f"{key} is {config[key]}, the cache rows are laid out for {width}"
    return None


def full_layers(config: Mapping[str, Any]) -> int:
    """Layers of the main model that own an indexer: `indexer_types`, else all."""
    types = config.get("indexer_types")
    layers = int(config["num_hidden_layers"])
    return layers if types is None else sum(t == "full" for t in types[:layers])


def token_bytes(config: Mapping[str, Any], kind: str, shards: int = 1) -> int:
    """Bytes that one token takes in the whole pool of one rank.

    Tensor-parallel ranks hold the same latent rows; under decode context parallel `shards` of them share one copy, so
    that a rank has 1/shards of the rows. Index keys are whole on every rank.
    """
    latent = int(config["num_hidden_layers"]) * latent_row_bytes(kind)
    return -(-latent // shards) + full_layers(config) * index_row_bytes(kind)


def pool_tokens(
    free_bytes: int, config: Mapping[str, Any], kind: str, shards: int = 1, page_size: int = PAGE_SIZE
) -> int:
    """Tokens, whole pages, that `free_bytes` hold, one page being reserved for padding."""
    return max(0, free_bytes // token_bytes(config, kind, shards) // page_size - 1) * page_size
