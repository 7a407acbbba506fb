"""The benchmark harness: asks, timing, the floor's arithmetic, the JSON file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.common import (
    Ask,
    Floor,
    Report,
    interleave,
    machine,
    measure_floor,
    median,
    number,
    parser,
    quantile,
    ratio,
)


@pytest.mark.parametrize(
    ("figure", "op", "bound", "met"),
    [(3.0, ">=", 3.0, True), (2.9, ">=", 3.0, False), (60.0, "<=", 60.0, True), (61.0, "<=", 60.0, False)]
    + [(1.0, "<", 1.0, False), (1.1, ">", 1.0, True), (7.0, "==", 7.0, True), (math.nan, "<=", 1.0, False)]
    + [(math.inf, ">=", 1.0, False)],
)
def test_an_ask_is_met_or_missed(figure: float, op: str, bound: float, met: bool) -> None:
    ask = Ask("speed", figure, bound, op, "x")
    assert ask.met is met
    assert ask.line().startswith("ASK speed: ")
    assert ask.line().endswith(") met" if met else ") missed")


def test_the_line_of_an_ask() -> None:
    assert Ask("decode 8192", 12.3456, 10, ">=", "x").line() == "ASK decode 8192: 12.35x (asked >= 10x) met"
    assert Ask("step", 71.25, 60, "<=", " us").line() == "ASK step: 71.25 us (asked <= 60 us) missed"
    with pytest.raises(ValueError, match="op '=>'"):
        Ask("speed", 1.0, 1.0, "=>")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3.0, "3"),
        (0.12345, "0.1235"),
        (999.96, "1,000"),
        (12345.6, "12,346"),
        (2e12, "2.000e+12"),
        (1e-7, "1.000e-07"),
    ],
)
def test_numbers_keep_four_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_arms_run_in_turn_and_back(tmp_path: Path) -> None:
    order: list[str] = []
    times = interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, warmup=1)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert [len(series) for series in times.values()] == [3, 3]
    assert all(seconds >= 0 for series in times.values() for seconds in series)
    assert len(interleave({"a": lambda: None}, rounds=1000, limit_s=-1.0)["a"]) == 1


def test_medians_quantiles_and_ratios() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert math.isnan(median([]))
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert quantile([5.0], 0.99) == 5.0
    assert math.isnan(quantile([], 0.5))
    assert ratio({"slow": [4.0, 6.0, 5.0], "fast": [1.0, 1.0, 9.0]}, "slow", "fast") == 5.0


def test_the_floor_takes_the_longer_of_work_and_traffic() -> None:
    floor = Floor(threads=1, copy_gb_s=10.0, gemm_f32_gflop_s=100.0, gemm_bf16_gflop_s=200.0)
    assert floor.seconds(flop=1e11) == 1.0
    assert floor.seconds(flop=1e11, bf16=True) == 0.5
    assert floor.seconds(flop=1e9, moved_bytes=3e10) == 3.0


def test_the_floor_of_this_machine_is_measured_and_threads_are_put_back() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    floor = measure_floor(threads=1, side=64, copy_mb=1, rounds=2)
    assert torch.get_num_threads() == before
    assert min(floor.copy_gb_s, floor.gemm_f32_gflop_s, floor.gemm_bf16_gflop_s) > 0


def test_a_report_writes_json_and_ends_with_its_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "out.json"
    report = Report("demo", parser("demo").parse_args(["--quick", "--json", str(path)]))
    report.figure("times", [1.0, math.nan])
    report.figure("floor", Floor(1, 1.0, 2.0, 3.0))
    report.ask(Ask("first", 2.0, 1.0, ">="))
    report.ask(Ask("second", math.inf, 1.0, "<="))
    print("a table")
    assert report.finish() == 0
    assert capsys.readouterr().out.splitlines() == [
        "a table",
        "ASK first: 2 (asked >= 1) met",
        "ASK second: inf (asked <= 1) missed",
    ]
    data = json.loads(path.read_text())
    assert data["benchmark"] == "demo"
    assert data["quick"] is True
    assert data["figures"] == {
        "times": [1.0, None],
        "floor": {"threads": 1, "copy_gb_s": 1.0, "gemm_f32_gflop_s": 2.0, "gemm_bf16_gflop_s": 3.0},
    }
    assert [ask["met"] for ask in data["asks"]] == [True, False]
    assert set(data["machine"]) == set(machine(1))
    with pytest.raises(ValueError, match="given twice"):
        report.figure("times", 1)


def test_threads_are_checked() -> None:
    with pytest.raises(SystemExit, match="--threads 0"):
        Report("demo", parser("demo").parse_args(["--threads", "0"]))
