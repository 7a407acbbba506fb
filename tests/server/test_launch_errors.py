"""Bad input: one clear line, exit code not 0, no traceback, no process left, the port free."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glm_runtime.model import ensure
from tests.servers import SMALL, Run, free_port, launch, port_is_free


@pytest.fixture(scope="module")
def tiny() -> Path:
    """The embedded model."""
    return Path(ensure("tiny"))


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the embedded model that a test may damage."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def change(model: Path, **changes: Any) -> None:
    """Write changed keys into config.json; None removes a key."""
    file = model / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def refused(run: Run, *words: str, code: int = 2) -> None:
    """The launch ended as it should: one line, and the words are in it."""
    assert run.errors.count("\n") == 1, run.errors
    assert run.errors.startswith("glm_runtime: error: "), run.errors
    for word in words:
        assert word in run.errors, (word, run.errors)
    assert run.code == code
    assert run.left == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policy", "nonsense"], ["--policy nonsense", "known: sglang"]),
        (["--scheduler", "nonsense"], ["--scheduler nonsense", "sglang"]),
        (["--indexer", "nonsense"], ["--indexer nonsense", "ragged"]),
        (["--prefill-kv", "nonsense"], ["--prefill-kv nonsense", "paged"]),
        (["--cp-split", "nonsense"], ["--cp-split nonsense", "interleave"]),
        (["--policy"], ["--policy"]),
        (["--policy", "sglang", "--policy", "other"], ["--policy is given twice", "sglang", "other"]),
        (["--indexer-scratch-mb", "0"], ["--indexer-scratch-mb", "0"]),
        (["--indexer-scratch-mb", "many"], ["--indexer-scratch-mb", "many"]),
        (["--cpu-threads", "-1"], ["--cpu-threads", "-1"]),
        (["-pcp", "0"], ["--prefill-context-parallel-size 0"]),
        (["--port", "0"], ["--port 0"]),
        (["--port", "70000"], ["--port 70000"]),
        (["--device", "cuda", "--cpu-threads", "2"], ["--cpu-threads", "CPU only"]),
        (["--model-path", "/no/such/folder"], ["--model-path /no/such/folder", "no such folder"]),
        (["--config", "nowhere.yaml"], ["--config nowhere.yaml", "no such file"]),
        (["--config"], ["--config", "no file"]),
        (["--json-model-override-args", '{"q_lora_rank": 64}'], ["q_a_proj.weight has shape [128, 256]", "[64, 256]"]),
        (["--json-model-override-args", "{"], ["--json-model-override-args does not read"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_refused_before_sglang_is_loaded(flags: list[str], words: list[str]) -> None:
    refused(launch(*flags), *words)


def test_threads_from_the_environment_are_checked() -> None:
    refused(launch(env={"OMP_NUM_THREADS": "all"}), "OMP_NUM_THREADS", "all")


def test_the_launcher_is_quick_to_load() -> None:
    """A child process loads it first, and asks only then to die with its parent."""
    code = "import sys, glm_runtime.launch_server; print([m for m in ('sglang', 'torch', 'numba') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_another_platform_in_the_environment() -> None:
    refused(launch(env={"SGLANG_PLATFORM": "theirs"}), "SGLANG_PLATFORM=theirs", "unset it")


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    refused(launch("--model-path", str(tmp_path)), str(tmp_path), "config.json")
    file = tmp_path / "weights.bin"
    file.write_bytes(b"0")
    refused(launch("--model-path", str(file)), "not a model folder")


def test_another_kind_of_model(model: Path) -> None:
    change(model, architectures=["LlamaForCausalLM"])
    refused(launch("--model-path", str(model)), "LlamaForCausalLM", "GLM-MoE-DSA", "sglang.launch_server")


def test_port_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused(launch("--port", str(port)), f"--port {port}", "choose another")


@pytest.mark.server
def test_help_shows_ours_on_top_and_sglangs_below() -> None:
    run = launch("--help")
    assert run.code == 0
    ours, theirs = run.output.split("SGLang's own flags")
    for flag in ("--policy NAME", "--list-policies", "--indexer", "--cp-split", "-pcp"):
        assert flag in ours, flag
    for flag in ("--model-path", "--tensor-parallel-size", "--chunked-prefill-size"):
        assert flag in theirs, flag


@pytest.mark.server
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--context-length", "999999"], ["--context-length 999999", "32768"]),
        (["--attention-backend", "triton"], ["--attention-backend triton", "--device cpu"]),
        (["-pcp", "2", "--enable-lora"], ["--enable-lora", "--prefill-context-parallel-size 2", "drop one"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_refused_by_what_sglang_reads(flags: list[str], words: list[str]) -> None:
    refused(launch(*flags), *words)


@pytest.mark.server
def test_a_failure_inside_a_child_ends_with_its_reason() -> None:
    """An option of the weight loader that it does not know: found by the scheduler, while it loads."""
    port = free_port()
    run = launch("--model-loader-extra-config", '{"nonsense": 1}', "--port", str(port), *SMALL)
    assert run.code == 1, run.errors[-2000:]
    assert run.left == []
    assert port_is_free(port)
    lines = run.errors.strip().splitlines()
    assert lines[-1].startswith("glm_runtime: error: "), run.errors[-2000:]
    assert len(run.error_lines()) == 1
    assert "nonsense" in lines[-1]
