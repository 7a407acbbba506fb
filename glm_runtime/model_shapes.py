"""Weights that a GLM-MoE-DSA checkpoint must hold, with their shapes, from its config.json. Pure.

    layer      input_layernorm, post_attention_layernorm                                [hidden]
      attention  q_a [q_lora, hidden]   q_b [heads (nope + rope), q_lora]   kv_a [kv_lora + rope, hidden]
                 kv_b [heads (nope + v), kv_lora]   o [hidden, heads v]
      indexer    wq_b [index_heads index_dim, q_lora]   wk [index_dim, hidden]   weights_proj [index_heads, hidden]
      dense      gate, up [intermediate, hidden]   down [hidden, intermediate]
      MoE        gate [experts, hidden], each expert as dense with moe_intermediate

SGLang's loader leaves a missing weight as it was allocated and narrows a wider expert without a word; the model then
answers nonsense. The NextN layer behind the last one is not asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Shape = tuple[int, ...]
FLOATS = ("F32", "BF16", "F16")


def is_dense(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer's MLP is dense: mlp_layer_types where given, else the first first_k_dense_replace layers."""
    types = config.get("mlp_layer_types")
    if types is not None:
        return bool(types[layer] == "dense")
    return layer < int(config.get("first_k_dense_replace", 0))


def _mlp(prefix: str, inner: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _layer(config: Mapping[str, Any], layer: int) -> Iterator[tuple[str, Shape]]:
    name = f"model.layers.{layer}"
    hidden, heads, rank = int(config["hidden_size"]), int(config["num_attention_heads"]), int(config["q_lora_rank"])
    nope, rope, value = (int(config[key]) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    latent = int(config["kv_lora_rank"])
    yield f"{name}.input_layernorm.weight", (hidden,)
    yield f"{name}.post_attention_layernorm.weight", (hidden,)
    yield f"{name}.self_attn.q_a_proj.weight", (rank, hidden)
    yield f"{name}.self_attn.q_b_proj.weight", (heads * (nope + rope), rank)
    yield f"{name}.self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield f"{name}.self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
    yield f"{name}.self_attn.o_proj.weight", (hidden, heads * value)
    types = config.get("indexer_types")
    if types is not None and types[layer] == "full":
        index_heads, index_dim = int(config["index_n_heads"]), int(config["index_head_dim"])
        yield f"{name}.self_attn.indexer.wq_b.weight", (index_heads * index_dim, rank)
        yield f"{name}.self_attn.indexer.wk.weight", (index_dim, hidden)
        yield f"{name}.self_attn.indexer.weights_proj.weight", (index_heads, hidden)
    if is_dense(config, layer):
        yield from _mlp(f"{name}.mlp", int(config["intermediate_size"]), hidden)
        return
    experts = int(config["n_routed_experts"])
    yield f"{name}.mlp.gate.weight", (experts, hidden)
    for expert in range(experts):
        yield from _mlp(f"{name}.mlp.experts.{expert}", int(config["moe_intermediate_size"]), hidden)


def expected(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every weight that must be there.

    Raises KeyError, IndexError, TypeError or ValueError where the config lacks what a layer needs.
    """
    hidden, vocabulary = int(config["hidden_size"]), int(config["vocab_size"])
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (vocabulary, hidden)
    for layer in range(int(config["num_hidden_layers"])):
        yield from _layer(config, layer)


def mismatch(config: Mapping[str, Any], found: Mapping[str, tuple[str, Shape]]) -> str | None:
    """What is wrong with the weights, as the end of a sentence; None where all fits.

    Args:
        found: name -> (safetensors dtype, shape). Shapes of quantised tensors are packed, and are not compared.
    """
    try:
        wanted = list(expected(config))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return f"config.json does not describe the layers ({type(error).__name__}: {error})"
    missing = [name for name, _ in wanted if name not in found]
    if missing:
        return f"{missing[0]} is missing ({len(missing)} of {len(wanted)} weights)"
    for name, shape in wanted:
        dtype, has = found[name]
        if dtype in FLOATS and has != shape:
            return f"{name} has shape {list(has)}, config.json tells of {list(shape)}"
    return None
