"""R11 (vllm#21809): two prompts over a pool for one do not evict each other for ever.

The report's numbers ten times over: a pool of 1,024, two prompts of 850, a budget of 64, no prefix cache. The pure
ledger plays the report's own numbers in tests/policies/ledger/test_reports.py.
"""

from __future__ import annotations

import pytest

from tests.equality.prompts import prompt
from tests.ledger.client import Case, drained, together, totals
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.mark.hall("priority")
def test_both_finish_without_restarting_each_other(hall: Hall) -> None:
    server = hall.server("priority")
    before = totals(server)
    replies = together(server, [Case(f"r11 {i}", tuple(prompt(850, f"R11/{i}")), 8) for i in range(2)])
    assert [len(reply.tokens) for reply in replies.values()] == [8, 8]
    assert drained(server)["preempted"] - before["preempted"] <= 2
