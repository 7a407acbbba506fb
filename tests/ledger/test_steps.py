"""The step record and the metrics made of it; no process is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policies.step_metrics import StepMetrics
from policies.steps import Step, StepLog

LABELS = {"model_name": "tiny", "tp_rank": "0"}


def step(number: int, mode: str = "mixed", **fields: float) -> Step:
    values = {"prefill_tokens": 60, "decode_rows": 4} | fields
    return Step(number=number, at=0.5, mode=mode, rows={"a": 60, "b": 4}, **values)  # type: ignore[arg-type]


def test_totals_count_every_step_and_the_ring_keeps_the_last() -> None:
    log = StepLog(size=3)
    for number in range(1, 6):
        log.add(step(number, "decode" if number % 2 else "mixed", preempted=1, recomputed=7, left_out=2))
    assert [entry.number for entry in log] == [3, 4, 5]
    assert [entry.number for entry in log.last(2)] == [4, 5]
    assert log.last(0) == []
    assert len(log.last(99)) == 3
    totals = log.totals()
    assert totals["steps"] == 5
    assert totals["steps_by_mode"] == {"decode": 3, "mixed": 2}
    assert (totals["prefill_tokens"], totals["decode_rows"], totals["most_tokens_in_a_step"]) == (300, 20, 64)
    assert (totals["preempted"], totals["recomputed_tokens"], totals["decode_rows_left_out"]) == (5, 35, 10)
    with pytest.raises(ValueError, match="count"):
        log.last(-1)


def test_more_facts_are_asked_for_when_told() -> None:
    state = {"running": 1}
    log = StepLog(more=lambda: dict(state))
    assert log.totals()["running"] == 1
    state["running"] = 0
    assert log.totals()["running"] == 0


def test_file_holds_a_line_a_step_and_turns_over(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    line = len(json.dumps({})) + 400
    log = StepLog(path=str(path), limit=4 * line)
    assert log.detailed
    for number in range(1, 41):
        log.add(step(number))
    old, new = path.with_name("steps.jsonl.1"), path
    assert {file.name for file in tmp_path.iterdir()} == {old.name, new.name}
    numbers = [json.loads(text)["number"] for file in (old, new) for text in file.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 41))
    assert numbers[0] > 1
    assert all(file.stat().st_size <= 4 * line for file in (old, new))
    assert json.loads(new.read_text().splitlines()[-1])["rows"] == {"a": 60, "b": 4}


def test_a_file_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    StepLog(path=str(path)).add(step(1))
    StepLog(path=str(path)).add(step(2))
    assert [json.loads(text)["number"] for text in path.read_text().splitlines()] == [1, 2]


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        StepLog(path=str(tmp_path / "none" / "steps.jsonl"))
    with pytest.raises(ValueError, match="limit"):
        StepLog(limit=0)


def test_metrics_tell_what_the_record_tells() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    metrics = StepMetrics(LABELS, budget=128, paced=True, registry=registry)
    metrics.note(step(1, preempted=2, recomputed=90, left_out=3, chunks=2), error=0.25)
    metrics.note(step(2, "decode", prefill_tokens=0))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"glm_runtime:{name}", LABELS | labels)

    assert value("step_tokens_total", kind="prefill") == 60
    assert value("step_tokens_total", kind="decode") == 8
    assert value("steps_total", mode="mixed") == value("steps_total", mode="decode") == 1
    assert value("preemptions_total", reason="kv_room") == 2
    assert value("recomputed_tokens_total") == 90
    assert value("decode_rows_left_out_total") == 3
    assert value("partial_prefills") == 0
    assert value("step_budget_used") == 4 / 128
    assert value("step_time_error") == 0.25
