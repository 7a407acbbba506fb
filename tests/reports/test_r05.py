"""R05 (local-inference-lab/vllm#541): the step's size decides, so no step is larger than its budget."""

from __future__ import annotations

import pytest

from glm_runtime.plan.advice import trade
from glm_runtime.plan.devices import GPUS
from glm_runtime.plan.setup import Setup
from glm_runtime.plan.shapes import model
from glm_runtime.plan.timeline import timeline
from parallel.limits import Sizes
from policies.ledger.flags import LedgerFlags
from tests.equality.prompts import prompt
from tests.ledger.client import Case, drained, together, totals
from tests.ledger.hall import Hall


@pytest.mark.slow
@pytest.mark.server
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
    # Beside the stream's own prompt it begins with fewer rows, so pages end elsewhere; each costs 1 row in 16 at most.
    assert sum("r05 long" in step["rows"] for step in steps) <= planned_steps(budget, length) * 17 // 16 + 1


def planned_steps(budget: int, length: int) -> int:
    """Steps of the long prompt by the planner, were the stream there to the end and nothing cached."""
    ledger = LedgerFlags(max_num_batched_tokens=budget, max_num_seqs=8)
    setup = Setup(model("tiny"), GPUS["H200"], 1, context=length, decodes=1, decode_context=21, ledger=ledger)
    return len(timeline(setup).prefill)


def test_the_planner_predicts_the_trade() -> None:
    """One stream beside a prompt of 65,535 tokens on GLM-5.3: the smaller the step, the shorter its longest step."""
    setup = Setup(
        model("glm-5.3"),
        GPUS["H200"],
        8,
        Sizes(tp=8),
        context=65_535,
        decodes=1,
        decode_context=4096,
        kv="fp8_e4m3",
        ledger=LedgerFlags(max_num_batched_tokens=16384, max_num_seqs=256),
    )
    found = trade(setup, [512, 2048, 8192, 16384])
    stalls, waits = [row[3] for row in found], [row[2] for row in found]
    assert stalls == sorted(stalls) and stalls[-1] > 5 * stalls[0]
    assert waits == sorted(waits, reverse=True)
