"""R39 (sglang#37295): a request aborted while a chunk is in flight says nothing more, once, and leaks no KV."""

from __future__ import annotations

import time

import pytest

from tests.equality.prompts import prompt
from tests.ledger.client import Case, ask, drained, post, together, totals
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.mark.hall("narrow")
def test_abort_at_every_chunk(hall: Hall) -> None:
    """Nine chunks; the abort comes after each of them in turn, the last one included."""
    server = hall.server("narrow")
    solo = ask(server, Case("r39 solo", tuple(prompt(1100, "R39")), 8)).tokens
    aborted = 0
    for chunk in range(10):
        post(server, "/flush_cache")
        case = Case(f"r39 {chunk}", tuple(prompt(1100, "R39")), 8)
        start = totals(server)["steps"]

        def strike(start: int = start, chunk: int = chunk, name: str = case.name) -> None:
            end = time.monotonic() + 10
            while totals(server)["steps"] < start + chunk and time.monotonic() < end:
                time.sleep(0.002)
            post(server, "/abort_request", {"rid": name})

        reply = together(server, [case], strike)[case.name]
        assert reply.tokens == solo[: len(reply.tokens)]
        assert reply.finish["type"] in ("abort", "error", "length")
        aborted += reply.finish["type"] != "length"
        drained(server)
    assert aborted >= 5
