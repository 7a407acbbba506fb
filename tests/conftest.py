"""Shared by all tests: one thread per process, and where the shared data lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# NOTE: before torch is imported anywhere; oversubscribed OpenMP threads cost a factor of 40 on a small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPO = Path(__file__).resolve().parent.parent


def shared_root() -> Path:
    """Folder of the shared data: GLM_RUNTIME_SHARED, else ``shared`` beside the repository."""
    return Path(os.environ.get("GLM_RUNTIME_SHARED") or REPO.parent / "shared")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared folder; skips the test where it is absent."""
    root = shared_root()
    if not root.is_dir():
        pytest.skip(f"shared data absent: {root} (set GLM_RUNTIME_SHARED)")
    return root


@pytest.fixture(scope="session")
def golden_dir(shared: Path) -> Path:
    """Folder of the golden vectors; skips the test where it is absent."""
    folder = shared / "golden"
    if not folder.is_dir():
        pytest.skip(f"golden vectors absent: {folder}")
    return folder
