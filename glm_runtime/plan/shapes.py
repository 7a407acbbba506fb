"""Shapes of the models that can be planned: GLM-5 to 5.3 by name, any config.json by path, the embedded presets.

| model        | positions | layers with an indexer of their own     |
|--------------|-----------|-----------------------------------------|
| GLM-5, 5.1   |   202,752 | all 78                                  |
| GLM-5.2, 5.3 | 1,048,576 | 21 of 78: 0, 1, 2, 6, 10, ... 74        |

All else is equal: hidden 6144, 64 heads, 256 experts of which 8 run, 744e9 parameters.
Source: transformers 5.19 `GlmMoeDsaConfig` for GLM-5; the published GLM-5.2 config adds index_topk_freq 4 and
index_skip_topk_offset 3; prefill facts, section 8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from glm_runtime import memory
from glm_runtime.model_shapes import expected, is_dense

_GLM5: Mapping[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "first_k_dense_replace": 3,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "max_position_embeddings": 202752,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_LONG: Mapping[str, Any] = {"max_position_embeddings": 1048576, "index_topk_freq": 4, "index_skip_topk_offset": 3}
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "glm-5": _GLM5,
    "glm-5.1": _GLM5,
    "glm-5.2": {**_GLM5, **_LONG},
    "glm-5.3": {**_GLM5, **_LONG},
}

# Weights by what cuts them: over the attention's TP ranks, over the ranks that share the experts, or not at all.
_PARTS: tuple[tuple[str, str], ...] = (
    (".indexer.", "indexer"),
    (".q_a_proj.", "latent"),
    (".kv_a_proj_with_mqa.", "latent"),
    (".self_attn.", "heads"),
    (".mlp.gate.", "router"),
    (".mlp.experts.", "experts"),
    (".mlp.", "dense"),
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
)


class PlanError(ValueError):
    """What cannot be planned; one line naming the flag."""


def indexer_types(config: Mapping[str, Any]) -> list[str]:
    """ "full" or "shared" for every layer: indexer_types, else index_topk_pattern, else frequency and offset."""
    layers = int(config["num_hidden_layers"])
    types = config.get("indexer_types")
    if types is None and (pattern := config.get("index_topk_pattern")) is not None:
        types = ["shared" if letter in ("S", "shared") else "full" for letter in pattern]
    if types is None:
        every = max(int(config.get("index_topk_freq") or 1), 1)
        offset = int(config.get("index_skip_topk_offset", 2))
        types = ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(layers)]
    if len(types) < layers:
        raise PlanError(f"--model: indexer_types names {len(types)} of {layers} layers")
    return list(types[:layers])


@dataclass(frozen=True)
class Model:
    """A model's config with `indexer_types` filled in, and what follows from it."""

    name: str
    config: Mapping[str, Any] = field(repr=False)

    def __getitem__(self, key: str) -> int:
        """A whole number of the config."""
        return int(self.config[key])

    @property
    def layers(self) -> int:
        """Decoder layers; the NextN layer behind them is not counted."""
        return self["num_hidden_layers"]

    @property
    def full_layers(self) -> int:
        """Layers with an indexer of their own."""
        return memory.full_layers(self.config)

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return sum(not is_dense(self.config, layer) for layer in range(self.layers))

    @property
    def latent_values(self) -> int:
        """Values of one cached token and layer: latent and RoPE part."""
        return self["kv_lora_rank"] + self["qk_rope_head_dim"]

    @cached_property
    def parameters(self) -> Mapping[str, int]:
        """Parameters by part: indexer, latent, heads, router, experts, shared, dense, embedding, head, norms."""
        counts: dict[str, int] = {}
        for name, shape in expected(self.config):
            part = next((part for mark, part in _PARTS if mark in name), "norms")
            size = 1
            for side in shape:
                size *= side
            counts[part] = counts.get(part, 0) + size
        shared = int(self.config.get("n_shared_experts") or 0)
        counts["shared"] = 3 * self["hidden_size"] * self["moe_intermediate_size"] * shared * self.moe_layers
        return counts

    @property
    def total_parameters(self) -> int:
        """All of them."""
        return sum(self.parameters.values())

    @property
    def expert_parameters(self) -> int:
        """Of one routed expert in one layer."""
        return 3 * self["hidden_size"] * self["moe_intermediate_size"]


def model(name: str) -> Model:
    """A model by name, preset or path of a config.json (or of the folder with it). PlanError where there is none."""
    known = KNOWN.get(name.lower())
    if known is not None:
        return Model(name.lower(), {**known, "indexer_types": indexer_types(known)})
    from glm_runtime.model.config import model_config
    from glm_runtime.model.recipe import PRESETS

    if name in PRESETS:
        config = model_config(PRESETS[name])
        return Model(name, {**config, "indexer_types": indexer_types(config)})
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        names = ", ".join([*KNOWN, *PRESETS])
        raise PlanError(f"--model {name}: no such file, and no known model ({names})")
    try:
        config = json.loads(path.read_text())
        filled = {**config, "indexer_types": indexer_types(config)}
        found = Model(path.parent.name or name, filled)
        if found.total_parameters < 1 or found["index_topk"] < 1 or found["max_position_embeddings"] < 1:
            raise ValueError("a size is not above 0")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise PlanError(f"--model {path}: no GLM-MoE-DSA config ({type(error).__name__}: {error})") from None
    return found
