"""Field reports: each file names the report it plays, on a running engine of `tests/equality/stage.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.equality.stage import Stage
from tests.ledger.conftest import hall, in_turn, pytest_configure
from tests.server.conftest import Keeper

__all__ = ["hall", "pytest_configure"]

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order this folder's tests by ledger server; those that ask none come first."""
    in_turn(items, HERE)


@pytest.fixture(scope="package")
def stage() -> Iterator[Stage]:
    """Engines by name, one alive at a time."""
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    """A stock server, gone before the next report's begins."""
    keeper = Keeper()
    yield keeper
    keeper.end()
