"""R71 (sglang#38464): the policy is active in each process that needs it, and /server_info shows so.

A plugin that is missing in a child process must end the launch; it must never serve stock in silence.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from glm_runtime import report
from glm_runtime.config import RuntimeConfig
from glm_runtime.version import __version__
from tests.server.conftest import Keeper
from tests.servers import SMALL, launch

# Loaded by every Python process at its start: hides one entry-point group from the children that SGLang spawns.
HIDE = """
import importlib.metadata as metadata, sys
if any("spawn_main" in part for part in sys.orig_argv):
    original = metadata.entry_points
    def entry_points(**wanted):
        found = original(**wanted)
        if wanted.get("group") != "{group}":
            return found
        return metadata.EntryPoints(point for point in found if point.name != "glm_runtime")
    metadata.entry_points = entry_points
"""
REQUEST = RuntimeConfig(
    policy="sglang",
    slots={"scheduler": "sglang", "indexer": "ragged", "prefill_kv": "paged", "context_parallel": "interleave"},
    device="cpu",
)
REPORT: dict[str, Any] = {
    "policy": "sglang",
    "runtime_version": __version__,
    "device": "cpu",
    "slots": dict(REQUEST.slots),
}


@pytest.fixture
def asked() -> Any:
    """A published request."""
    REQUEST.publish()
    yield
    RuntimeConfig.retract()


def test_the_report_that_was_asked_for(asked: None) -> None:
    report.require(REPORT, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, ["rank 1 did not report a policy", "not active"]),
        ({"policy": "vllm-ledger"}, ["rank 1 reports policy 'vllm-ledger'", "asked was 'sglang'"]),
        ({"runtime_version": "0.0.0"}, ["runtime_version '0.0.0'"]),
        ({"device": "accelerator"}, ["device 'accelerator'"]),
        ({"slots": REQUEST.slots | {"indexer": "qchunk"}}, ["indexer 'qchunk'", "asked was 'ragged'"]),
        ({"slots": {}}, ["scheduler None", "asked was 'sglang'"]),
    ],
)
def test_every_difference_is_named(asked: None, change: dict[str, Any] | None, words: list[str]) -> None:
    with pytest.raises(report.PolicyNotActive) as raised:
        report.require(None if change is None else REPORT | change, 1)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.server
@pytest.mark.parametrize("group", ["sglang.srt.plugins", "sglang.srt.platforms"])
def test_a_plugin_missing_in_the_children_ends_the_launch(keeper: Keeper, tmp_path: Path, group: str) -> None:
    keeper.end()
    (tmp_path / "sitecustomize.py").write_text(HIDE.replace("{group}", group))
    path = os.pathsep.join(part for part in (str(tmp_path), os.environ.get("PYTHONPATH", "")) if part)
    run = launch(*SMALL, env={"PYTHONPATH": path})
    assert run.code == 1, run.errors[-2000:]
    assert run.left == []
    assert len(run.error_lines()) == 1
    assert run.errors.strip().splitlines()[-1] == run.error_lines()[0]


@pytest.mark.server
def test_the_users_own_plugin_list_does_not_switch_the_policy_off(keeper: Keeper) -> None:
    """SGLANG_PLUGINS filters platform plugins too."""
    keeper.end()
    from tests.servers import Server

    with Server("--policy", "sglang", env={"SGLANG_PLUGINS": "somebody_elses"}) as server:
        shown = server.get("/policy")
        assert (shown["policy"], shown["device"]) == ("sglang", "cpu")
        assert server.get("/server_info")["internal_states"][0]["glm_runtime"] == shown
