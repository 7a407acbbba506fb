"""The ledger's flags and the SGLang flags that it replaces or does not support; no process is started."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from policies.ledger.flags import (
    REPLACED,
    UNSUPPORTED,
    FlagError,
    LedgerFlags,
    add_arguments,
    check_sglang,
    default_budgets,
    from_values,
)

# A value that an operator could give for each field.
GIVEN: dict[str, Any] = {
    "chunked_prefill_size": 512,
    "max_prefill_tokens": 8192,
    "prefill_decode_interval": 4,
    "prefill_decode_interval_min_bs": 2,
    "schedule_conservativeness": 0.5,
    "schedule_policy": "lpm",
    "priority_scheduling_preemption_threshold": 3,
    "prefill_max_requests": 4,
    "min_free_slots_delay": 8,
    "retraction_policy": "priority",
    "pp_size": 2,
    "disaggregation_mode": "prefill",
    "speculative_algorithm": "EAGLE",
    "lora_paths": ["a=b"],
    "dllm_algorithm": "LowConfidence",
}
ROWS = {**REPLACED, **UNSUPPORTED}


@pytest.fixture(scope="module")
def server_args() -> Any:
    server_args = pytest.importorskip("sglang.srt.server_args")
    return server_args.ServerArgs


@pytest.fixture
def args(server_args: Any) -> Any:
    return server_args(model_path="none")


@pytest.mark.parametrize("field", ROWS)
def test_fields_and_flags_are_sglangs(server_args: Any, args: Any, field: str) -> None:
    """A field that SGLang does not have would never refuse anything."""
    parser = argparse.ArgumentParser()
    server_args.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    flag, neutral = ROWS[field][0], ROWS[field][1]
    assert hasattr(args, field)
    assert flag in known
    assert getattr(args, field) == neutral[0], "the first neutral value is SGLang's default"


def test_defaults_pass(args: Any) -> None:
    check_sglang(args, "--policy vllm-ledger")


@pytest.mark.parametrize("field", ROWS)
def test_each_ends_the_launch_naming_both_flags(server_args: Any, field: str) -> None:
    value = GIVEN.get(field, True)
    assert value not in ROWS[field][1]
    args = server_args(model_path="none", **{field: value})
    with pytest.raises(FlagError) as caught:
        check_sglang(args, "--policy vllm-ledger")
    text = str(caught.value)
    assert ROWS[field][0] in text
    assert "--policy vllm-ledger" in text
    assert "\n" not in text
    if field in REPLACED:
        assert REPLACED[field][2] in text


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
        ({"max_num_seqs": -1}, "--max-num-seqs"),
        ({"max_num_scheduled_tokens": 0}, "--max-num-scheduled-tokens"),
        ({"long_prefill_token_threshold": -1}, "--long-prefill-token-threshold"),
        ({"prefill_schedule_interval": 0}, "--prefill-schedule-interval"),
        ({"watermark": 1.0}, "--watermark"),
        ({"watermark": "much"}, "--watermark"),
        ({"target_step_ms": 0}, "--target-step-ms"),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy"),
        ({"max_num_seqs": True}, "--max-num-seqs"),
        ({"step_log": "/no/such/folder/steps.jsonl"}, "--step-log"),
    ],
)
def test_bad_values_name_their_flag(values: dict[str, Any], named: str) -> None:
    with pytest.raises(FlagError, match=named):
        from_values(values)


def test_command_line_reaches_the_flags(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    log = str(tmp_path / "steps.jsonl")
    given = parser.parse_args(
        [
            *("--max-num-batched-tokens", "512", "--max-num-seqs", "7", "--no-decode-first", "--watermark", "0.1"),
            *("--no-scheduler-reserve-full-isl", "--long-prefill-token-threshold-adaptive", "--step-log", log),
            *("--scheduling-policy", "priority", "--target-step-ms", "25"),
        ]
    )
    flags = from_values(vars(given))
    assert flags == LedgerFlags(
        max_num_batched_tokens=512,
        max_num_seqs=7,
        decode_first=False,
        watermark=0.1,
        scheduler_reserve_full_isl=False,
        long_prefill_token_threshold_adaptive=True,
        step_log=log,
        scheduling_policy="priority",
        target_step_ms=25.0,
    )
    assert from_values(vars(parser.parse_args([]))) == LedgerFlags()
    assert LedgerFlags.from_knobs(flags.knobs() | {"somebody_elses": 1}) == flags


@pytest.mark.parametrize(
    ("usage", "device", "ranks", "gib", "name", "budgets"),
    [
        ("server", "cpu", 1, 0, "", (2048, 128)),
        ("engine", "cpu", 1, 0, "", (4096, 256)),
        ("server", "cpu", 2, 0, "", (4096, 256)),
        ("server", "cuda", 8, 180, "NVIDIA B200", (16384, 1024)),
        ("server", "cuda", 8, 140, "NVIDIA H200", (8192, 1024)),
        ("engine", "cuda", 8, 140, "NVIDIA H200", (16384, 1024)),
        ("server", "cuda", 1, 80, "NVIDIA A100-SXM4-80GB", (2048, 256)),
        ("engine", "cuda", 1, 24, "NVIDIA L4", (8192, 256)),
    ],
)
def test_default_budgets_are_vllms(
    usage: Any, device: str, ranks: int, gib: float, name: str, budgets: tuple[int, int]
) -> None:
    assert default_budgets(usage, device, ranks, gib, name) == budgets


def test_fewer_tokens_than_requests_lower_the_default_of_requests() -> None:
    flags = LedgerFlags(max_num_batched_tokens=32).with_defaults("server", "cpu", 1)
    assert (flags.max_num_batched_tokens, flags.max_num_seqs) == (32, 32)
    assert flags.config(1000, 4096, 64, overlap=True).max_num_seqs == 32
