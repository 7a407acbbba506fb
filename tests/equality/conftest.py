"""The embedded model and the oracle's answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_runtime.model import ensure
from tests.equality.prompts import LENGTHS, NEW, prompt


@pytest.fixture(scope="session")
def folder() -> Path:
    """The embedded tiny model."""
    return ensure("tiny")


@pytest.fixture(scope="session")
def expected(folder: Path) -> dict[int, list[int]]:
    """transformers' greedy tokens for every prompt length, float32; kept on disk by the oracle."""
    from tests import oracle

    return {length: oracle.greedy(folder, prompt(length), NEW).tokens for length in LENGTHS}
