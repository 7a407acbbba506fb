"""Arms from the command line."""

from __future__ import annotations

import pytest

from glm_runtime.ab.arms import Arm, arms, is_ledger, merge, parse
from glm_runtime.ab.cli import parse as command
from glm_runtime.ab.live import scheduler_of
from glm_runtime.ab.servers import check
from glm_runtime.config import ConfigError


def test_an_arm_is_a_name_and_flags() -> None:
    arm = parse("ledger, wide: --policy vllm-ledger --max-num-batched-tokens 256".replace(",", ""))
    assert arm == Arm("ledger wide", ("--policy", "vllm-ledger", "--max-num-batched-tokens", "256"))
    assert arm.slug == "ledger-wide"
    assert parse("x: --log-level 'a b'").flags == ("--log-level", "a b")


@pytest.mark.parametrize("text", ["no colon", ": --policy sglang", "x: value --flag", "x: --a 'open"])
def test_a_bad_arm_is_named(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)


def test_flags_of_the_arm_win() -> None:
    assert merge(["--dtype", "float32", "--tp=2"], ["--dtype", "bfloat16"]) == ("--tp=2", "--dtype", "bfloat16")


def test_arms_of_a_command_line() -> None:
    made = arms(["sglang"], ["l: --policy vllm-ledger"], ["--dtype", "float32"])
    assert [arm.name for arm in made] == ["sglang", "l"]
    assert made[1].flags == ("--dtype", "float32", "--policy", "vllm-ledger")


def test_one_budget_by_the_flag_that_each_arm_knows() -> None:
    texts = ["own: --policy vllm-ledger --max-num-batched-tokens 8", "mixed: --policy sglang --scheduler ledger"]
    made = arms(["sglang", "vllm-ledger"], texts, [], budget=64)
    assert [arm.flags[-2:] for arm in made] == [
        ("--chunked-prefill-size", "64"),
        ("--max-num-batched-tokens", "64"),
        ("--max-num-batched-tokens", "8"),
        ("--max-num-batched-tokens", "64"),
    ]
    assert not is_ledger(["--policy=vllm-ledger", "--scheduler", "sglang"])


@pytest.mark.parametrize(
    ("policies", "texts", "common", "word"),
    [
        ([], [], [], "no arms"),
        (["sglang"], ["sglang: --policy sglang"], [], "there twice"),
        (["sglang"], ["x: --port 7"], [], "--port"),
        (["sglang"], [], ["--step-log", "f"], "--step-log"),
        (["sglang"], [], ["--config", "f.yaml"], "--config"),
        (["sglang"], [], ["stray"], "stray"),
    ],
)
def test_what_cannot_be_an_arm(policies: list[str], texts: list[str], common: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        arms(policies, texts, common)


def test_a_command_line() -> None:
    plan = command(["--policies", "sglang,vllm-ledger", "--dtype", "float32", "--seed", "3", "--slo-itl-ms", "50"])
    assert [arm.name for arm in plan.arms] == ["sglang", "vllm-ledger"]
    assert all({"--dtype", "--random-seed"} <= set(arm.flags) for arm in plan.arms)
    assert (plan.slo.ttft, plan.slo.itl, plan.values.rounds) == (None, 50.0, 2)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--policies", "sglang"], "one arm only"),
        (["--policies", "sglang,vllm-ledger", "--rounds", "0"], "--rounds"),
        (["--policies", "sglang,vllm-ledger", "--slo-ttft-ms", "soon"], "--slo-ttft-ms"),
    ],
)
def test_a_bad_command_line(argv: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        command(argv)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--policy none", "--policy none"),
        ("--policy sglang --max-num-seqs 3", "--max-num-seqs"),
        ("--policy", "policy"),
    ],
)
def test_our_flags_are_checked_before_any_server_starts(flags: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        check(Arm("x", tuple(flags.split())))


def test_one_server_whose_scheduler_changes() -> None:
    argv = ["--live-switch", "--policy", "vllm-ledger", "--max-num-batched-tokens", "64", "--arm"]
    plan = command([*argv, "stock: --scheduler sglang", "--arm", "ledger: --scheduler ledger"])
    assert [arm.name for arm in plan.arms] == ["stock", "ledger"]
    (server,) = plan.servers
    assert server.flags[-3:] == ("--scheduler", "ledger", "--allow-policy-switch")
    assert list(map(scheduler_of, plan.arms)) == ["sglang", "ledger"]
    with pytest.raises(ConfigError, match="--live-switch: arms stock and small differ in --watermark"):
        _ = command([*argv, "stock: --scheduler sglang", "--arm", "small: --scheduler ledger --watermark 0.1"]).servers
    with pytest.raises(ConfigError, match="not allowed with"):
        command([*argv, "a: --scheduler sglang", "--keep-servers"])
    with pytest.raises(ConfigError, match="--budget"):
        command([*argv, "a: --scheduler sglang", "--budget", "64"])
