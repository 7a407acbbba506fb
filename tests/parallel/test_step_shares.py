"""What the step record and the metrics say of prefill ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from parallel.balance import step_shares
from policies.step_metrics import StepMetrics
from policies.steps import Sharing, Step, StepLog

TWO = Sharing("head-tail", 2)


def step(mode: str, prefill: int = 0, decode: int = 0) -> Step:
    return Step(number=1, at=0.0, mode=mode, prefill_tokens=prefill, decode_rows=decode)


def test_sharing_is_read_off_the_request() -> None:
    request: Any = SimpleNamespace(slots={"context_parallel": "zigzag"}, knobs={"prefill_context_parallel_size": 4})
    assert Sharing.of(request) == Sharing("zigzag", 4)
    request.knobs.clear()
    assert Sharing.of(request).ranks == 1


def test_a_mixed_step_and_a_decode_step() -> None:
    mixed, decode, alone = step("mixed", 8, 2), step("decode", 0, 2), step("extend", 8)
    TWO.note(mixed, [8, 1, 1], [0, 20, 30])
    shares = step_shares("head-tail", [8, 1, 1], [0, 20, 30], 2)
    assert shares is not None
    assert (mixed.rank_rows, mixed.rank_visits) == ([5, 5], [18 + 21, 18 + 31]) == (shares.rows, shares.visits)
    assert mixed.rank_imbalance == pytest.approx(49 / 44)
    TWO.note(decode, [1, 1], [20, 30])
    assert (decode.rank_rows, decode.rank_visits, decode.rank_imbalance) == ([2, 2], [52, 52], 1.0)
    Sharing("head-tail", 1).note(alone, [8], [0])
    assert (alone.rank_rows, alone.rank_imbalance) == ([], None)


def test_totals_add_the_ranks_up() -> None:
    log = StepLog()
    assert "rank_rows" not in log.totals()
    for lens, prefix in (([8], [0]), ([1], [10])):
        made = step("extend", sum(lens))
        TWO.note(made, lens, prefix)
        log.add(made)
    assert (log.totals()["rank_rows"], log.totals()["rank_visits"]) == ([5, 4], [18 + 11, 18])


def test_metrics() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    labels = {"model_name": "tiny"}
    metrics = StepMetrics(labels, budget=128, paced=False, registry=registry, ranks=2)
    mixed, decode = step("mixed", 8, 2), step("decode", 0, 1)
    TWO.note(mixed, [8, 1, 1], [0, 20, 30])
    TWO.note(decode, [1], [20])
    metrics.note(mixed)
    metrics.note(decode)

    def value(name: str, **more: str) -> float | None:
        found: float | None = registry.get_sample_value(f"glm_runtime:{name}", labels | more)
        return found

    assert [value("rank_rows_total", prefill_rank=rank) for rank in "01"] == [6, 6]
    assert [value("rank_key_visits_total", prefill_rank=rank) for rank in "01"] == [39 + 21, 49 + 21]
    assert value("rank_imbalance") == pytest.approx(49 / 44)
