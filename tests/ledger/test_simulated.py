"""The simulator against running ledger servers: the same steps, request by request."""

from __future__ import annotations

import pytest

from glm_runtime.simulate.fleet import requests_of
from glm_runtime.simulate.ledger_side import LedgerSide
from glm_runtime.simulate.tree import PrefixTree
from policies.ledger.flags import LedgerFlags
from tests.ledger.client import post, settled, totals
from tests.ledger.hall import Hall
from tests.simulate.live import arrival_step, drive, rows, send_both
from tests.simulate.worlds import TOPK, trace

pytestmark = [pytest.mark.server, pytest.mark.slow]

POSITIONS = 32768  # of the embedded model


@pytest.mark.parametrize(
    ("name", "pool", "longest", "flags", "overlap"),
    [
        pytest.param(
            "narrow", 7168, 700, LedgerFlags(128, 32), True, marks=pytest.mark.hall("narrow"), id="budget 128"
        ),
        pytest.param(
            "plain",
            7168,
            200,
            LedgerFlags(32, 32, decode_first=False),
            False,
            marks=pytest.mark.hall("plain"),
            id="no overlap",
        ),
        pytest.param("storm", 1024, 300, LedgerFlags(128, 32), True, marks=pytest.mark.hall("storm"), id="preemptions"),
    ],
)
def test_steps_are_those_of_the_server(
    hall: Hall, name: str, pool: int, longest: int, flags: LedgerFlags, overlap: bool
) -> None:
    server = hall.server(name)
    settled(server)
    post(server, "/flush_cache")
    before = totals(server)["steps"]
    output = 100 if name == "storm" else 24  # beyond a page, so that a full pool must send somebody back
    first, second = trace(5, 16, longest, output), trace(6, 8, longest, output)
    batches = send_both(server, "simulated", first, second, wait=0.6)
    settled(server)
    steps = [step for step in hall.steps(name, before) if step["rows"]]
    names = batches[0].names + batches[1].names

    requests, refused = requests_of([*first, *second], POSITIONS, pool, 64)
    tree = PrefixTree(pool // 64, 64)
    side = LedgerSide(flags.config(POSITIONS, 32, 64, overlap), tree, TOPK, 32, record=True)
    came = arrival_step(steps, len(second))
    plans = drive(side, {0: requests[: len(first)], came: requests[len(first) :]}, overlap)

    assert not refused and 0 < came < len(steps), "the second batch did not come while the first ran"
    assert [rows(plan, names) for plan in plans] == [step["rows"] for step in steps]
    assert [plan.mode for plan in plans] == [step["mode"] for step in steps]
    assert [plan.shape.prefill_rows for plan in plans] == [step["prefill_tokens"] for step in steps]
    assert side.preemptions == sum(step["preempted"] for step in steps)
    assert bool(side.preemptions) == (name == "storm")
