"""R16 (sglang#14972): preemption under the overlap schedule and without it: no failed allocation, tokens as alone."""

from __future__ import annotations

import pytest

from tests.equality.prompts import prompt
from tests.ledger.client import Case, ask, drained, post, together, totals
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.hall(name)) for name in ("storm", "storm32")])
def test_a_pool_for_three_of_six(hall: Hall, name: str) -> None:
    """Six requests that end at five pages each; the pool has sixteen."""
    server = hall.server(name)
    cases = [Case(f"r16 {i}", tuple(prompt(64 + i, f"R16/{i}")), 250) for i in range(6)]
    alone = {case.name: ask(server, case).tokens for case in cases}
    post(server, "/flush_cache")
    before = totals(server)["preempted"]
    assert {case: reply.tokens for case, reply in together(server, cases).items()} == alone
    assert drained(server)["preempted"] > before
