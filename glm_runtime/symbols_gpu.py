"""The symbols that the slots `qchunk` and `workspace` call on a GPU, checked before such a launch.

Functions of libraries that cannot be imported without a GPU (FlashMLA, sgl-kernel) are read from their source files, so
that the check is the same on every machine. What DeepGEMM's compiled part does with its arguments is not checked.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from glm_runtime.config import ConfigError
from glm_runtime.symbols import Symbol, check

DSA = "sglang.srt.layers.attention"

GPU_SYMBOLS = (
    Symbol(
        f"{DSA}.dsa_backend.DeepseekSparseAttnBackend.__init__",
        (
            "self",
            "model_runner",
            "skip_prefill",
            "speculative_step_id",
            "topk",
            "speculative_num_steps",
            "seed_dsa_topk_from_draft_extend",
        ),
    ),
    Symbol(
        f"{DSA}.dsa_backend.DeepseekSparseAttnBackend.forward_extend",
        (
            "self",
            "q",
            "k",
            "v",
            "layer",
            "forward_batch",
            "save_kv_cache",
            "q_rope",
            "k_rope",
            "topk_indices",
            "cos_sin_cache",
            "is_neox",
            "llama_4_scaling",
            "attn_sink",
        ),
    ),
    Symbol(f"{DSA}.dsa_backend.DeepseekSparseAttnBackend.get_indexer_metadata", ("self", "layer_id", "forward_batch")),
    Symbol(f"{DSA}.dsa.dsa_indexer.Indexer._pad_heads_for_deep_gemm", ("q_fp8", "weights")),
    Symbol(f"{DSA}.dsa.dsa_indexer.Indexer._with_real_sm_count", ("self",)),
    Symbol(f"{DSA}.dsa.dsa_topk_backend.DSATopKBackend.topk_func", ("self", "score", "lengths", "topk", "row_starts")),
    Symbol("sglang.kernels.ops.attention.utils.concat_mla_absorb_q_general", ("q_nope", "q_rope")),
    Symbol("sglang.srt.mem_cache.memory_pool.DSATokenToKVPool.get_index_k_with_scale_buffer", ("self", "layer_id")),
    Symbol("sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.get_key_buffer", ("self", "layer_id")),
    Symbol(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.set_mla_kv_buffer",
        ("self", "layer", "loc_info", "cache_k_nope", "cache_k_rope", "layer_id_override"),
    ),
    Symbol("sglang.srt.model_executor.forward_batch_info.ForwardMode.is_extend_without_speculative", ("self",)),
)

LIBRARY_SYMBOLS = (
    Symbol("deep_gemm.fp8_mqa_logits", ("q", "kv", "weights", "ks", "ke", "clean_logits", "max_seqlen_k")),
    Symbol(
        "deep_gemm.fp8_paged_mqa_logits",
        (
            "q",
            "kv_cache",
            "weights",
            "context_lens",
            "block_table",
            "schedule_meta",
            "max_context_len",
            "clean_logits",
            "indices",
        ),
    ),
    Symbol("deep_gemm.get_paged_mqa_logits_metadata", ("context_lens", "block_kv", "num_sms", "indices")),
    Symbol("deep_gemm.get_num_sms"),
)

FLASHMLA = "sglang.kernels.ops.attention.flash_mla_interface"

SOURCES = (
    Symbol(
        f"{FLASHMLA}.flash_mla_sparse_fwd",
        ("q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length", "use_legacy"),
    ),
    Symbol(
        f"{FLASHMLA}.flash_mla_with_kvcache",
        (
            "q",
            "k_cache",
            "block_table",
            "cache_seqlens",
            "head_dim_v",
            "tile_scheduler_metadata",
            "num_splits",
            "softmax_scale",
            "causal",
            "descale_q",
            "descale_k",
            "is_fp8_kvcache",
            "indices",
            "attn_sink",
            "extra_k_cache",
            "extra_indices_in_kvcache",
            "topk_length",
            "extra_topk_length",
            "kv_format",
            "use_legacy",
        ),
    ),
    Symbol(
        f"{FLASHMLA}.get_mla_metadata",
        ("cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k", "num_heads_q", "is_fp8_kvcache", "topk"),
    ),
    Symbol("sgl_kernel.top_k.fast_topk_v2", ("score", "lengths", "topk", "row_starts")),
)


def source_parameters(path: str) -> tuple[str, ...] | None:
    """Parameter names of a module's function as its source file gives them; None where file or function is missing."""
    module, _, name = path.rpartition(".")
    package, *rest = module.split(".")
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder, *rest).with_suffix(".py")
        if not file.is_file():
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                given = node.args
                return tuple(a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    return None


def check_gpu() -> None:
    """Raise ConfigError for the first symbol that is missing or has other parameters.

    DeepGEMM may be absent: our Triton kernels then take its place.
    """
    check(GPU_SYMBOLS)
    if find_spec("deep_gemm") is not None:
        check(LIBRARY_SYMBOLS)
    for symbol in SOURCES:
        package = symbol.path.partition(".")[0]
        if find_spec(package) is None:
            continue
        found = source_parameters(symbol.path)
        if found != symbol.parameters:
            raise ConfigError(
                f"{symbol.path} takes ({', '.join(found or ('?',))}) in the installed {package}, wanted is "
                f"({', '.join(symbol.parameters or ())})"
            )
