"""R70 (vllm-omni#5595): after the parent is killed the children are gone within 5 s and the port is free.

The same at tp 2 and during the start: tests/server/test_process_life.py.
"""

from __future__ import annotations

import pytest

from tests.server.conftest import Keeper
from tests.servers import Server, gone_within, port_is_free

pytestmark = pytest.mark.server


def test_r70(keeper: Keeper) -> None:
    keeper.end()
    server = Server().start()
    try:
        assert len(server.children()) >= 2
        assert server.process is not None
        server.process.kill()
        server.process.wait(10)
        assert gone_within(server.session, 5) == []
        assert port_is_free(server.port)
    finally:
        server.kill()
        server.log.unlink(missing_ok=True)
