"""The stage, the oracle's answers, and tests in the order of their engines: `@pytest.mark.engine("chunked")`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from glm_runtime.model import ensure
from tests.equality.prompts import LENGTHS, NEW, prompt
from tests.equality.stage import FLAGS, Stage

HERE = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine(name): asks this engine of tests/equality/stage.py")


def _turn(item: pytest.Item) -> int:
    mark = item.get_closest_marker("engine")
    return -1 if mark is None else list(FLAGS).index(mark.args[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order this folder's tests by engine, across modules; everybody else's stay where they are."""
    places = [i for i, item in enumerate(items) if item.path.parent == HERE]
    ordered = sorted((items[i] for i in places), key=_turn)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


@pytest.fixture(scope="package")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture(scope="session")
def folder() -> Path:
    """The embedded tiny model."""
    return ensure("tiny")


@pytest.fixture(scope="session")
def expected(folder: Path) -> dict[int, list[int]]:
    """transformers' greedy tokens for every prompt length, float32; kept on disk by the oracle."""
    from tests import oracle

    return {length: oracle.greedy(folder, prompt(length), NEW).tokens for length in LENGTHS}
