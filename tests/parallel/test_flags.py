"""Flags of context parallelism: values, what goes together, and what each refusal names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glm_runtime import config_file, refuse
from glm_runtime.cli import once, split
from glm_runtime.config import ConfigError, RuntimeConfig
from parallel.flags import FlagError, ParallelFlags, check, from_values
from policies.registry import resolve


def test_defaults_and_short_names() -> None:
    assert ParallelFlags().knobs() == {
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "cp_kv_cache_interleave_size": 1,
    }
    options, rest, _ = split(["-pcp", "2", "-dcp", "4", "--tp-size", "2", "--cp-kv-cache-interleave-size=8"])
    assert rest == ["--tp-size", "2"]
    assert options.parallel == ParallelFlags(2, 4, 8)
    assert options.parallel.given() == list(ParallelFlags.__dataclass_fields__)
    with pytest.raises(ConfigError, match="--prefill-context-parallel-size is given twice: 2 and 4"):
        once(["-pcp", "2", "--prefill-context-parallel-size", "4"])


def test_in_a_config_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("prefill_context_parallel_size: 2\ndecode-context-parallel-size: 2\n")
    content = config_file.read(str(file))
    options, rest, _ = split(config_file.our_flags(str(file), content))
    assert (rest, content, options.parallel) == ([], {}, ParallelFlags(2, 2))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prefill_context_parallel_size": 0}, "--prefill-context-parallel-size 0"),
        ({"decode_context_parallel_size": True}, "--decode-context-parallel-size True"),
        ({"cp_kv_cache_interleave_size": "2"}, "--cp-kv-cache-interleave-size 2"),
    ],
)
def test_a_bad_value_names_its_flag(values: dict[str, Any], words: str) -> None:
    with pytest.raises(FlagError, match=words):
        from_values(values)


def test_sizes_that_do_not_go_together() -> None:
    with pytest.raises(FlagError, match=r"--cp-kv-cache-interleave-size 4 .* --decode-context-parallel-size 1"):
        ParallelFlags(cp_kv_cache_interleave_size=4).knobs()
    with pytest.raises(FlagError, match="--decode-context-parallel-size 3 does not divide --tp-size 4"):
        check(ParallelFlags(1, 3).knobs(), 4, 1, 1)
    with pytest.raises(FlagError, match=r"--decode-context-parallel-size 3 .* choose one of 1, 2, 4"):
        check(ParallelFlags(2, 3).knobs(), 2, 1, 1)
    check(ParallelFlags(2, 4).knobs(), 2, 1, 1)


def request(pcp: int, split: str = "interleave", device: str = "cpu") -> RuntimeConfig:
    policy = resolve("sglang", {"context_parallel": split})
    return RuntimeConfig(
        policy="sglang", slots=dict(policy.slots), device=device, knobs=dict(ParallelFlags(pcp).knobs())
    )


def given(**changes: Any) -> Any:
    """SGLang's arguments as far as the split reads them, as nobody has set them."""
    fields = {rule.field: None for rule in refuse.PCP_RULES}
    sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "moe_dense_tp_size": None, "attn_cp_size": 1}
    return SimpleNamespace(**(fields | sizes | changes))


def test_every_rule_names_a_field_and_accepts_sglangs_default() -> None:
    server_args = pytest.importorskip("sglang.srt.server_args").ServerArgs
    import argparse

    parser = argparse.ArgumentParser()
    server_args.add_cli_args(parser)
    fields = {flag: action.dest for action in parser._actions for flag in action.option_strings}
    raw = server_args(model_path="m", device="cpu")
    for rule in refuse.PCP_RULES:
        assert rule.fine(getattr(raw, rule.field)), rule.field
        assert fields.get(rule.flag, rule.field) == rule.field, rule.flag
    refuse.prefill_ranks(raw, request(2), None)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("attn_cp_size", 2, "--attn-cp-size 2 .* --prefill-context-parallel-size 2"),
        ("enable_lora", True, "--enable-lora cannot be combined with --prefill-context-parallel-size 2"),
        ("speculative_algorithm", "EAGLE", "--speculative-algorithm EAGLE .* --prefill-context-parallel-size 2"),
        ("pp_size", 2, "--pp-size 2 .* --prefill-context-parallel-size 2"),
        ("enable_multimodal", True, "--enable-multimodal .* --prefill-context-parallel-size 2"),
        ("tp_size", 2, "--tp-size 2 with --prefill-context-parallel-size 2 is not supported on CPU.*--tp-size 1"),
        ("moe_dense_tp_size", 1, "--moe-dense-tp-size 1 .* --prefill-context-parallel-size 2"),
    ],
)
def test_what_prefill_ranks_exclude(field: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        refuse.prefill_ranks(given(**{field: value}), request(2), None)


def test_one_rank_excludes_nothing_but_a_split_of_nothing() -> None:
    refuse.prefill_ranks(given(enable_lora=True), request(1), None)
    with pytest.raises(
        ConfigError, match="--cp-split zigzag has nothing to split with --prefill-context-parallel-size 1"
    ):
        refuse.prefill_ranks(given(), request(1, "zigzag"), "zigzag")
