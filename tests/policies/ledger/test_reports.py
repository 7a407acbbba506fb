"""Field reports about preemption, as scenarios of the pure ledger."""

from __future__ import annotations

import pytest

from policies.ledger import Ledger, LedgerConfig, PagePool, Request, StepPlan
from policies.ledger.blocks import BlockPool, TokenKeys
from tests.policies.ledger.world import Client, Load, World


def rows(plan: StepPlan) -> dict[str, int]:
    return {request.id: count for request, count in plan.tokens.items()}


@pytest.mark.parametrize("fast", [True, False])
def test_r09_preempting_an_earlier_request_skips_nobody(fast: bool) -> None:
    """vllm#49097: `first` sits a step out, `second` preempts it in that step, `third` must still be visited, once."""
    config = LedgerConfig(
        max_num_batched_tokens=64,
        max_num_seqs=3,
        max_model_len=64,
        scheduling_policy="priority",
        long_prefill_token_threshold=32,
        scheduler_reserve_full_isl=False,
    )
    ledger = Ledger(config, PagePool(pages=10, page_size=4), fast=fast)
    first, second, third = Request("first", 60), Request("second", 4), Request("third", 3)
    for request in (first, second, third):
        ledger.add(request)
    plan = ledger.schedule()
    assert rows(plan) == {"first": 32, "second": 4, "third": 3}
    ledger.update(plan)
    first.priority = 9
    plan = ledger.schedule(throttle=True)
    assert [request.id for request in plan.preempted] == ["first"]
    assert rows(plan) == {"second": 1, "third": 1}
    assert [request.id for request in ledger.running] == ["second", "third"]
    assert (first.num_computed_tokens, first.num_preemptions) == (0, 1)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_r11_two_prompts_over_a_pool_for_one(fast: bool, overlap: bool) -> None:
    """vllm#21809: pool 96, two prompts of 80, budget 64: both finish, each preempted at most once."""
    config = LedgerConfig(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=96, async_scheduling=overlap)
    clients = tuple(Client(f"r{i}", 0, 80, 8, 8) for i in range(2))
    world = World(Load(config, clients, blocks=96 // 16, block_size=16), fast=fast)
    world.run(limit=60)
    assert world.outputs == {"r0": 8, "r1": 8}
    assert all(request.num_preemptions <= 1 for request in world.requests.values())


def test_what_a_victim_was_given_in_the_same_step_returns_to_both_budgets() -> None:
    """By priority the victim may have its rows already: they go back, its draft slots too, and the next uses them."""
    config = LedgerConfig(
        max_num_batched_tokens=24,
        max_num_seqs=3,
        max_model_len=64,
        scheduling_policy="priority",
        scheduler_reserve_full_isl=False,
        draft_slots=2,
    )
    ledger = Ledger(config, PagePool(pages=13, page_size=4))
    low = Request("low", 29, priority=9)
    ledger.add(low)
    for wanted in ({"low": 22}, {"low": 7}):
        plan = ledger.schedule()
        assert rows(plan) == wanted
        ledger.update(plan)
    ledger.add(Request("grows", 4))
    ledger.add(Request("long", 40))
    plan = ledger.schedule()
    assert rows(plan) == {"low": 1, "grows": 4, "long": 24 - 1 - 4 - 3 * 2}
    ledger.update(plan)
    plan = ledger.schedule()
    assert plan.preempted == [low]
    assert rows(plan) == {"grows": 1, "long": 24 - 1 - 2 * 2}


def test_a_waiting_request_that_outgrew_the_pool_fails_too() -> None:
    """Preempted with one token more than the pool holds: with the whole-prompt rule nothing would ever admit it."""
    config = LedgerConfig(max_num_batched_tokens=50, max_num_seqs=4, max_model_len=256, chunk_align=16, fail_unfit=True)
    pool = BlockPool(4, 16, TokenKeys(16, lambda _, start, end: range(start, end)))
    ledger = Ledger(config, pool)
    first, second = Request("first", 60), Request("second", 50)
    ledger.add(first)
    ledger.add(second)
    plan = ledger.schedule()
    assert rows(plan) == {"first": 48, "second": 2}  # the second starts from the first one's blocks
    while second.num_tokens < 65:
        ledger.update(plan)
        plan = ledger.schedule(throttle=second.num_tokens < 65)
    assert [request.id for request in plan.preempted] == ["second"] and rows(plan) == {"first": 12}
    ledger.update(plan)
    ledger.add(Request("third", 1))
    plan = ledger.schedule()
    assert [(request.id, "64" in reason) for request, reason in plan.failed] == [("second", True)]
    ledger.update(plan, finished=[first])
    assert rows(ledger.schedule()) == {"third": 1}


def test_r14_a_request_above_the_pool_fails_and_the_next_works() -> None:
    """sglang#19881: the last request outgrows the pool: it fails with a reason, nobody else is hurt."""
    config = LedgerConfig(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=256, fail_unfit=True)
    clients = (Client("r0", 0, 40, 100, 100), Client("r1", 3, 20, 8, 8), Client("r2", 60, 30, 8, 8))
    world = World(Load(config, clients, blocks=4, block_size=16))
    world.run(limit=200)
    assert world.ended == {"r0": "failed", "r1": "stop", "r2": "stop"}
    reasons = [reason for plan in world.plans for _, reason in plan.failed]
    assert len(reasons) == 1 and "64" in reasons[0]
    assert world.free == 4
