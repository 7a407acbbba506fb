"""R07 (sglang#2158, #1850): in a mixed step under overlap, a decode row's token and logprob are its own."""

from __future__ import annotations

import pytest

from tests.equality.prompts import prompt
from tests.ledger.client import Case, ask, drained, post, together, totals
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.mark.hall("narrow")
def test_logprobs_are_those_of_unmixed_steps(hall: Hall) -> None:
    server = hall.server("narrow")
    cases = [Case(f"r07 {n}", tuple(prompt(n, "R07")), 40, logprobs=True) for n in (5, 30, 60)]
    alone = {case.name: ask(server, case) for case in cases}
    post(server, "/flush_cache")
    before = totals(server)["steps"]
    long = [Case(f"r07 long{i}", tuple(prompt(1500, f"R07/{i}")), 4, logprobs=i == 0) for i in range(3)]
    mixed = together(server, cases + long)
    steps = hall.steps("narrow", before)
    names = {case.name for case in cases}
    mixed_steps = [step for step in steps if step["mode"] == "mixed" and step["decode_rows"] > 0]
    assert sum(bool(names & set(step["rows"])) for step in mixed_steps) >= 10
    for case in cases:
        one, other = alone[case.name], mixed[case.name]
        assert other.tokens == one.tokens
        assert len(other.logprobs) == 40
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)
        assert other.prompt_logprobs == pytest.approx(one.prompt_logprobs, abs=1e-5)
    drained(server)
