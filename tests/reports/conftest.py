"""Field reports: each file names the report it plays, on a running engine of `tests/equality/stage.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.equality.stage import Stage


@pytest.fixture(scope="package")
def stage() -> Iterator[Stage]:
    """Engines by name, one alive at a time."""
    stage = Stage()
    yield stage
    stage.close()
