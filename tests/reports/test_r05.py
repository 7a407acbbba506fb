"""R05 (local-inference-lab/vllm#541): the step's size decides, so no step is larger than its budget."""

from __future__ import annotations

import pytest

from tests.equality.prompts import prompt
from tests.ledger.client import Case, drained, together, totals
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.mark.parametrize(
    ("name", "budget", "length"),
    [
        pytest.param("narrow", 128, 6400, marks=pytest.mark.hall("narrow")),
        pytest.param("plain", 32, 1920, marks=pytest.mark.hall("plain")),
    ],
)
def test_steps_stay_within_the_budget(hall: Hall, name: str, budget: int, length: int) -> None:
    """One stream, and a prompt of 50 budgets or more beside it."""
    server = hall.server(name)
    before = totals(server)["steps"]
    stream, long = Case("r05 stream", tuple(prompt(20, "R05")), 60), Case("r05 long", tuple(prompt(length, "R05")), 2)
    replies = together(server, [stream, long])
    assert [len(reply.tokens) for reply in replies.values()] == [60, 2]
    steps = hall.steps(name, before)
    assert max(sum(step["rows"].values()) for step in steps) <= budget
    assert sum("r05 long" in step["rows"] for step in steps) >= length // budget
    drained(server)
