"""Shared by all tests: one thread per process, where the shared data lies, and who runs with whom.

A test that asks a shared engine or server says so by a mark: engine("chunked") of tests/equality/stage.py, slots("tp2")
of tests/slots/engines.py, hall("storm") of tests/ledger/hall.py. The order lets each of them start once. With `-n 2`
two workers share the suite; what shares a server stays in one worker:

    marked engine / slots / hall (name)   all tests of that name
    marked together (name)                the same
    tests/server                          the folder
    all others                            the module
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.equality.stage import FLAGS, Stage
from tests.ledger.hall import SERVERS, Hall
from tests.ledger.hall import hall as the_hall
from tests.slots.engines import ENGINES

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


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """Engines by name."""
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture(scope="session")
def hall() -> Iterator[Hall]:
    """Servers by name."""
    yield the_hall()
    the_hall().close()


# Marker -> its names, in the order in which they are asked.
TURNS: dict[str, list[str]] = {"engine": list(FLAGS), "slots": list(ENGINES), "hall": list(SERVERS)}


def turn(item: pytest.Item) -> tuple[str, str] | None:
    """Marker and name of the engine or server that a test shares with others."""
    for kind in TURNS:
        mark = item.get_closest_marker(kind)
        if mark is not None:
            return kind, mark.args[0]
    return None


def place(item: pytest.Item) -> tuple[int, ...]:
    """Key of the order: servers of one test or module, shared ones in turn, then what needs none.

    Of a hall's tests those that need the stock server's answers come first: that server is asked once.
    """
    if item.get_closest_marker("server") is None:
        return (2,)
    shared = turn(item)
    if shared is None:
        return (0,)
    kind, name = shared
    return (1, list(TURNS).index(kind), TURNS[kind].index(name), "expected" not in getattr(item, "fixturenames", ()))


def worker_group(item: pytest.Item) -> str:
    """Name of the group of tests that must run in one worker."""
    together = item.get_closest_marker("together")
    if together is not None:
        return str(together.args[0])
    shared = turn(item)
    if shared is not None:
        return "-".join(shared)
    folder = item.path.parent.name
    return folder if folder == "server" else f"{folder}-{item.path.stem}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests in their order and tell pytest-xdist, where it runs them, which of them belong together."""
    items.sort(key=place)
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(worker_group(item)))
