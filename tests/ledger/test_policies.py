"""Scheduling policy by priority, cache off, the pool's last request, and steps sized by time."""

from __future__ import annotations

import time

import pytest

from tests.equality.prompts import prompt
from tests.ledger.cases import STORM, penalised
from tests.ledger.client import Case, Reply, ask, drained, settled, together, totals
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.mark.hall("priority")
def test_low_values_go_first_and_last_out(hall: Hall, expected: dict[str, Reply]) -> None:
    """A full pool, priorities mixed: tokens equal; the important ones are preempted less often."""
    server = hall.server("priority")
    cases = [case for case in STORM if not penalised(case)]
    asked = [
        Case(case.name, case.ids, 160, case.logprobs, case.sampling, {"priority": i % 2 * 5})
        for i, case in enumerate(cases)
    ]
    before = totals(server)["steps"]
    found = together(server, asked)
    for case in cases:
        assert found[case.name].tokens == expected[case.name].tokens, case.name
    facts = drained(server)
    assert facts["preempted"] > 0
    steps = hall.steps("priority", before)
    last = {name: step["number"] for step in steps for name in step["rows"]}
    ends = {p: [last[case.name] for case in asked if case.more["priority"] == p] for p in (0, 5)}
    assert sum(ends[0]) / len(ends[0]) < sum(ends[5]) / len(ends[5])


@pytest.mark.hall("priority")
def test_no_priority_is_priority_zero(hall: Hall) -> None:
    """vLLM's rule: a request that names none goes before one of priority 1."""
    server = hall.server("priority")
    # NOTE: SGLang keeps a page beside a prompt's own pages free; a longer prompt would be left no room for output.
    first = Case("first in", tuple(prompt(700, "ledger/p0")), 200)
    rest = [Case("late", tuple(prompt(500, "ledger/p1")), 4, more={"priority": 1})]
    rest += [Case("unnamed", tuple(prompt(500, "ledger/p2")), 4)]
    facts = settled(server)

    def rest_while_it_decodes() -> None:
        """Its prompt leaves the pool no room for theirs, so both of the rest wait, whichever comes in earlier."""
        end = time.monotonic() + 30
        while totals(server)["decode_rows"] == facts["decode_rows"]:
            assert time.monotonic() < end, "the first request never decoded"
            time.sleep(0.01)
        assert all(len(reply.tokens) == 4 for reply in together(server, rest).values())

    replies = together(server, [first], rest_while_it_decodes)
    assert len(replies["first in"].tokens) == 200
    steps = hall.steps("priority", facts["steps"])
    started = {name: step["number"] for step in reversed(steps) for name in step["rows"]}
    assert started["first in"] < started["unnamed"] < started["late"]
    drained(server)


@pytest.mark.hall("priority")
def test_a_prompt_above_the_pool_is_refused_and_the_next_one_works(hall: Hall) -> None:
    server = hall.server("priority")
    reply = ask(server, Case("too long", tuple(prompt(1100, "ledger/long")), 8))
    assert reply.finish["type"] in ("error", "abort")
    assert "1100" in str(reply.finish) or "1,100" in str(reply.finish), reply.finish
    assert len(ask(server, Case("next", tuple(prompt(50, "ledger/next")), 8)).tokens) == 8
    drained(server)


@pytest.mark.hall("paced")
def test_steps_are_sized_by_time(hall: Hall) -> None:
    """The model learns from real steps; a step above the floor is one that it thinks within the target."""
    server = hall.server("paced")
    cases = [Case(f"paced{i}", tuple(prompt(n, f"ledger/paced/{i}")), 40) for i, n in enumerate((4000, 3000, 20, 20))]
    assert all(len(reply.tokens) == 40 for reply in together(server, cases).values())
    facts = drained(server)
    model = facts["step_time"]
    assert model["target_ms"] == 200
    assert model["steps"] == facts["steps"]
    assert any(model["coefficients"])
    steps = hall.steps("paced")
    forecast = [step for step in steps if step["predicted_ms"] is not None]
    assert len(forecast) >= len(steps) - 2
    floor = 64  # rows that a step may always take, whatever the forecast
    sized = [step for step in forecast if step["prefill_tokens"] > floor]
    assert all(step["predicted_ms"] <= 200 * 1.001 for step in sized), "a forecast above the target was chosen"
    assert all(step["prefill_tokens"] >= floor for step in steps if step["chunks"] and step["admitted"] == 0)
    assert len({step["prefill_tokens"] for step in steps}) > 2, "the steps were not sized one by one"
    model = settled(server)["step_time"]
    text = server.raw("/metrics")
    line = next(line for line in text.splitlines() if line.startswith("glm_runtime:step_time_error"))
    assert float(line.rsplit(" ", 1)[1]) == pytest.approx(model["error"], rel=1e-3)
