"""R18 (sglang#26248): after a storm of preemptions everybody runs again, and the counters tell what it cost."""

from __future__ import annotations

import pytest

from tests.equality.prompts import prompt
from tests.ledger.client import Case, drained, together, totals
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.mark.hall("storm")
def test_running_recovers(hall: Hall) -> None:
    server = hall.server("storm")
    before = totals(server)
    storm = [Case(f"r18 storm{i}", tuple(prompt(30 + i, f"R18/{i}")), 150) for i in range(16)]
    together(server, storm)
    facts = drained(server)
    assert facts["preempted"] > before["preempted"]
    assert facts["recomputed_tokens"] > before["recomputed_tokens"]
    together(server, [Case(f"r18 quiet{i}", tuple(prompt(20 + i, f"R18/quiet/{i}")), 150) for i in range(4)])
    steps = hall.steps("storm", facts["steps"])
    assert sum(step["decode_rows"] == 4 for step in steps) >= 10  # they need not come at one moment
    assert sum(step["preempted"] for step in steps) == 0
    text = server.raw("/metrics")
    for name in ("sglang:num_retracted_requests_total", "glm_runtime:preemptions_total"):
        line = next(line for line in text.splitlines() if line.startswith(name))
        assert float(line.rsplit(" ", 1)[1]) == facts["preempted"], line
    drained(server)
