"""`glm_runtime.Engine`: the server's arguments in a program; refusals are exceptions; one engine after another."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.server.conftest import Keeper
from tests.servers import Run, launch

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def done(keeper: Keeper) -> Run:
    """The run of engine_run.py."""
    keeper.end()
    return launch(command=(sys.executable, "-m", "tests.server.engine_run"), limit_s=500)


@pytest.fixture(scope="module")
def result(done: Run) -> dict[str, Any]:
    """What it printed."""
    lines = [line for line in done.output.splitlines() if line.startswith("RESULT ")]
    assert lines, done.errors[-3000:]
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def test_it_ends_well_and_alone(done: Run) -> None:
    assert done.code == 0
    assert done.left == []


def test_shutdown_is_quiet(done: Run) -> None:
    """Python's resource tracker is not killed with the children; the one traceback is that of the failing child."""
    assert "resource_tracker" not in done.errors
    assert "KeyError" not in done.errors


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("policy", ["PolicyError", "--policy nonsense", "known: sglang"]),
        ("indexer", ["PolicyError", "--indexer nonsense"]),
        ("path", ["ConfigError", "--model-path /no/such/folder"]),
        ("threads", ["ConfigError", "--cpu-threads"]),
        ("page_size", ["ConfigError", "--page-size 16"]),
        ("unknown", ["ConfigError", "no_such_argument"]),
        ("context", ["ConfigError", "--context-length 1000000"]),
        ("second_at_once", ["ConfigError", "still running"]),
        ("heads", ["ConfigError", "q_b_proj.weight has shape"]),
        ("child", ["ChildFailed", "nonsense"]),
    ],
)
def test_refusals(result: dict[str, Any], name: str, words: list[str]) -> None:
    for word in words:
        assert word in result[name], result[name]


def test_engine_after_engine(result: dict[str, Any]) -> None:
    assert [len(ids) for ids in result["first"]] == [8, 8]
    assert result["first"] == result["still"] == result["again"]
    assert result["restored"]


def test_the_report_is_the_schedulers(result: dict[str, Any]) -> None:
    (report,) = result["report"]
    assert report["policy"] == "sglang"
    assert report["knobs"]["indexer_scratch_mb"] == 32
    assert report["knobs"]["max_total_num_tokens"] == 4096


def test_the_scheduler_changes_in_place(result: dict[str, Any]) -> None:
    assert result["switch"]["changed"]
    assert result["switch"]["switch"]["active"] == "ledger"
    assert result["switched"] == result["first"]
