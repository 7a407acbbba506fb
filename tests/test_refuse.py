"""What the CPU platform cannot honour is refused, and what it can is not."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from glm_runtime import refuse, refuse_gpu
from glm_runtime.config import ConfigError
from glm_runtime.memory import pool_tokens, token_bytes

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def server_args() -> Any:
    """SGLang's class of arguments."""
    return pytest.importorskip("sglang.srt.server_args").ServerArgs


def given(**changes: Any) -> Any:
    """Arguments as far as the memory checks read them."""
    fields = {
        "kv_cache_dtype": "auto",
        "dtype": "auto",
        "context_length": None,
        "max_total_tokens": None,
        "model_path": "m",
    }
    return SimpleNamespace(**(fields | changes))


def test_every_rule_names_a_field_a_flag_and_accepts_the_default(server_args: Any) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    server_args.add_cli_args(parser)
    fields = {flag: action.dest for action in parser._actions for flag in action.option_strings}
    raw = server_args(model_path="m", device="cpu")
    for rule in (*refuse.CPU_RULES, *refuse_gpu.GPU_RULES):
        assert hasattr(raw, rule.field), rule.field
        assert fields[rule.flag] == rule.field, rule.flag
    refuse.cpu_flags(raw)
    refuse_gpu.flags(server_args(model_path="m", device="cuda"), BOTH)


BOTH = {"indexer": "qchunk", "prefill_kv": "workspace"}


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("speculative_algorithm", "EAGLE", "--speculative-algorithm EAGLE"),
        ("dcp_size", 2, "--dcp-size 2"),
        ("attn_cp_size", 2, "--attn-cp-size 2"),
        ("kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype fp8_e5m2"),
        ("attn_dp_size", 2, "--attn-dp-size 2"),
        ("enable_hisparse", True, "--enable-hisparse"),
        ("attention_backend", "flashinfer", "--attention-backend flashinfer"),
        ("cuda_graph_backend_prefill", "full", "--cuda-graph-backend-prefill full"),
        ("device", "xpu", "--device xpu"),
    ],
)
def test_a_flag_that_the_gpu_slots_cannot_honour(server_args: Any, field: str, value: Any, flag: str) -> None:
    raw = server_args(**{"model_path": "m", "device": "cuda", field: value})
    with pytest.raises(
        ConfigError, match=f"^{flag} cannot be honoured with --indexer qchunk and --prefill-kv workspace"
    ):
        refuse_gpu.launch(raw, BOTH)
    with pytest.raises(ConfigError, match="with --prefill-kv workspace on a GPU"):
        refuse_gpu.launch(raw, {"indexer": "ragged", "prefill_kv": "workspace"})
    refuse_gpu.launch(raw, {"indexer": "ragged", "prefill_kv": "paged"})


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("attention_backend", "triton", "--attention-backend triton"),
        ("attention_backend", "torch_native", "--attention-backend torch_native"),
        ("prefill_attention_backend", "fa3", "--prefill-attention-backend fa3"),
        ("page_size", 16, "--page-size 16"),
        ("kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype fp8_e5m2"),
        ("quantization", "fp8", "--quantization fp8"),
        ("sampling_backend", "flashinfer", "--sampling-backend flashinfer"),
        ("moe_runner_backend", "triton", "--moe-runner-backend triton"),
        ("speculative_algorithm", "EAGLE", "--speculative-algorithm EAGLE"),
        ("attn_cp_size", 2, "--attn-cp-size 2"),
        ("enable_prefill_cp", True, "--enable-prefill-cp cannot"),
        ("pp_size", 2, "--pp-size 2"),
        ("dp_size", 2, "--dp-size 2"),
        ("ep_size", 2, "--ep-size 2"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache cannot"),
        ("enable_torch_compile", True, "--enable-torch-compile cannot"),
        ("cuda_graph_max_bs_decode", 8, "--cuda-graph-max-bs-decode 8"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode prefill"),
    ],
)
def test_a_flag_that_the_cpu_cannot_honour(server_args: Any, field: str, value: Any, flag: str) -> None:
    raw = server_args(model_path="m", device="cpu", **{field: value})
    with pytest.raises(ConfigError, match=flag):
        refuse.cpu_flags(raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [("page_size", 64), ("kv_cache_dtype", "fp8_e4m3"), ("tp_size", 2), ("attention_backend", "glm_cpu")],
)
def test_a_flag_that_it_can(server_args: Any, field: str, value: Any) -> None:
    refuse.cpu_flags(server_args(model_path="m", device="cpu", **{field: value}))


