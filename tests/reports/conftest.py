"""Field reports: each file names the report it plays, on a running engine or server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.conftest import Keeper


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    """A stock server, gone before the next report's begins."""
    keeper = Keeper()
    yield keeper
    keeper.end()
