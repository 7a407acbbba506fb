"""config.json and generation_config.json, with every key that transformers, SGLang and vLLM read.

Full and shared indexer layers (offset 3, period 4; prefill-facts section 8):

    layer   0 1 2 3 4 5 6 7 8 9 10
    type    F F F S S S F S S S F       full iff max(layer - 3 + 1, 0) % 4 == 0

transformers and SGLang read `indexer_types`, vLLM the letters in `index_topk_pattern`, others freq and offset.
"""

from typing import Any

from glm_runtime.model import tokenizer
from glm_runtime.model.recipe import Recipe

INDEX_TOPK_FREQ = 4
INDEX_SKIP_TOPK_OFFSET = 3
DENSE_LAYERS = 1
# NOTE: transformers builds the latent norms with the class default 1e-6 whatever the config says, SGLang and vLLM
# pass rms_norm_eps on. Only 1e-6 makes the three compute the same model.
RMS_NORM_EPS = 1e-6
ROPE_THETA = 1_000_000.0


def is_full(layer: int) -> bool:
    """True when `layer` runs its own indexer, False when it reuses the ids of the last full layer."""
    return max(layer - INDEX_SKIP_TOPK_OFFSET + 1, 0) % INDEX_TOPK_FREQ == 0


def model_config(recipe: Recipe) -> dict[str, Any]:
    """The content of config.json."""
    full = [is_full(layer) for layer in range(recipe.layers)]
    dense = min(DENSE_LAYERS, recipe.layers)
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": recipe.dtype,
        "torch_dtype": recipe.dtype,
        "vocab_size": tokenizer.VOCAB_SIZE,
        "hidden_size": recipe.hidden,
        "hidden_act": "silu",
        "intermediate_size": recipe.dense_inter,
        "num_hidden_layers": recipe.layers,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": recipe.context,
        "rms_norm_eps": RMS_NORM_EPS,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        # attention
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.heads,
        "head_dim": recipe.rope_dim,
        "qk_head_dim": recipe.nope_dim + recipe.rope_dim,
        "qk_nope_head_dim": recipe.nope_dim,
        "qk_rope_head_dim": recipe.rope_dim,
        "v_head_dim": recipe.v_dim,
        "q_lora_rank": recipe.q_lora,
        "kv_lora_rank": recipe.kv_lora,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "rope_interleave": True,
        # indexer
        "index_n_heads": recipe.index_heads,
        "index_head_dim": recipe.index_dim,
        "index_topk": recipe.index_topk,
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if f else "shared" for f in full],
        "index_topk_pattern": "".join("F" if f else "S" for f in full),
        "index_topk_freq": INDEX_TOPK_FREQ,
        "index_skip_topk_offset": INDEX_SKIP_TOPK_OFFSET,
        # mixture of experts
        "first_k_dense_replace": dense,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (recipe.layers - dense),
        "moe_layer_freq": 1,
        "moe_intermediate_size": recipe.moe_inter,
        "n_routed_experts": recipe.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": recipe.experts_per_token,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "router_fp32": True,
        "ep_size": 1,
        "pretraining_tp": 1,
        # token ids
        "bos_token_id": tokenizer.BOS,
        "eos_token_id": list(tokenizer.EOS),
        "pad_token_id": tokenizer.PAD,
    }


def generation_config() -> dict[str, Any]:
    """The content of generation_config.json: greedy, so that two runtimes can be compared as they come."""
    return {
        "bos_token_id": tokenizer.BOS,
        "eos_token_id": list(tokenizer.EOS),
        "pad_token_id": tokenizer.PAD,
        "do_sample": False,
    }
