"""R09 (vllm#49097): a preemption in the running loop makes no request be looked at twice, and none be passed over.

The report's own three requests are played in tests/policies/ledger/test_reports.py; here crowds in pools that are too
small for them, both policies.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from policies.ledger import Ledger, LedgerConfig, PagePool, Request
from policies.ledger.config import SchedulingPolicy


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(10))
def test_each_running_request_is_visited_once_a_step(policy: SchedulingPolicy, seed: int) -> None:
    draw = random.Random(seed)
    config = LedgerConfig(
        max_num_batched_tokens=4096,
        max_num_seqs=12,
        max_model_len=512,
        scheduling_policy=policy,
        long_prefill_token_threshold=24,
        scheduler_reserve_full_isl=False,
    )
    ledger = Ledger(config, PagePool(pages=30, page_size=8), fast=False)
    visited: list[Request] = []
    size = ledger._sizer.running

    def watched(request: Request, *rest: Any) -> int:
        visited.append(request)
        return size(request, *rest)

    ledger._sizer.running = watched  # type: ignore[method-assign]
    for i in range(12):
        ledger.add(Request(f"r{i}", draw.randint(1, 60), priority=draw.randint(0, 3)))
    preempted = 0
    for _ in range(200):
        before = list(ledger.running)
        visited.clear()
        plan = ledger.schedule()
        preempted += len(plan.preempted)
        assert len(visited) == len(set(visited)), "looked at twice"
        assert set(before) - set(plan.preempted) <= set(visited), "passed over"
        done = [request for request in plan.tokens if request.num_output_tokens >= 40]
        ledger.update(plan, finished=done)
        for request in done:
            ledger.add(Request(f"{request.id}'", draw.randint(1, 60), priority=draw.randint(0, 3)))
    assert preempted > 10
