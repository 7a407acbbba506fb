"""Shared by all tests: one thread per process, where the shared data lies, and who runs with whom.

With `-n 2` two workers share the suite. What shares a server stays in one worker, in its order:

    marked together (name)                tests of that name, of any folder
    marked engine / slots / hall (name)   the folder's tests of that name
    tests/server                          the folder
    all others                            the module
"""

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


SERVER_MARKS = ("engine", "slots", "hall")


def worker_group(item: pytest.Item) -> str:
    """Name of the group of tests that must run in one worker."""
    folder = item.path.parent.name
    together = item.get_closest_marker("together")
    if together is not None:
        return str(together.args[0])
    for name in SERVER_MARKS:
        mark = item.get_closest_marker(name)
        if mark is not None:
            return f"{folder}-{mark.args[0]}"
    return folder if folder == "server" else f"{folder}-{item.path.stem}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tell pytest-xdist, where it runs the tests, which of them belong together."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(worker_group(item)))
