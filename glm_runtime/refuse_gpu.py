"""Flags of SGLang that the slots `qchunk` and `workspace` cannot honour on a GPU.

Each row: a ServerArgs field, the values that are fine, and why another one ends the launch. With `ragged` and `paged`
attention is SGLang's own, and so are its rules. What depends on the device is refused where it is known: at the start
of the scheduler, by `attention.cuda.choice`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention.sizes import PAGE_SIZE
from glm_runtime.config import ConfigError, gpu_slots
from glm_runtime.refuse import Rule, _in, _off, _one


def _cuda(value: Any) -> bool:
    return value is None or str(value).split(":")[0] == "cuda"


def _not_full(value: Any) -> bool:
    return value != "full"


BASE = "they stand on SGLang's dsa backend"
BUFFER = "two steps would share one buffer"
ROWS = "a rank then holds part of the rows (--prefill-context-parallel-size sets it, too)"
UNTRIED = "they were not built for it"

GPU_RULES = (
    Rule("device", "--device", _cuda, "they need an NVIDIA GPU"),
    Rule("attention_backend", "--attention-backend", _in(None, "dsa", "nsa"), BASE),
    Rule("prefill_attention_backend", "--prefill-attention-backend", _in(None, "dsa", "nsa"), BASE),
    Rule("decode_attention_backend", "--decode-attention-backend", _in(None, "dsa", "nsa"), BASE),
    Rule("page_size", "--page-size", _in(None, PAGE_SIZE), f"DSA index pages hold {PAGE_SIZE} tokens"),
    Rule(
        "kv_cache_dtype",
        "--kv-cache-dtype",
        _in(None, "auto", "bf16", "bfloat16", "fp8_e4m3"),
        "they read bfloat16 and fp8_e4m3 rows",
    ),
    Rule("speculative_algorithm", "--speculative-algorithm", _off, "drafts are rows that neither knows"),
    Rule("dcp_size", "--dcp-size", _one, "a rank then holds part of each context"),
    Rule("attn_cp_size", "--attn-cp-size", _one, ROWS),
    Rule("enable_prefill_cp", "--enable-prefill-cp", _off, ROWS),
    Rule("enable_dsa_cache_layer_split", "--enable-dsa-cache-layer-split", _off, "a rank then holds some layers only"),
    Rule("enable_hisparse", "--enable-hisparse", _off, "rows then move between two memories"),
    Rule("attn_dp_size", "--attn-dp-size", _one, UNTRIED),
    Rule("enable_dp_attention", "--enable-dp-attention", _off, UNTRIED),
    Rule("enable_two_batch_overlap", "--enable-two-batch-overlap", _off, BUFFER),
    Rule("enable_pdmux", "--enable-pdmux", _off, BUFFER),
    Rule("cuda_graph_backend_prefill", "--cuda-graph-backend-prefill", _not_full, "chunks are cut on the host"),
    Rule("dllm_algorithm", "--dllm-algorithm", _off, UNTRIED),
    Rule("disaggregation_mode", "--disaggregation-mode", _in(None, "null"), UNTRIED),
    Rule(
        "enable_deterministic_inference",
        "--enable-deterministic-inference",
        _off,
        "a row's last bits may depend on its batch",
    ),
)


def launch(server_args: Any, slots: Mapping[str, str]) -> None:
    """All checks of a launch on a GPU: flags, then the libraries that the slots call. Raises ConfigError."""
    if gpu_slots(slots):
        from glm_runtime import symbols_gpu

        flags(server_args, slots)
        symbols_gpu.check_gpu()


def flags(server_args: Any, slots: Mapping[str, str]) -> None:
    """Raise ConfigError for the first SGLang flag that the chosen slots cannot honour.

    Args:
        server_args: ServerArgs before SGLang has resolved it: what the operator said, not what SGLang made of it.
    """
    chosen = (("--indexer", slots["indexer"], "ragged"), ("--prefill-kv", slots["prefill_kv"], "paged"))
    ours = " and ".join(f"{flag} {name}" for flag, name, stock in chosen if name != stock)
    for rule in GPU_RULES:
        value = getattr(server_args, rule.field)
        if not rule.fine(value):
            said = rule.flag if value is True else f"{rule.flag} {value}"
            raise ConfigError(
                f"{said} cannot be honoured with {ours} on a GPU: {rule.reason}; "
                "drop it, or use --indexer ragged --prefill-kv paged"
            )
