"""The stock server's answers, which the ledger's must equal."""

from __future__ import annotations

import pytest

from tests.ledger.client import Reply
from tests.ledger.hall import Hall


@pytest.fixture(scope="session")
def expected(hall: Hall) -> dict[str, Reply]:
    """What `--policy sglang` answers to every fixed case."""
    return hall.expected()
