"""R03 (sglang#40443, #14050): the interval between prefills trades decode speed against time to first token.

Four requests decode, then a prompt of ten budgets comes. Swept over `prefill_schedule_interval`, on the ledger alone:
both costs are told, the streams' stall in prefill steps and the newcomer's wait in steps. (The same sweep on running
servers, stock's `--prefill-decode-interval` beside it, is `benchmarks/interference.py`.)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from policies.ledger import Ledger, LedgerConfig, PagePool, Request

BUDGET = 64
PROMPT = 10 * BUDGET
STREAMS = 4


@dataclass
class Costs:
    """first_token: steps from arrival to the newcomer's first token. gaps: steps between two of its chunks."""

    first_token: int
    gaps: list[int]
    stream_rows: int
    prefill_steps: int


def replay(interval: int, decode_first: bool) -> Costs:
    config = LedgerConfig(
        max_num_batched_tokens=BUDGET,
        max_num_seqs=8,
        max_model_len=4096,
        prefill_schedule_interval=interval,
        decode_first=decode_first,
    )
    ledger = Ledger(config, PagePool(1000, 16))
    streams = [Request(f"stream{i}", 1) for i in range(STREAMS)]
    for request in streams:
        ledger.add(request)
    for _ in range(3):
        ledger.update(ledger.schedule())
    late = Request("late", PROMPT)
    ledger.add(late)
    ran: list[int] = []
    rows = 0
    for step in range(1, 1000):
        plan = ledger.schedule()
        rows += sum(plan.tokens.get(request, 0) for request in streams)
        if late in plan.tokens:
            ran.append(step)
        ledger.update(plan)
        if late.num_output_tokens:
            return Costs(step, [b - a for a, b in itertools.pairwise(ran)], rows, len(ran))
    raise AssertionError("the prompt never finished")


@pytest.mark.parametrize("decode_first", [True, False])
@pytest.mark.parametrize("interval", [1, 2, 4, 8])
def test_a_prefill_leaves_the_streams_their_steps(interval: int, decode_first: bool) -> None:
    costs = replay(interval, decode_first)
    assert all(gap == interval for gap in costs.gaps)
    assert costs.stream_rows == STREAMS * costs.first_token  # no step omits a stream
    assert costs.prefill_steps == -(-PROMPT // (BUDGET - STREAMS))


def test_the_sweep_shows_both_costs() -> None:
    sweep = {interval: replay(interval, True) for interval in (1, 2, 4, 8)}
    waits = [costs.first_token for costs in sweep.values()]
    free = [costs.first_token - costs.prefill_steps for costs in sweep.values()]
    assert waits == sorted(waits) and waits[-1] > 4 * waits[0]  # dearer for the newcomer ...
    assert free == sorted(free) and free[0] == 0 < free[1]  # ... and steps without a prefill for the streams
