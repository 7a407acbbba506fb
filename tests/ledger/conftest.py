"""The hall, and this folder's tests in the order of its servers: `@pytest.mark.hall("storm")`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ledger.client import Reply
from tests.ledger.hall import SERVERS, Hall
from tests.ledger.hall import hall as the_hall

HERE = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hall(name): asks this server of tests/ledger/hall.py")


def _turn(item: pytest.Item) -> tuple[int, bool]:
    """Place of a test: its server, and first those that need the stock server's answers, which are asked once."""
    mark = item.get_closest_marker("hall")
    turn = -1 if mark is None else list(SERVERS).index(mark.args[0])
    return turn, "expected" not in getattr(item, "fixturenames", ())


def in_turn(items: list[pytest.Item], folder: Path) -> None:
    """Order a folder's tests by server, across modules; everybody else's stay where they are."""
    places = [i for i, item in enumerate(items) if item.path.parent == folder]
    ordered = sorted((items[i] for i in places), key=_turn)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """This folder's tests in the order of their servers."""
    in_turn(items, HERE)


@pytest.fixture(scope="package")
def hall() -> Iterator[Hall]:
    """Servers by name, one alive at a time."""
    yield the_hall()
    the_hall().close()


@pytest.fixture(scope="package")
def expected(hall: Hall) -> dict[str, Reply]:
    """What `--policy sglang` answers to every fixed case."""
    return hall.expected()