def test_context_split() -> None:
    args = SimpleNamespace(attn_cp_size=1, cp_strategy=None)
    refuse.context_split(args, "interleave", None)
    assert args.cp_strategy is None
    with pytest.raises(
        ConfigError, match="--cp-split zigzag has nothing to split with --prefill-context-parallel-size 1"
    ):
        refuse.context_split(args, "zigzag", "zigzag")
    args = SimpleNamespace(attn_cp_size=2, cp_strategy=None)
    refuse.context_split(args, "zigzag", "zigzag")
    assert args.cp_strategy == "zigzag"
    with pytest.raises(ConfigError, match=r"--attn-cp-size 2 .* --cp-split head-tail .*add --cp-split interleave"):
        refuse.context_split(args, "head-tail", None)
    with pytest.raises(ConfigError, match="--cp-strategy zigzag and --cp-split interleave"):
        refuse.context_split(args, "interleave", None)


def test_context_beyond_the_model_and_beyond_memory() -> None:
    plenty = 2**40
    refuse.context_memory(given(), CONFIG, 0.5, plenty)
    refuse.context_memory(given(context_length=32768), CONFIG, 0.5, plenty)
    with pytest.raises(ConfigError, match="--context-length 32769 exceeds the model's 32768"):
        refuse.context_memory(given(context_length=32769), CONFIG, 0.5, plenty)
    with pytest.raises(ConfigError, match="--context-length 0"):
        refuse.context_memory(given(context_length=0), CONFIG, 0.5, plenty)
    little = 32768 * token_bytes(CONFIG, "bfloat16")
    with pytest.raises(ConfigError, match=r"--context-length 32768 needs .* GiB of bfloat16 KV cache, but free memory"):
        refuse.context_memory(given(), CONFIG, 0.5, little)
    tokens = pool_tokens(little // 2, CONFIG, "bfloat16")
    refuse.context_memory(given(context_length=tokens), CONFIG, 0.5, little)
    with pytest.raises(ConfigError, match=f"{tokens} tokens"):
        refuse.context_memory(given(context_length=tokens + 1), CONFIG, 0.5, little)


def test_max_total_tokens() -> None:
    plenty = 2**40
    refuse.context_memory(given(max_total_tokens=1024), CONFIG, 0.5, plenty)
    with pytest.raises(ConfigError, match="--max-total-tokens 100 holds no request"):
        refuse.context_memory(given(max_total_tokens=100), CONFIG, 0.5, plenty)
    with pytest.raises(ConfigError, match=r"--context-length 2048 .*--max-total-tokens 1024 gives 1024"):
        refuse.context_memory(given(max_total_tokens=1024, context_length=2048), CONFIG, 0.5, plenty)
    with pytest.raises(ConfigError, match=r"--max-total-tokens 1000000 needs .* GiB"):
        refuse.context_memory(given(max_total_tokens=1_000_000), CONFIG, 0.5, 2**30)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "half"}, "float16"),
        ({"kv_cache_dtype": "fp8_e4m3", "dtype": "float32"}, "fp8_e4m3"),
        ({"kv_cache_dtype": "bf16", "dtype": "float32"}, "bfloat16"),
    ],
)
def test_cache_kind(changes: dict[str, Any], kind: str) -> None:
    assert refuse.cache_kind(given(**changes), CONFIG) == kind


def test_dtype_and_widths() -> None:
    with pytest.raises(ConfigError, match="--dtype float16"):
        refuse.context_memory(given(dtype="half"), CONFIG, 0.5, 2**40)
    with pytest.raises(ConfigError, match="kv_lora_rank is 256"):
        refuse.context_memory(given(), CONFIG | {"kv_lora_rank": 256}, 0.5, 2**40)


def test_port() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {number}"):
            refuse.port("127.0.0.1", number)
    refuse.port("127.0.0.1", number)
    for number in (0, -1, 65536):
        with pytest.raises(ConfigError, match=f"--port {number} is no port"):
            refuse.port("127.0.0.1", number)
