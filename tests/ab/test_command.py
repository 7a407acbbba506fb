"""What `python -m glm_runtime.ab` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_runtime.ab.__main__ import main, run
from glm_runtime.ab.runs import save
from glm_runtime.config import ConfigError
from tests.ab.made import run as made

ARMS = ["--policies", "sglang,vllm-ledger"]


@pytest.fixture
def earlier(tmp_path: Path) -> str:
    """A folder with one run of an arm named sglang."""
    save(made("sglang", 1), tmp_path / "runs" / "sglang-1.json")
    return str(tmp_path)


def test_refusals(tmp_path: Path, earlier: str) -> None:
    for argv, word in (
        ([*ARMS, "--workload", "nothing"], "--workload nothing"),
        ([*ARMS, "--workload", "burst", "--limit", "3"], "--limit"),
        ([*ARMS, "--out", earlier], "--out .* holds runs"),
        ([*ARMS, "--svg", str(tmp_path / "no" / "x.svg")], "--svg .*there is no folder"),
        ([*ARMS, "--against", str(tmp_path / "none")], "there are no runs in it"),
        ([*ARMS, "--against", earlier], "--against .* has an arm 'sglang', too"),
        ([*ARMS, "--indexer", "nope"], "arm sglang: --indexer nope"),
        (["--policies", "vllm-ledger", "--rounds", "1"], "one arm only"),
    ):
        with pytest.raises(ConfigError, match=word):
            run(argv)


def test_a_refusal_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--policies", "sglang"])
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("glm_runtime: error: one arm only") and errors.count("\n") == 1


def test_help_names_workloads_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(
        word in text for word in ("interference", "shared-prefix", "random-ids", "--slo-ttft-ms", "3 answers differ")
    )
