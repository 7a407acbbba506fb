"""The engines of the slot tests and the oracle's answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from glm_runtime.model import ensure
from tests import oracle
from tests.equality.prompts import LENGTHS, NEW, prompt
from tests.slots.engines import Engines


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def expected() -> dict[int, list[int]]:
    """transformers' greedy tokens for every prompt length, float32; kept on disk by the oracle."""
    folder = ensure("tiny")
    return {length: oracle.greedy(folder, prompt(length), NEW).tokens for length in LENGTHS}
