"""The tensors of a checkpoint, in published names and layout (one tensor per expert and projection)."""

from collections.abc import Iterator

import numpy as np

from glm_runtime.model import config, rng, tokenizer
from glm_runtime.model.recipe import Recipe
from glm_runtime.model.rng import F32

Named = Iterator[tuple[str, F32]]


def _noise(recipe: Recipe, name: str, rows: int, cols: int, gain: float = 1.0) -> F32:
    """Dense random map [rows, cols] that keeps the size of a unit-variance input, times `gain`."""
    return rng.normal(recipe.seed, name, (rows, cols), gain * cols**-0.5)


def _ones(count: int) -> F32:
    return np.ones(count, dtype=np.float32)


def _attention(recipe: Recipe, prefix: str) -> Named:
    r = recipe
    yield f"{prefix}.q_a_proj.weight", _noise(r, f"{prefix}.q_a", r.q_lora, r.hidden)
    yield f"{prefix}.q_a_layernorm.weight", _ones(r.q_lora)
    yield f"{prefix}.q_b_proj.weight", _noise(r, f"{prefix}.q_b", r.heads * (r.nope_dim + r.rope_dim), r.q_lora, 1.5)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", _noise(r, f"{prefix}.kv_a", r.kv_lora + r.rope_dim, r.hidden, 1.5)
    yield f"{prefix}.kv_a_layernorm.weight", _ones(r.kv_lora)
    yield f"{prefix}.kv_b_proj.weight", _noise(r, f"{prefix}.kv_b", r.heads * (r.nope_dim + r.v_dim), r.kv_lora, 1.5)
    yield f"{prefix}.o_proj.weight", _noise(r, f"{prefix}.o", r.hidden, r.heads * r.v_dim, 1.5)


def _indexer(recipe: Recipe, prefix: str) -> Named:
    r = recipe
    yield f"{prefix}.wq_b.weight", _noise(r, f"{prefix}.wq_b", r.index_heads * r.index_dim, r.q_lora)
    yield f"{prefix}.wk.weight", rng.bf16_exact(_noise(r, f"{prefix}.wk", r.index_dim, r.hidden))
    yield f"{prefix}.k_norm.weight", _ones(r.index_dim)
    yield f"{prefix}.k_norm.bias", rng.normal(r.seed, f"{prefix}.k_bias", (r.index_dim,), 0.1)
    # NOTE: SGLang builds weights_proj in bfloat16 whatever the checkpoint holds, so it must survive that exactly.
    yield f"{prefix}.weights_proj.weight", rng.bf16_exact(_noise(r, f"{prefix}.w", r.index_heads, r.hidden))


def _mlp(recipe: Recipe, prefix: str, inter: int) -> Named:
    yield f"{prefix}.gate_proj.weight", _noise(recipe, f"{prefix}.gate", inter, recipe.hidden)
    yield f"{prefix}.up_proj.weight", _noise(recipe, f"{prefix}.up", inter, recipe.hidden)
    yield f"{prefix}.down_proj.weight", _noise(recipe, f"{prefix}.down", recipe.hidden, inter)


def _moe(recipe: Recipe, prefix: str) -> Named:
    # NOTE: SGLang rounds the router to bfloat16 off CUDA unless config.router_fp32 holds.
    gate = rng.bf16_exact(_noise(recipe, f"{prefix}.router", recipe.experts, recipe.hidden, 4.0))
    yield f"{prefix}.gate.weight", gate
    yield (
        f"{prefix}.gate.e_score_correction_bias",
        rng.normal(recipe.seed, f"{prefix}.bias", (recipe.experts,), 0.05),
    )
    for expert in range(recipe.experts):
        yield from _mlp(recipe, f"{prefix}.experts.{expert}", recipe.moe_inter)
    yield from _mlp(recipe, f"{prefix}.shared_experts", recipe.moe_inter)


def _layer(recipe: Recipe, layer: int, full: bool, dense: bool) -> Named:
    prefix = f"model.layers.{layer}"
    yield f"{prefix}.input_layernorm.weight", _ones(recipe.hidden)
    yield f"{prefix}.post_attention_layernorm.weight", _ones(recipe.hidden)
    yield from _attention(recipe, f"{prefix}.self_attn")
    if full:
        yield from _indexer(recipe, f"{prefix}.self_attn.indexer")
    if dense:
        yield from _mlp(recipe, f"{prefix}.mlp", recipe.dense_inter)
    else:
        yield from _moe(recipe, f"{prefix}.mlp")


def _nextn(recipe: Recipe, layer: int) -> Named:
    """The multi-token-prediction layer, stored as layer number `layers`; its indexer is always full."""
    prefix = f"model.layers.{layer}"
    yield f"{prefix}.enorm.weight", _ones(recipe.hidden)
    yield f"{prefix}.hnorm.weight", _ones(recipe.hidden)
    yield f"{prefix}.eh_proj.weight", _noise(recipe, f"{prefix}.eh", recipe.hidden, 2 * recipe.hidden)
    yield from _layer(recipe, layer, full=True, dense=False)
    yield f"{prefix}.shared_head.norm.weight", _ones(recipe.hidden)


def tensors(recipe: Recipe) -> Named:
    """All tensors of the checkpoint as (name, float32 array), in file order."""
    embed = rng.normal(recipe.seed, "embed", (tokenizer.VOCAB_SIZE, recipe.hidden))
    head = rng.normal(recipe.seed, "head", (tokenizer.VOCAB_SIZE, recipe.hidden), 4.0 * recipe.hidden**-0.5)
    yield "model.embed_tokens.weight", embed
    for layer in range(recipe.layers):
        yield from _layer(recipe, layer, config.is_full(layer), layer < config.DENSE_LAYERS)
    yield "model.norm.weight", _ones(recipe.hidden)
    yield "lm_head.weight", head
    yield from _nextn(recipe, recipe.layers)
