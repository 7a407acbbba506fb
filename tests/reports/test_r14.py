"""R14 (sglang#19881): a request that meets the end of the pool ends itself, not the server.

SGLang cuts `max_new_tokens` to what the pool can hold when the request arrives, and refuses a prompt above the pool.
Where nothing is left of the output, or a request outgrows the pool all the same, it ends with a reason.
"""

from __future__ import annotations

import pytest

from tests.equality.prompts import prompt
from tests.ledger.client import Case, ask, drained
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.mark.hall("storm")
@pytest.mark.parametrize("length", [800, 960, 1000, 1020, 1100])
def test_the_next_request_works(hall: Hall, length: int) -> None:
    server = hall.server("storm")
    reply = ask(server, Case(f"r14 {length}", tuple(prompt(length, "R14")), 500))
    if length == 800:
        assert reply.finish["type"] == "length"
        assert 1 <= len(reply.tokens) <= 1024 - length
    else:
        assert reply.finish["type"] == "error"
        assert str(length) in reply.finish["text"], reply.finish
    assert len(ask(server, Case("r14 next", tuple(prompt(60, "R14/next")), 16)).tokens) == 16
    drained(server)
