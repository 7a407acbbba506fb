"""Both schedulers in small worlds: every token once, the pool whole at the end, books right after every step."""

from __future__ import annotations

import math

import pytest

from glm_runtime.simulate.fleet import requests_of
from glm_runtime.simulate.metrics import Metrics, report
from glm_runtime.simulate.replica import OVERLAPS, Overlap, Replica
from glm_runtime.simulate.stock import StockConfig
from glm_runtime.simulate.tree import PrefixTree
from tests.simulate.worlds import World, cost, ledger, stock, trace

SIDES = {
    "ledger": (ledger, {}),
    "ledger, order of admission": (ledger, {"decode_first": False}),
    "ledger, interval": (ledger, {"prefill_schedule_interval": 3}),
    "ledger, admits a chunk": (ledger, {"scheduler_reserve_full_isl": False}),
    "stock": (stock, {}),
    "stock, mixed": (stock, {"enable_mixed_chunk": True}),
    "stock, interval": (stock, {"prefill_decode_interval": 3}),
    "stock, ends unknown": (stock, {"ignore_eos": False}),
    "stock, uncut": (stock, {"chunked_prefill_size": None}),
}


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("pages", [40, 14])
@pytest.mark.parametrize("name", SIDES)
def test_every_token_comes_once(name: str, pages: int, overlap: Overlap) -> None:
    make, config = SIDES[name]
    for seed in range(2):
        tree = PrefixTree(pages, 64)
        requests, refused = requests_of(trace(seed), 4096, pages * 64, 64)
        world = World(make(tree, overlap, **config) if make is ledger else make(tree, **config), overlap)
        metrics = world.run(requests)
        assert not refused and not metrics.failed and len(metrics.ended) == len(requests)
        output = sum(entry.output for entry in metrics.ended)
        assert metrics.tokens == output
        assert sum(metrics._weights) == output - len(requests)  # a gap for every token but the first
        assert tree.free + tree.evictable == pages
        for entry in metrics.ended:
            assert entry.arrival < entry.first <= entry.last
        for made in world.plans:
            assert sum(made.rows.values()) == made.shape.tokens
            if make is ledger or config.get("enable_mixed_chunk"):
                assert made.shape.tokens <= 256


def test_memory_runs_short_somewhere() -> None:
    """The worlds above do meet preemption and retraction."""
    tree = PrefixTree(14, 64)
    world = World(ledger(tree, "device"), "device")
    world.run(requests_of(trace(0), 4096, 14 * 64, 64)[0])
    assert world.metrics.preemptions and tree.evicted
    tree = PrefixTree(14, 64)
    lines = trace(1, count=30, longest=90, most_output=200, pace=0.001)
    short = World(stock(tree, ignore_eos=False, schedule_conservativeness=0.02), "device")
    requests, _ = requests_of(lines, 4096, 14 * 64, 64)
    short.run(requests)
    assert short.metrics.preemptions and short.metrics.tokens == sum(req.output for req in requests)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("name", SIDES)
def test_plain_decodes_taken_in_one_go_change_nothing(name: str, overlap: Overlap) -> None:
    """Outputs that are long for their arrivals: most steps are decodes of the same requests."""
    make, config = SIDES[name]
    found = []
    for record in (True, False):
        tree = PrefixTree(30, 64)
        lines = trace(4, count=25, longest=300, most_output=300, pace=0.3)
        requests, _ = requests_of(lines, 4096, 30 * 64, 64)
        side = ledger(tree, overlap, record, **config) if make is ledger else stock(tree, record, **config)
        calls: list[int] = []
        plan = side.plan
        side.plan = lambda plan=plan, calls=calls: (calls.append(1), plan())[1]  # type: ignore[method-assign]
        metrics = Metrics()
        replica = Replica(side, cost, overlap, metrics, (lambda *step: None) if record else None)
        for req in requests:
            replica.send(req)
        replica.run()
        found.append((report([metrics], 30), len(calls)))
    (one_by_one, many), (in_one_go, few) = found
    assert in_one_go.pop("kv_use_mean") == pytest.approx(one_by_one.pop("kv_use_mean"), rel=0.05)
    assert in_one_go == pytest.approx(one_by_one, rel=1e-9)
    assert few < many / 3


def test_a_share_that_is_no_number_is_refused() -> None:
    for value in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="--schedule-conservativeness"):
            StockConfig(max_running_requests=4, schedule_conservativeness=value)
