"""Asking a live server for what it has to refuse, and watching a neighbour meanwhile.

status, answer = ask(server, "/generate", {...})          JSON in, status and JSON out, whatever the status
error = refused(server, "/generate", {...})               400, valid JSON with field, value and bound
with Neighbour(server) as neighbour: ...                  a stream runs beside; afterwards it equals itself alone
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from types import TracebackType
from typing import Any

from tests.servers import Server

Json = dict[str, Any]


def ask(
    server: Server, path: str, body: Any = None, *, raw: bytes | None = None, method: str = "POST"
) -> tuple[int, str]:
    """Status and text of an answer. `raw` is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        data = raw if raw is not None else json.dumps(body).encode()
        connection.request(method, path, None if method == "GET" else data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def strict(text: str) -> Any:
    """JSON as the standard has it: NaN and Infinity are none."""

    def no_constant(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=no_constant)


def refused(server: Server, path: str, body: Any = None, *, raw: bytes | None = None) -> Json:
    """The "error" of a 400, with the four names that each has."""
    status, text = ask(server, path, body, raw=raw)
    assert status == 400, (status, text[:300], body)
    error = dict(strict(text)["error"])
    assert {"message", "field", "value", "bound"} <= set(error), error
    assert error["message"]
    return error


class Neighbour:
    """A greedy stream beside what a test does; its tokens equal those that it has alone."""

    def __init__(self, server: Server, tokens: int = 400) -> None:
        self.server = server
        self.body = {
            "input_ids": [9, 8, 7, 6, 5],
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "stream": True,
        }
        self.tokens: list[int] = []
        self.ends: list[Any] = []
        self.events = 0
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def _listen(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=300)
        connection.request("POST", "/generate", json.dumps(self.body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                self.events += 1
                self.tokens = event["output_ids"]
                if event["meta_info"]["finish_reason"] is not None:
                    self.ends.append(event["meta_info"]["finish_reason"])
        connection.close()

    def alone(self) -> list[int]:
        """Its tokens without anybody else."""
        return list(self.server.post("/generate", self.body | {"stream": False})["output_ids"])

    def __enter__(self) -> Neighbour:
        self._thread.start()
        end = time.monotonic() + 60
        while not self.events:
            assert time.monotonic() < end, "the neighbour's stream does not begin"
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join(240)
        if kind is None:
            assert [end["type"] for end in self.ends] == ["length"], self.ends
            assert self.tokens == self.alone()
