"""One engine at a time, tests in the order of their engines: `@pytest.mark.slots("tp2")`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from glm_runtime.model import ensure
from tests import oracle
from tests.equality.prompts import LENGTHS, NEW, prompt
from tests.slots.engines import ENGINES, Engines

HERE = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slots(name): asks this engine of tests/slots/engines.py")


def _turn(item: pytest.Item) -> int:
    mark = item.get_closest_marker("slots")
    return -1 if mark is None else list(ENGINES).index(mark.args[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order this folder's tests by engine; everybody else's stay where they are."""
    places = [i for i, item in enumerate(items) if item.path.parent == HERE]
    ordered = sorted((items[i] for i in places), key=_turn)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


@pytest.fixture(scope="package")
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.close()


@pytest.fixture(scope="package")
def expected() -> dict[int, list[int]]:
    """transformers' greedy tokens for every prompt length, float32; kept on disk by the oracle."""
    folder = ensure("tiny")
    return {length: oracle.greedy(folder, prompt(length), NEW).tokens for length in LENGTHS}
