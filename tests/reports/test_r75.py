"""R75 (simon-mo/vLLM-Benchmark#2, sglang#3471): a comparison in which one engine is chunked and mixed, the other not.

Two arms whose settings differ in more than the policy: another chunk, and a model whose indexer selects twice as many
keys. The settings that differ come before any figure; the answers differ for real, which is an exit code of its own.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from glm_runtime.ab.runs import by_arm, load_folder
from tests.ab.command import ab
from tests.servers import Run as Command

pytestmark = [pytest.mark.slow, pytest.mark.server]

STOCK = "stock: --policy sglang --chunked-prefill-size 512"
OTHER = """ledger: --policy vllm-ledger --max-num-batched-tokens 128 --json-model-override-args '{"index_topk": 128}'"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r75") / "out"


@pytest.fixture(scope="module")
def command(folder: Path) -> Command:
    load = "burst --bursts 1 --size 5 --prompt 400 --new 24"
    return ab(folder, "--arm", STOCK, "--arm", OTHER, "--workload", load, "--rounds", "2", "--keep-servers")


def test_effective_settings_come_first(command: Command) -> None:
    lines = command.output.splitlines()
    place = {word: next(i for i, line in enumerate(lines) if word in line) for word in ("settings that differ", "TTFT")}
    assert place["settings that differ"] < place["TTFT"]
    rows = next(line for line in lines if "rows of a step, at most" in line)
    assert rows.split()[-2:] == ["512", "128"]
    assert any("prefill and decode in one step" in line and "one or the other" in line for line in lines)


def test_a_real_difference_has_its_own_exit_code(command: Command) -> None:
    assert command.code == 3, command.errors
    assert command.left == []
    assert "noise of equal arms: logprobs differ by up to 0 over" in command.output
    assert "differ for real" in command.output
    shown = next(line for line in command.output.splitlines() if "at output token" in line)
    assert shown.count("token ") == 3 and shown.count("ahead by") == 2 and shown.endswith("real")


def test_rounds_are_taken_in_turn(command: Command, folder: Path) -> None:
    runs = load_folder(str(folder))
    assert [(run.arm, run.round) for run in runs] == [("stock", 1), ("ledger", 1), ("stock", 2), ("ledger", 2)]
    assert all(b.start > a.start + a.seconds for a, b in itertools.pairwise(runs))
    # The same arm answers the same in both rounds: the prefix cache was emptied, and nothing else is left over.
    for own in by_arm(runs).values():
        assert [reply.tokens for reply in own[0].replies] == [reply.tokens for reply in own[1].replies]
        assert all(reply.cached == 0 for run in own for reply in run.replies)
