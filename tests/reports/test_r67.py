"""R67 (sglang#9396): of two launches on one port exactly one goes on, and the other says which port is taken.

Different ports at once: tests/server/test_process_life.py. The survivor is ended by two SIGTERMs: the second at once.
"""

from __future__ import annotations

import signal
import time

import pytest

from tests.server.conftest import Keeper
from tests.servers import Server, gone_within, port_is_free

pytestmark = [pytest.mark.slow, pytest.mark.server]


def pair() -> tuple[Server, Server]:
    """The survivor and the loser of two launches on one port."""
    first, second = Server(), Server()
    second.port, second.url = first.port, first.url
    first.begin()
    second.begin()
    assert first.process is not None and second.process is not None
    end = time.monotonic() + 120
    while first.process.poll() is None and second.process.poll() is None:
        assert time.monotonic() < end, "both go on"
        time.sleep(0.05)
    if first.process.poll() is not None:
        first, second = second, first
    return first, second


def test_one_port_two_launches(keeper: Keeper) -> None:
    keeper.end()
    for last in (False, False, True):
        survivor, loser = pair()
        try:
            assert loser.process is not None and survivor.process is not None
            assert loser.process.returncode == 2
            (line,) = [line for line in loser.log.read_text().splitlines() if line.startswith("glm_runtime: error: ")]
            assert f"--port {survivor.port}" in line
            assert survivor.process.poll() is None
            if last:
                survivor.wait_ready()
                assert len(survivor.generate("the survivor serves", 2)) == 2
                _end_at_once(survivor)
        finally:
            for server in (survivor, loser):
                server.kill()
                server.log.unlink(missing_ok=True)


def _end_at_once(server: Server) -> None:
    """A request is running; the drain would take half a minute."""
    assert server.process is not None
    body = {"text": "a", "sampling_params": {"max_new_tokens": 30000, "ignore_eos": True}, "stream": True}
    import http.client
    import json

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().status == 200
    server.process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 128 + signal.SIGTERM
    assert gone_within(server.session, 5) == []
    assert port_is_free(server.port)
    connection.close()
