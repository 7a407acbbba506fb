"""The GPU backend against SGLang's real base class, in a process of its own: it publishes a server's arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="sglang is not installed")

REPO = Path(__file__).resolve().parents[2]


def test_the_backend_on_cpu_tensors() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/attention/cuda_backend_run.py"],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
