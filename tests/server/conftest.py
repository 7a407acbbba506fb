"""One server at a time, shared by the tests that want the same flags."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import alone
from tests.servers import Server


class Keeper:
    """Keeps the server of the last asked flags alive; another set of flags ends it first."""

    def __init__(self) -> None:
        self.flags: tuple[str, ...] | None = None
        self.server: Server | None = None

    def get(self, *flags: str) -> Server:
        """The running server with exactly these flags."""
        if self.flags != flags or self.server is None:
            self.end()
            alone.take(self.end)
            self.server, self.flags = Server(*flags), flags
            try:
                self.server.start()
            except BaseException:
                self.end()
                raise
        return self.server

    def end(self) -> None:
        """Stop the server, if any: a test that starts processes of its own wants the machine for itself."""
        if self.server is not None:
            self.server.stop()
            self.server.log.unlink(missing_ok=True)
        self.server, self.flags = None, None


@pytest.fixture(scope="session")
def keeper() -> Iterator[Keeper]:
    """Access to the one shared server."""
    keeper = Keeper()
    yield keeper
    keeper.end()


@pytest.fixture
def server(keeper: Keeper) -> Server:
    """The stock server with metrics."""
    return keeper.get("--policy", "sglang", "--enable-metrics")
