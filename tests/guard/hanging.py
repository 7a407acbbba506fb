"""Clients that hang up: who asks what, and what the scheduler's own record says afterwards."""

from __future__ import annotations

import http.client
import json
import socket
import time
from typing import Any

from tests.servers import Server

MOMENT_S = 0.1
SAMPLING = {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"model": "m", "messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"input_ids": [5, 6, 7], "sampling_params": SAMPLING}),
    ("/generate", {"input_ids": [5, 6, 7], "sampling_params": SAMPLING, "stream": True}),
    ("/generate", {"text": ["a", "b"], "sampling_params": SAMPLING | {"max_new_tokens": 1000, "n": 2}}),
    ("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 4000, "ignore_eos": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True}),
]


def hang_up(server: Server, path: str, body: dict[str, Any]) -> float:
    """Ask, wait until it decodes, close the connection; the time of that on the monotonic clock."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    end = time.monotonic() + 60
    before = server.get("/steps?last=1")["steps"]
    while True:
        steps = server.get("/steps?last=1")["steps"]
        if steps and steps != before and steps[-1]["decode_rows"]:
            break
        assert time.monotonic() < end, "it does not decode"
    time.sleep(0.2)
    closed = time.monotonic()
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    return closed


def steps_after(server: Server, moment: float) -> list[dict[str, Any]]:
    """Steps that began after `moment`."""
    return [step for step in server.get("/steps?last=128")["steps"] if step["at"] > moment]
