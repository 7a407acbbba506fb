"""When the CPU platform is chosen, and that SGLang stays untouched where nobody asked for it."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from glm_runtime import prepare
from glm_runtime.config import ENV, RuntimeConfig
from tests.servers import launch

PROBE = """
import json
from glm_runtime import config
import sglang.srt.platforms as platforms
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
from sglang.srt.arg_groups import model_hook
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.entrypoints.http_server import app
from glm_runtime import plugin
print("RESULT " + json.dumps({
    "asked": config.asked() is not None,
    "device": getattr(platforms.current_platform, "device_name", None),
    "active": plugin.active,
    "hooked": [
        getattr(target, "__module__", "") for target in (
            model_hook.handle_model_specific_adjustments, Scheduler.get_init_info, Scheduler.get_internal_state
        ) if hasattr(target, "__wrapped__")
    ],
    "route": any(getattr(route, "path", None) == "/policy" for route in app.routes),
}))
"""


def fake_accelerator(monkeypatch: pytest.MonkeyPatch, name: str, usable: bool) -> None:
    """Let torch tell that an accelerator is or is not there."""
    module = getattr(torch, name, None)
    if module is None or not hasattr(module, "is_available"):
        pytest.skip(f"this torch has no {name}")
    monkeypatch.setattr(module, "is_available", lambda: usable)


def test_chosen_by_itself_where_no_accelerator_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "xpu", "mps"):
        if hasattr(torch, name):
            fake_accelerator(monkeypatch, name, False)
    assert prepare.accelerator() is None
    assert prepare.choose_device(None) == "cpu"


@pytest.mark.parametrize("name", ["cuda", "xpu", "mps"])
def test_never_where_one_is(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake_accelerator(monkeypatch, name, True)
    assert prepare.accelerator() is not None
    assert prepare.choose_device(None) == "accelerator"
    assert prepare.choose_device("cpu") == "cpu"
    assert prepare.choose_device("cuda:0") == "accelerator"


def test_activation_follows_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm_runtime.platform import activate

    monkeypatch.delenv(ENV, raising=False)
    assert activate() is None
    for device, wanted in (("cpu", "glm_runtime.platform.CpuPlatform"), ("accelerator", None)):
        RuntimeConfig(policy="sglang", slots={}, device=device).publish()
        assert activate() == wanted
    RuntimeConfig.retract()
    assert activate() is None


@pytest.mark.slow
def test_somebody_elses_sglang_stays_untouched() -> None:
    """The package is installed and its plugins are found, but nobody asked: stock platform, no hook, no route."""
    run = launch(command=(sys.executable, "-c", PROBE), env={ENV: None, "SGLANG_PLUGINS": None})
    lines = [line for line in run.output.splitlines() if line.startswith("RESULT ")]
    assert lines, run.errors[-2000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    assert found == {"asked": False, "device": found["device"], "active": False, "hooked": [], "route": False}
    assert found["device"] != "glm_cpu"


@pytest.mark.slow
def test_the_probe_sees_a_patched_sglang() -> None:
    """The same probe under a request finds all of it: the test above can fail."""
    request = RuntimeConfig(
        policy="sglang",
        slots={"scheduler": "sglang", "indexer": "ragged", "prefill_kv": "paged", "context_parallel": "interleave"},
        device="cpu",
        threads=1,
        indexer_scratch_mb=8,
    )
    import msgspec

    run = launch(command=(sys.executable, "-c", PROBE), env={ENV: msgspec.json.encode(request).decode()})
    lines = [line for line in run.output.splitlines() if line.startswith("RESULT ")]
    assert lines, run.errors[-2000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    assert found["asked"] and found["active"] and found["route"]
    assert found["device"] == "glm_cpu"
    assert len(found["hooked"]) == 3
