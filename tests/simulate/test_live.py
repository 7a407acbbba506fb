"""The simulator against SGLang's own scheduling on a running server: the same steps, and times once fitted."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glm_runtime.simulate.fit import fit, logged
from glm_runtime.simulate.fleet import requests_of
from glm_runtime.simulate.metrics import Metrics
from glm_runtime.simulate.replica import Replica
from glm_runtime.simulate.stock import StockConfig, StockSide
from glm_runtime.simulate.tree import PrefixTree
from tests.servers import Server
from tests.simulate.live import Batch, arrival_step, drive, rows, send_both
from tests.simulate.worlds import TOPK, trace

pytestmark = [pytest.mark.server, pytest.mark.slow]

POOL = 2048
CONFIG = {"chunked_prefill_size": 128, "max_running_requests": 12, "schedule_conservativeness": 0.05}
POSITIONS = 32768


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulate") / "steps.jsonl"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Server]:
    flags = [part for name, value in CONFIG.items() for part in ("--" + name.replace("_", "-"), str(value))]
    with Server(
        "--policy",
        "sglang",
        "--dtype",
        "float32",
        "--max-total-tokens",
        str(POOL),
        *flags,
        "--step-log",
        str(log),
        small=False,
    ) as made:
        yield made


def read(log: Path, start: int) -> list[dict[str, Any]]:
    """Steps of the log after the first `start`, once no more come."""
    seen: list[str] = []
    for _ in range(80):
        time.sleep(0.25)
        now = log.read_text().splitlines()[start:] if log.exists() else []
        if now and now == seen:
            break
        seen = now
    return [json.loads(line) for line in seen]


@pytest.mark.parametrize(
    ("kind", "longest", "output", "ignore_eos"), [("prefixes", 500, 24, True), ("retraction", 100, 150, False)]
)
def test_steps_are_those_of_the_server(
    server: Server, log: Path, kind: str, longest: int, output: int, ignore_eos: bool
) -> None:
    start = len(log.read_text().splitlines()) if log.exists() else 0
    server.raw("/flush_cache", {})
    first, second = trace(7, 14, longest, output), trace(8, 8, longest, output)
    batches = send_both(server, kind, first, second, wait=0.6, ignore_eos=ignore_eos)
    steps = read(log, start)
    names = batches[0].names + batches[1].names

    came = arrival_step(steps, len(second))
    assert 0 < came < len(steps), "the second batch did not come while the first ran"
    requests, refused = requests_of([*first, *second], POSITIONS, POOL, 64)
    config = StockConfig(**CONFIG, ignore_eos=ignore_eos)  # type: ignore[arg-type]
    side = StockSide(config, PrefixTree(POOL // 64, 64), TOPK, record=True)
    plans = drive(side, {0: requests[: len(first)], came: requests[len(first) :]}, overlap=True)
    assert not refused
    assert [rows(plan, names) for plan in plans] == [step["rows"] for step in steps]
    assert [plan.mode for plan in plans] == [step["mode"] for step in steps]
    assert bool(side.preemptions) == (kind == "retraction")
    if kind == "prefixes":
        assert sum(step["hits"][name] for step in steps for name in step["hits"]) > 0
        _times(steps, batches)


def _times(steps: list[dict[str, Any]], batches: list[Batch]) -> None:
    """Fitted to every second step, waits and whole answers are within 15% at the median."""
    found = logged(steps, TOPK)
    cost = fit(found[::2])
    start = min(batch.sent for batch in batches)
    lines = [*trace(7, 14, 500, 24), *trace(8, 8, 500, 24)]
    requests, _ = requests_of(lines, POSITIONS, POOL, 64)
    for i, req in enumerate(requests):
        req.arrival = batches[i >= 14].sent - start
    metrics = Metrics()
    config = StockConfig(**CONFIG)  # type: ignore[arg-type]
    replica = Replica(StockSide(config, PrefixTree(POOL // 64, 64), TOPK), cost, "blocking", metrics)
    for req in requests:
        replica.send(req)
    replica.run()
    assert len(metrics.ended) == len(requests)
    waits, wholes = [], []
    for entry in metrics.ended:
        batch = batches[entry.index >= 14]
        name = batch.names[entry.index - (14 if entry.index >= 14 else 0)]
        waits.append((entry.first - entry.arrival) / (batch.first[name] - batch.sent))
        wholes.append((entry.last - entry.arrival) / (batch.last[name] - batch.sent))
    for ratios in (waits, wholes):
        assert abs(statistics.median(ratios) - 1) < 0.15, sorted(ratios)
