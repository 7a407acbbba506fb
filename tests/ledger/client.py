"""What a test says to a server over HTTP, and what it hears.

replies = together(server, cases)        all at once, one thread a request; name -> Reply
events = stream(server, case)            token counts of each event of a stream
facts = settled(server)                  waits until nothing runs; the scheduler's totals
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.servers import Server

Json = dict[str, Any]
QUIET_LIMIT_S = 60.0


@dataclass(frozen=True)
class Case:
    """One request: greedy, ended by its length unless `sampling` says otherwise."""

    name: str
    ids: tuple[int, ...]
    new: int = 32
    logprobs: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> Json:
        """JSON of POST /generate."""
        sampling = {"temperature": 0.0, "max_new_tokens": self.new, "ignore_eos": True} | dict(self.sampling)
        body: Json = {"input_ids": list(self.ids), "sampling_params": sampling, "rid": self.name} | dict(self.more)
        if self.logprobs:
            body |= {"return_logprob": True, "logprob_start_len": 0}
        return body


@dataclass(frozen=True)
class Reply:
    """What came back. `finish`: SGLang's finish reason; {"type": "error"} with the text where the request failed."""

    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    cached: int
    finish: Json

    @classmethod
    def of(cls, answer: Json) -> Reply:
        """From the JSON of one answer."""
        meta = answer["meta_info"]
        return cls(
            tokens=list(answer.get("output_ids") or []),
            logprobs=[entry[0] for entry in meta.get("output_token_logprobs") or []],
            prompt_logprobs=[entry[0] for entry in (meta.get("input_token_logprobs") or [])[1:]],
            cached=meta.get("cached_tokens", 0),
            finish=meta["finish_reason"],
        )


def ask(server: Server, case: Case) -> Reply:
    """One request; an HTTP error becomes a reply."""
    try:
        answer = server.post("/generate", case.body())
    except urllib.error.HTTPError as error:
        return Reply([], [], [], 0, {"type": "error", "status": error.code, "text": error.read().decode()})
    return Reply.of(answer)


def together(server: Server, cases: Iterable[Case], meanwhile: Callable[[], object] | None = None) -> dict[str, Reply]:
    """All at once; `meanwhile` runs beside them in this thread."""
    cases = list(cases)
    with ThreadPoolExecutor(len(cases)) as pool:
        asked = {case.name: pool.submit(ask, server, case) for case in cases}
        if meanwhile is not None:
            meanwhile()
        return {name: future.result() for name, future in asked.items()}


def events(server: Server, case: Case) -> Iterator[Json]:
    """Events of a streamed answer, as they come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    try:
        connection.request(
            "POST", "/generate", json.dumps(case.body() | {"stream": True}), {"Content-Type": "application/json"}
        )
        for line in connection.getresponse():
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[6:])
    finally:
        connection.close()


def post(server: Server, path: str, body: Json | None = None) -> Any:
    """JSON of a POST where the answer is JSON, else its text."""
    text = server.raw(path, body or {})
    try:
        return json.loads(text)
    except ValueError:
        return text


def totals(server: Server) -> Json:
    """The scheduler's step totals and state."""
    return dict(server.get("/policy")["knobs"]["step_totals"])


def settled(server: Server) -> Json:
    """Wait until nothing runs or waits; then the totals. AssertionError where it does not settle."""
    end = time.monotonic() + QUIET_LIMIT_S
    while True:
        facts = totals(server)
        if not facts["running"] and not facts["waiting"]:
            return facts
        assert time.monotonic() < end, f"requests are left: {facts}"
        time.sleep(0.05)


def drained(server: Server) -> Json:
    """As `settled`; every KV token is free or cached, no request holds any, and the server is well."""
    facts = settled(server)
    kv = facts["kv_tokens"]
    assert kv["free"] + kv["cached"] == kv["total"], facts
    assert facts["requests_holding_kv"] == 0, facts
    server.raw("/health")
    return facts
