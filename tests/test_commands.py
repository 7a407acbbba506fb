"""The two commands: what make, scripts/install.py and scripts/serve.py say and how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.install import activity, size_mb
from scripts.serve import exit_code, is_taken

REPO = Path(__file__).resolve().parent.parent


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in the repository and keeps what it printed."""
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    surroundings |= environment
    return subprocess.run(command, cwd=REPO, env=surroundings, capture_output=True, text=True, timeout=120)


def test_help_names_both_commands() -> None:
    done = run("make")
    assert done.returncode == 0
    assert "make serve" in done.stdout
    assert "make test" in done.stdout


def test_an_old_python_is_refused_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.9.1;; *) exit 1;; esac\n')
    old.chmod(0o755)
    environment = tmp_path / "venv"
    done = run("make", "serve", f"PYTHON={old}", f"VENV={environment}")
    assert done.returncode != 0
    assert done.stdout == "Python 3.9.1 is too old, 3.11 or newer is needed: make PYTHON=python3.11\n"
    assert not environment.exists()


def test_a_missing_python_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run("make", "test", "PYTHON=no-such-python", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert done.stdout == "no no-such-python here: make PYTHON=/path/to/python3.11\n"


def test_ci_runs_make_test() -> None:
    done = run("make", "--dry-run", "test", "GLM_RUNTIME_SHARED=/nowhere")
    assert done.returncode == 0
    for step in ("ruff check", "ruff format --check", "mypy", "tests.golden", "pytest"):
        assert step in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].count("pytest") == 1
    script = REPO / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("Downloading torch-2.14.1-cp311.whl (0.9 GB)", 900.0),
        ("Downloading sglang-0.5.23.whl (39.1 MB)", 39.1),
        ("Downloading tiny.whl (500 kB)", 0.5),
        ("Collecting torch==2.14.1", 0.0),
        ("", 0.0),
    ],
)
def test_sizes_are_read_off_pips_lines(line: str, size: float) -> None:
    assert size_mb(line) == pytest.approx(size)


def test_what_pip_is_doing() -> None:
    assert activity("Installing collected packages: a, b, c") == "unpacking 3 packages"
    assert activity("Collecting torch") == "Collecting torch"
    assert activity("  noise") is None


def test_a_failing_install_shows_pips_words_and_its_code() -> None:
    done = run(sys.executable, "scripts/install.py", "--no-index", "./no-such-folder-here")
    assert done.returncode != 0
    assert "no-such-folder-here" in done.stdout
    assert "failed with code" in done.stdout.splitlines()[-1]


def test_codes_of_signals_are_those_of_a_shell() -> None:
    assert (exit_code(0), exit_code(3), exit_code(-9)) == (0, 3, 137)


def test_serve_refuses_a_taken_port_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert is_taken("127.0.0.1", port)
        done = run(sys.executable, "scripts/serve.py", "--port", str(port))
    assert done.returncode == 1
    assert done.stdout == f"[serve] port {port} is taken; choose another: make serve PORT={port + 1}\n"
    assert not is_taken("127.0.0.1", port)


def test_serve_tells_when_the_server_ends_before_it_is_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = ["--port", str(port), "--policy", "no-such-policy", "--model-path", "no-such-model"]
    done = run(sys.executable, "scripts/serve.py", *flags)
    assert done.returncode not in (0, -signal.SIGKILL)
    assert "before it was ready; its lines above say why" in done.stdout
    assert "glm_runtime: error: " in done.stderr
    assert "no-such-" in done.stderr
    assert "Traceback" not in done.stderr
