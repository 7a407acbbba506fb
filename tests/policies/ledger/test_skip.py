"""`Ledger.skip`: many quiet steps at once leave everything as one step after another does."""

from __future__ import annotations

from typing import Any

import pytest

from policies.ledger import Ledger, LedgerConfig, PagePool, Request


def house(async_scheduling: bool, prompts: tuple[int, ...]) -> tuple[Ledger, list[Request], Any]:
    """Everybody decodes; under async scheduling one step is in flight."""
    config = LedgerConfig(64, 8, 4096, async_scheduling=async_scheduling)
    ledger = Ledger(config, PagePool(200, 16))
    requests = [Request(f"r{i}", prompt, max_tokens=100) for i, prompt in enumerate(prompts)]
    for request in requests:
        ledger.add(request)
    flying = None
    while not ledger.quiet_steps():
        flying = turn(ledger, flying)
    return ledger, requests, flying


def turn(ledger: Ledger, flying: Any) -> Any:
    """One step; the plan that is in flight after it."""
    plan = ledger.schedule()
    if ledger.config.async_scheduling:
        if flying is not None:
            ledger.update(flying)
        return plan
    ledger.update(plan)
    return None


def state(ledger: Ledger, requests: list[Request]) -> list[object]:
    facts: list[object] = [(r.num_computed_tokens, r.num_tokens, r.num_output_placeholders, r.status) for r in requests]
    return [*facts, ledger.cadence.executed, ledger.roster.decodes(), ledger.quiet_steps()]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("prompts", [(17, 40, 23), (33,), (5, 5, 5, 5)])
def test_skipping_is_stepping(async_scheduling: bool, prompts: tuple[int, ...]) -> None:
    for steps in (1, 3, 100):
        stepped, one, flying = house(async_scheduling, prompts)
        skipped, other, ahead = house(async_scheduling, prompts)
        count = min(steps, skipped.quiet_steps())
        for _ in range(count):
            flying = turn(stepped, flying)
        skipped.skip(count)
        assert state(stepped, one) == state(skipped, other)
        for _ in range(40):  # and they go on alike, over page ends
            flying, ahead = turn(stepped, flying), turn(skipped, ahead)
            assert state(stepped, one) == state(skipped, other)
            assert (flying and flying.number) == (ahead and ahead.number)


def test_nothing_is_quiet_while_somebody_prefills_or_waits() -> None:
    ledger, _, _ = house(False, (17, 40))
    assert ledger.quiet_steps() > 0
    ledger.add(Request("late", 30))
    assert ledger.quiet_steps() == 0
    ledger.update(ledger.schedule())
    ledger.paused = "all"
    assert ledger.quiet_steps() == 0
