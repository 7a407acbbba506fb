"""Flags of SGLang that the CPU platform cannot honour, and launches that cannot work.

Each row: a ServerArgs field, the value(s) that are fine, and why another one ends the launch. Nothing is ignored quietly.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from glm_runtime.config import ConfigError, RuntimeConfig
from glm_runtime.memory import pool_tokens, token_bytes


@dataclass(frozen=True)
class Rule:
    """A ServerArgs field that has to satisfy `fine` on CPU."""

    field: str
    flag: str
    fine: Callable[[Any], bool]
    reason: str


def _one(value: Any) -> bool:
    return value in (None, 1)


def _off(value: Any) -> bool:
    return not value


CPU_RULES = (
    Rule("attention_backend", "--attention-backend", lambda v: v in (None, "glm_cpu"), "on CPU attention is glm_cpu"),
    Rule("prefill_attention_backend", "--prefill-attention-backend", _off, "on CPU attention is glm_cpu"),
    Rule("decode_attention_backend", "--decode-attention-backend", _off, "on CPU attention is glm_cpu"),
    Rule("page_size", "--page-size", lambda v: v in (None, 64), "DSA index pages hold 64 tokens"),
    Rule(
        "kv_cache_dtype",
        "--kv-cache-dtype",
        lambda v: v in (None, "auto", "bf16", "bfloat16", "fp8_e4m3"),
        "the CPU cache is auto (the model's dtype), bfloat16 or fp8_e4m3",
    ),
    Rule("quantization", "--quantization", _off, "quantised weights are not supported on CPU"),
    Rule("speculative_algorithm", "--speculative-algorithm", _off, "speculative decoding is not supported on CPU"),
    Rule("attn_cp_size", "--attn-cp-size", _one, "context parallelism is not supported on CPU yet"),
    Rule("enable_prefill_cp", "--enable-prefill-cp", _off, "context parallelism is not supported on CPU yet"),
    Rule("dcp_size", "--dcp-size", _one, "decode context parallelism is not supported on CPU yet"),
    Rule("pp_size", "--pp-size", _one, "pipeline parallelism is not supported on CPU"),
    Rule("ep_size", "--ep-size", _one, "expert parallelism is not supported on CPU"),
    Rule("enable_dp_attention", "--enable-dp-attention", _off, "data-parallel attention is not supported on CPU"),
    Rule("enable_lora", "--enable-lora", _off, "LoRA is not supported on CPU"),
    Rule("lora_paths", "--lora-paths", _off, "LoRA is not supported on CPU"),
    Rule("enable_hierarchical_cache", "--enable-hierarchical-cache", _off, "there is no second memory on CPU"),
    Rule("enable_hisparse", "--enable-hisparse", _off, "there is no second memory on CPU"),
    Rule("enable_torch_compile", "--enable-torch-compile", _off, "the CPU path runs eagerly"),
    Rule("enable_two_batch_overlap", "--enable-two-batch-overlap", _off, "the CPU path has no streams"),
    Rule("cpu_offload_gb", "--cpu-offload-gb", _off, "the model is on the CPU already"),
    Rule(
        "disaggregation_mode",
        "--disaggregation-mode",
        lambda v: v in (None, "null"),
        "prefill-decode disaggregation is not supported on CPU",
    ),
)


def cpu_flags(server_args: Any) -> None:
    """Raise ConfigError for the first SGLang flag that the CPU platform cannot honour."""
    for rule in CPU_RULES:
        value = getattr(server_args, rule.field, None)
        if not rule.fine(value):
            raise ConfigError(
                f"{rule.flag} {value} cannot be honoured with --device cpu: {rule.reason}; drop one of the two"
            )


def context_split(server_args: Any, explicit: str | None) -> None:
    """A context-parallel slot named by its own flag needs ranks to split over."""
    ranks = getattr(server_args, "attn_cp_size", 1) or 1
    if explicit is not None and ranks == 1:
        raise ConfigError(
            f"--cp-split {explicit} has nothing to split with --attn-cp-size 1; raise it, or drop --cp-split"
        )


def port(host: str, number: int) -> None:
    """Raise ConfigError where the HTTP port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            raise ConfigError(
                f"--port {number}: {host}:{number} cannot be bound ({error.strerror}); choose another"
            ) from None


def cache_kind(server_args: Any, config: Mapping[str, Any]) -> str:
    """Layout name of the KV rows that this launch will use."""
    asked = server_args.kv_cache_dtype
    if asked == "fp8_e4m3":
        return "fp8_e4m3"
    if asked in ("bf16", "bfloat16"):
        return "bfloat16"
    dtype = server_args.dtype
    if dtype in (None, "auto"):
        dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        # NOTE: SGLang serves a float32 checkpoint in bfloat16 unless told otherwise.
        dtype = "bfloat16" if dtype == "float32" else dtype
    return {"half": "float16", "float": "float32"}.get(str(dtype), str(dtype))


def context_memory(server_args: Any, config: Mapping[str, Any], fraction: float, free_bytes: int) -> None:
    """Raise ConfigError where one request of the full context cannot fit the KV pool.

    Args:
        fraction: share of `free_bytes` that the pool may take.
        free_bytes: memory free now, before the weights are loaded.
    """
    kind = cache_kind(server_args, config)
    if kind not in ("float32", "bfloat16", "fp8_e4m3"):
        raise ConfigError(f"--dtype {kind} cannot be honoured with --device cpu: float32 and bfloat16 are supported")
    model_context = int(config.get("max_position_embeddings", 0))
    context = server_args.context_length or model_context
    explicit = server_args.context_length is not None
    if explicit and model_context and context > model_context:
        raise ConfigError(
            f"--context-length {context} exceeds the model's {model_context} positions (max_position_embeddings)"
        )
    tokens = pool_tokens(int(free_bytes * fraction), config, kind)
    limit = server_args.max_total_tokens
    if limit is not None:
        if not explicit:
            return
        tokens = min(tokens, limit)
    if context > tokens:
        need = context * token_bytes(config, kind) / 2**30
        source = f"--max-total-tokens {limit}" if limit is not None and tokens == limit else "free memory"
        raise ConfigError(
            f"--context-length {context} needs {need:.2f} GiB of {kind} KV cache, but {source} gives {tokens} tokens; "
            "lower it, or raise --mem-fraction-static or --max-total-tokens"
        )


def launch(server_args: Any, request: RuntimeConfig, config: Mapping[str, Any], explicit_split: str | None) -> None:
    """All checks on parsed arguments that need no process."""
    context_split(server_args, explicit_split)
    if request.device != "cpu":
        return
    cpu_flags(server_args)
    import psutil

    ranks = server_args.tp_size * server_args.pp_size * server_args.dp_size
    fraction = server_args.mem_fraction_static or 0.5 / ranks
    context_memory(server_args, config, fraction, psutil.virtual_memory().available)
