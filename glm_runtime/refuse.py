"""Flags of SGLang that the CPU platform cannot honour, and launches that cannot work; `refuse_gpu.py` has the GPU's.

Each row: a ServerArgs field, the values that are fine, and why another one ends the launch. Nothing is ignored quietly.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attention.backend_name import NAME
from attention.sizes import PAGE_SIZE
from glm_runtime import decode_ranks
from glm_runtime.config import ConfigError, RuntimeConfig
from glm_runtime.memory import odd_width, pool_tokens, token_bytes
from glm_runtime.model_files import override
from parallel import flags as parallel_flags
from parallel.dcp import page_tokens
from policies.ledger.flags import FlagError, check_sglang
from policies.registry import resolve

MIN_TOKENS = 2 * PAGE_SIZE  # SGLang's own first request takes 27 tokens; below this nothing useful fits


@dataclass(frozen=True)
class Rule:
    """A ServerArgs field that has to satisfy `fine`."""

    field: str
    flag: str
    fine: Callable[[Any], bool]
    reason: str


def _one(value: Any) -> bool:
    return value in (None, 1)


def _off(value: Any) -> bool:
    return not value


def _in(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


ATTENTION = "on CPU attention is glm_cpu"
GRAPHS = "there are no CUDA graphs on CPU"
RANKS = "on CPU ranks are tensor-parallel only"
CONTEXT = "on CPU context parallelism is asked for by --prefill-context-parallel-size"
DECODE = "on CPU decode context parallelism is asked for by --decode-context-parallel-size alone"
SECOND_MEMORY = "there is no second memory on CPU"
LORA = "LoRA is not supported on CPU"
STREAMS = "the CPU path has no streams to overlap"
GPU_LINK = "it is a transport between GPUs"

CPU_RULES = (
    Rule("attention_backend", "--attention-backend", _in(None, NAME), ATTENTION),
    Rule("prefill_attention_backend", "--prefill-attention-backend", _in(None, NAME), ATTENTION),
    Rule("decode_attention_backend", "--decode-attention-backend", _in(None, NAME), ATTENTION),
    Rule("dsa_prefill_backend", "--dsa-prefill-backend", _off, ATTENTION),
    Rule("dsa_decode_backend", "--dsa-decode-backend", _off, ATTENTION),
    Rule("dsa_paged_mqa_logits_backend", "--dsa-paged-mqa-logits-backend", _in("auto"), ATTENTION),
    Rule("dsa_topk_backend", "--dsa-topk-backend", _in("sgl-kernel"), ATTENTION),
    Rule("sampling_backend", "--sampling-backend", _in(None, "pytorch"), "on CPU sampling is pytorch"),
    Rule("moe_runner_backend", "--moe-runner-backend", _in("auto"), "on CPU experts run in glm_runtime's own loop"),
    Rule("moe_a2a_backend", "--moe-a2a-backend", _in("none"), "expert parallelism is not supported on CPU"),
    Rule("page_size", "--page-size", _in(None, PAGE_SIZE), f"DSA index pages hold {PAGE_SIZE} tokens"),
    Rule(
        "kv_cache_dtype",
        "--kv-cache-dtype",
        _in(None, "auto", "bf16", "bfloat16", "fp8_e4m3"),
        "the CPU cache is auto (the model's dtype), bfloat16 or fp8_e4m3",
    ),
    Rule("quantization", "--quantization", _off, "quantised weights are not supported on CPU"),
    Rule("speculative_algorithm", "--speculative-algorithm", _off, "speculative decoding is not supported on CPU"),
    Rule("attn_cp_size", "--attn-cp-size", _one, CONTEXT),
    Rule("enable_prefill_cp", "--enable-prefill-cp", _off, CONTEXT),
    Rule("cp_strategy", "--cp-strategy", _off, CONTEXT),
    Rule("dcp_size", "--dcp-size", _one, DECODE),
    Rule("dcp_comm_backend", "--dcp-comm-backend", _off, DECODE),
    Rule("dcp_replicate_q_proj", "--dcp-replicate-q-proj", _off, DECODE),
    Rule("pp_size", "--pp-size", _one, RANKS),
    Rule("dp_size", "--dp-size", _one, RANKS),
    Rule("ep_size", "--ep-size", _one, RANKS),
    Rule("moe_dp_size", "--moe-dp-size", _one, RANKS),
    Rule("dwdp_size", "--dwdp-size", _one, RANKS),
    Rule("nnodes", "--nnodes", _one, "on CPU one machine serves"),
    Rule("enable_dp_attention", "--enable-dp-attention", _off, RANKS),
    Rule("enable_eplb", "--enable-eplb", _off, "expert parallelism is not supported on CPU"),
    Rule("enable_lora", "--enable-lora", _off, LORA),
    Rule("lora_paths", "--lora-paths", _off, LORA),
    Rule("enable_hierarchical_cache", "--enable-hierarchical-cache", _off, SECOND_MEMORY),
    Rule("enable_hisparse", "--enable-hisparse", _off, SECOND_MEMORY),
    Rule("enable_lmcache", "--enable-lmcache", _off, SECOND_MEMORY),
    Rule("enable_flexkv", "--enable-flexkv", _off, SECOND_MEMORY),
    Rule("enable_memory_saver", "--enable-memory-saver", _off, "it releases GPU memory"),
    Rule("cpu_offload_gb", "--cpu-offload-gb", _off, "the model is on the CPU already"),
    Rule("enable_torch_compile", "--enable-torch-compile", _off, "the CPU path runs eagerly"),
    Rule("enable_two_batch_overlap", "--enable-two-batch-overlap", _off, STREAMS),
    Rule("enable_single_batch_overlap", "--enable-single-batch-overlap", _off, STREAMS),
    Rule("enable_pdmux", "--enable-pdmux", _off, STREAMS),
    Rule("cuda_graph_config", "--cuda-graph-config", _off, GRAPHS),
    Rule("cuda_graph_backend_decode", "--cuda-graph-backend-decode", _in(None, "disabled"), GRAPHS),
    Rule("cuda_graph_backend_prefill", "--cuda-graph-backend-prefill", _in(None, "disabled"), GRAPHS),
    Rule("cuda_graph_max_bs_decode", "--cuda-graph-max-bs-decode", _off, GRAPHS),
    Rule("cuda_graph_max_bs_prefill", "--cuda-graph-max-bs-prefill", _off, GRAPHS),
    Rule("cuda_graph_bs_decode", "--cuda-graph-bs-decode", _off, GRAPHS),
    Rule("cuda_graph_bs_prefill", "--cuda-graph-bs-prefill", _off, GRAPHS),
    Rule("enable_profile_cuda_graph", "--enable-profile-cuda-graph", _off, GRAPHS),
    Rule("enable_symm_mem", "--enable-symm-mem", _off, GPU_LINK),
    Rule("enable_torch_symm_mem", "--enable-torch-symm-mem", _off, GPU_LINK),
    Rule("enable_nccl_nvls", "--enable-nccl-nvls", _off, GPU_LINK),
    Rule("enable_mscclpp", "--enable-mscclpp", _off, GPU_LINK),
    Rule("enable_flashinfer_allreduce_fusion", "--enable-flashinfer-allreduce-fusion", _off, GPU_LINK),
    Rule(
        "disaggregation_mode",
        "--disaggregation-mode",
        _in(None, "null"),
        "prefill-decode disaggregation is not supported on CPU",
    ),
)


def cpu_flags(server_args: Any) -> None:
    """Raise ConfigError for the first SGLang flag that the CPU platform cannot honour.

    Args:
        server_args: ServerArgs before SGLang has resolved it: what the operator said, not what SGLang made of it.
    """
    for rule in CPU_RULES:
        value = getattr(server_args, rule.field)
        if not rule.fine(value):
            said = rule.flag if value is True else f"{rule.flag} {value}"
            raise ConfigError(f"{said} cannot be honoured with --device cpu: {rule.reason}; drop one of the two")


SGLANG_SPLITS = ("interleave", "zigzag")
PCP = "--prefill-context-parallel-size"
OURS = f"{PCP} sets it"
WHOLE = "each rank runs whole layers"
# What prefill ranks exclude: vLLM's list (PCPManager.validate_config), then SGLang's (arg_groups/parallel_hook.py).
PCP_RULES = (
    Rule("attn_cp_size", "--attn-cp-size", _one, OURS),
    Rule("enable_prefill_cp", "--enable-prefill-cp", _off, OURS),
    Rule("cp_strategy", "--cp-strategy", _off, "--cp-split names the split"),
    Rule("moe_dp_size", "--moe-dp-size", _one, OURS),
    Rule("enable_lora", "--enable-lora", _off, "adapters are looked up by rows of the whole batch"),
    Rule("lora_paths", "--lora-paths", _off, "adapters are looked up by rows of the whole batch"),
    Rule("enable_multimodal", "--enable-multimodal", _off, "image rows cannot be dealt out"),
    Rule("speculative_algorithm", "--speculative-algorithm", _off, "draft rows cannot be dealt out"),
    Rule("pp_size", "--pp-size", _one, "SGLang has no context parallelism over pipeline stages"),
    Rule("enable_dp_attention", "--enable-dp-attention", _off, "a prefill belongs to one group of ranks"),
    Rule("attn_dp_size", "--attn-dp-size", _one, "a prefill belongs to one group of ranks"),
    Rule("nnodes", "--nnodes", _one, "prefill ranks share one node"),
    Rule("enable_aiter_allreduce_fusion", "--enable-aiter-allreduce-fusion", _off, "SGLang refuses the pair"),
    Rule("enable_two_batch_overlap", "--enable-two-batch-overlap", _off, "half batches have no split of their own"),
    Rule("enable_dsa_cache_layer_split", "--enable-dsa-cache-layer-split", _off, "every rank keeps the full cache"),
    Rule("enable_kv_cache_sharding", "--enable-kv-cache-sharding", _off, "every rank keeps the full cache"),
    Rule("enable_cp_decode_attn_tp", "--enable-cp-decode-attn-tp", _off, WHOLE),
    Rule("disaggregation_mode", "--disaggregation-mode", _in(None, "null"), "pages are sent by one rank of one layout"),
)


def prefill_ranks(server_args: Any, request: RuntimeConfig, explicit: str | None) -> None:
    """Refuse, naming both flags, what cannot be combined with --prefill-context-parallel-size; load the split.

    Args:
        server_args: what the operator said. explicit: what --cp-split says; None where it is not given.
    """
    try:
        parallel_flags.check(
            request.knobs, server_args.tp_size or 1, server_args.pp_size or 1, server_args.dp_size or 1
        )
    except parallel_flags.FlagError as error:
        raise ConfigError(error) from None
    ranks = request.prefill_ranks
    if ranks == 1:
        context_split(server_args, request.slots["context_parallel"], explicit)
        return
    for rule in PCP_RULES:
        value = getattr(server_args, rule.field)
        if not rule.fine(value):
            said = rule.flag if value is True else f"{rule.flag} {value}"
            raise ConfigError(f"{said} cannot be combined with {PCP} {ranks}: {rule.reason}; drop one of the two")
    tp, dense = server_args.tp_size or 1, server_args.moe_dense_tp_size
    if request.device == "cpu" and tp > 1:
        raise ConfigError(f"--tp-size {tp} with {PCP} {ranks} is not supported on CPU: {WHOLE}; set --tp-size 1")
    if request.device == "cpu" and dense is not None:
        raise ConfigError(f"--moe-dense-tp-size {dense} cannot be combined with {PCP} {ranks}: {OURS}; drop it")
    resolve(request.policy, request.slots).impl("context_parallel").load()


def context_split(server_args: Any, slot: str, explicit: str | None) -> None:
    """Hand the context-parallel slot to SGLang's --cp-strategy, or refuse where the two cannot both hold.

    Args:
        slot: implementation in force.
        explicit: what --cp-split says; None where it is not given.
    """
    ranks = server_args.attn_cp_size or 1
    if ranks == 1:
        if explicit is not None:
            raise ConfigError(f"--cp-split {explicit} has nothing to split with {PCP} 1; raise it, or drop --cp-split")
        return
    if slot not in SGLANG_SPLITS:
        raise ConfigError(
            f"--attn-cp-size {ranks} is SGLang's, which knows no --cp-split {slot} (or the policy's); "
            f"add --cp-split interleave, or use {PCP}"
        )
    strategy = server_args.cp_strategy
    if strategy is not None and strategy != slot:
        raise ConfigError(
            f"--cp-strategy {strategy} and --cp-split {slot} (or the policy's) differ; drop --cp-strategy"
        )
    server_args.cp_strategy = slot


def port(host: str, number: int) -> None:
    """Raise ConfigError where the HTTP port is taken, or is none."""
    if not 0 < number < 65536:
        raise ConfigError(f"--port {number} is no port (1 to 65535)")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            raise ConfigError(
                f"--port {number}: {host}:{number} cannot be bound ({error.strerror}); choose another"
            ) from None


def model_dtype(server_args: Any, config: Mapping[str, Any]) -> str:
    """Name of the dtype that the model runs in on CPU.

    "auto" keeps the checkpoint's: float32 stays float32 (SGLang would make it float16, which no CPU kernel here has);
    a float16 checkpoint runs in bfloat16.
    """
    dtype = str(server_args.dtype or "auto")
    if dtype == "auto":
        own = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        return "bfloat16" if own == "float16" else own
    return {"half": "float16", "float": "float32"}.get(dtype, dtype)


def cache_kind(server_args: Any, config: Mapping[str, Any]) -> str:
    """Layout name of the KV rows that this launch will use."""
    asked = server_args.kv_cache_dtype
    if asked == "fp8_e4m3":
        return "fp8_e4m3"
    if asked in ("bf16", "bfloat16"):
        return "bfloat16"
    return model_dtype(server_args, config)


def context_memory(
    server_args: Any,
    config: Mapping[str, Any],
    fraction: float,
    free_bytes: int,
    sharding: tuple[int, int] = (1, 1),
) -> None:
    """Raise ConfigError where one request of the full context cannot fit the KV pool.

    Args:
        fraction: share of `free_bytes` that the pool may take.
        free_bytes: memory free now, before the weights are loaded.
        sharding: ranks that share the latent rows, and tokens of a run.
    """
    dtype = model_dtype(server_args, config)
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype {dtype} cannot be honoured with --device cpu: float32 and bfloat16 are supported")
    kind = cache_kind(server_args, config)
    odd = odd_width(config)
    if odd is not None:
        raise ConfigError(f"--model-path {server_args.model_path}: {odd}, so --device cpu cannot serve it")
    model_context = int(config.get("max_position_embeddings", 0))
    explicit = server_args.context_length is not None
    context = server_args.context_length if explicit else model_context
    if explicit and context < 1:
        raise ConfigError(f"--context-length {context} is not positive")
    if explicit and model_context and context > model_context:
        raise ConfigError(
            f"--context-length {context} exceeds the model's {model_context} positions (max_position_embeddings)"
        )
    shards, page = sharding[0], page_tokens(*sharding, PAGE_SIZE)
    tokens = pool_tokens(int(free_bytes * fraction), config, kind, shards, page)
    limit = server_args.max_total_tokens
    least = max(MIN_TOKENS, 2 * page)
    if limit is not None and limit < least:
        raise ConfigError(f"--max-total-tokens {limit} holds no request; {least} tokens are the least")
    if limit is not None and limit > tokens:
        need = limit * token_bytes(config, kind, shards) / 2**30
        raise ConfigError(
            f"--max-total-tokens {limit} needs {need:.2f} GiB of {kind} KV cache, but free memory gives {tokens} tokens"
            "; lower it, or raise --mem-fraction-static"
        )
    if limit is not None:
        if not explicit:
            return
        tokens = min(tokens, limit)
    if context > tokens:
        need = context * token_bytes(config, kind, shards) / 2**30
        source = f"--max-total-tokens {limit}" if limit is not None and tokens == limit else "free memory"
        raise ConfigError(
            f"--context-length {context} needs {need:.2f} GiB of {kind} KV cache, but {source} gives {tokens} tokens; "
            "lower it, or raise --mem-fraction-static or --max-total-tokens"
        )


def guarded_front(server_args: Any) -> None:
    """Raise ConfigError for a front that requests would pass without the guard."""
    workers = server_args.tokenizer_worker_num or 1
    if workers > 1:
        raise ConfigError(
            f"--tokenizer-worker-num {workers}: SGLang loads no plugins in tokenizer workers, so their requests would "
            "pass unchecked; drop it"
        )
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes"):
        raise ConfigError("SGLANG_RUST_SERVER: SGLang's Rust server passes requests by the guard; unset it")


def launch(server_args: Any, request: RuntimeConfig, config: Mapping[str, Any], explicit_split: str | None) -> None:
    """All checks on parsed, unresolved arguments that need no process."""
    guarded_front(server_args)
    switchable = bool(request.knobs.get("allow_policy_switch"))
    if request.slots["scheduler"] == "ledger" or switchable:
        chosen = "--policy vllm-ledger" if request.policy == "vllm-ledger" else "--scheduler ledger"
        try:
            check_sglang(server_args, "--allow-policy-switch" if switchable else chosen, switchable)
        except FlagError as error:
            raise ConfigError(error) from None
    prefill_ranks(server_args, request, explicit_split)
    decode_ranks.check(server_args, request)
    if request.device != "cpu":
        from glm_runtime import refuse_gpu

        refuse_gpu.launch(server_args, request.slots)
        return
    cpu_flags(server_args)
    import psutil

    config = dict(config) | override(server_args.json_model_override_args)
    fraction = server_args.mem_fraction_static
    if fraction is None:
        fraction = 0.5 / ((server_args.tp_size or 1) * request.prefill_ranks)
    elif not 0 < fraction < 1:
        raise ConfigError(f"--mem-fraction-static {fraction} is not between 0 and 1")
    context_memory(server_args, config, fraction, psutil.virtual_memory().available, request.sharding())
