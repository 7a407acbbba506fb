"""Routers, refusals, the planner's costs, and the command."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from glm_runtime.plan.cost import step_cost
from glm_runtime.plan.devices import GPUS
from glm_runtime.plan.setup import Setup
from glm_runtime.plan.shapes import model
from glm_runtime.plan.timeline import Step, timeline
from glm_runtime.simulate.__main__ import main
from glm_runtime.simulate.cost import PlannedCost
from glm_runtime.simulate.fleet import ROUTERS, output_limit, requests_of, run_fleet
from glm_runtime.simulate.metrics import report
from glm_runtime.simulate.plot import Point, pareto, ticks
from glm_runtime.simulate.shape import Shape
from glm_runtime.simulate.sweep import front, parse
from glm_runtime.simulate.tree import PrefixTree
from glm_runtime.traces import Request
from parallel.limits import Sizes
from policies.ledger.flags import LedgerFlags
from tests.simulate.worlds import cost, ledger, trace


@pytest.mark.parametrize("router", ROUTERS)
def test_a_fleet_serves_everybody(router: str) -> None:
    requests, _ = requests_of(trace(1, count=80, pace=0.004), 4096, 40 * 64, 64)
    runs = run_fleet(requests, lambda: ledger(PrefixTree(40, 64), "device"), cost, "device", 4, router)
    figures = report(runs, 40)
    assert figures["completed"] == 80 and len(runs) == 4
    assert figures["output_tokens"] == sum(req.output for req in requests)
    assert sorted(entry.index for run in runs for entry in run.ended) == list(range(80))


def test_prefix_routing_finds_more_and_balanced_routing_waits_less() -> None:
    """Four long prefixes, asked for in turn: round robin over three machines computes each prefix on each."""
    lines = [
        Request(0.08 * i, 640, 4, tuple(100 * (i % 4) + b for b in range(38)) + (10_000 + i, 20_000 + i), 16)
        for i in range(60)
    ]
    found = {}
    for router in ROUTERS:
        requests, _ = requests_of(lines, 4096, 60 * 64, 64)
        runs = run_fleet(requests, lambda: ledger(PrefixTree(60, 64), "device"), cost, "device", 3, router)
        found[router] = report(runs, 60)
    assert found["prefix"]["cached_share"] > found["round-robin"]["cached_share"] + 0.05
    assert found["prefix"]["mean_ttft_ms"] < found["round-robin"]["mean_ttft_ms"]


def test_more_replicas_wait_less() -> None:
    waits = []
    for replicas in (1, 4):
        requests, _ = requests_of(trace(1, count=80, pace=0.004), 4096, 40 * 64, 64)
        runs = run_fleet(requests, lambda: ledger(PrefixTree(40, 64), "off"), cost, "off", replicas, "least-load")
        waits.append(report(runs, 40)["mean_ttft_ms"])
    assert waits[1] < waits[0] / 2


def test_what_a_server_refuses() -> None:
    assert output_limit(100, 50, 4096, 40 * 64, 64) == 50
    assert output_limit(2500, 500, 4096, 40 * 64, 64) is None  # no page is left for output
    assert output_limit(2300, 500, 4096, 40 * 64, 64) == 40 * 64 - 2304 - 64 - 1
    assert output_limit(4091, 50, 4096, 1 << 20, 64) is None
    requests, refused = requests_of([Request(0, 100, 5), Request(0, 4000, 5)], 1024, 40 * 64, 64)
    assert len(requests) == len(refused) == 1


def planned(**change: object) -> Setup:
    values = {"ledger": LedgerFlags(max_num_batched_tokens=16384, max_num_seqs=256), "kv": "fp8_e4m3"}
    return Setup(model("glm-5.3"), GPUS["H200"], 8, Sizes(tp=8), **(values | change))  # type: ignore[arg-type]


def test_costs_are_the_planners() -> None:
    """For one prompt the simulator's cost is the planner's, but for how evenly the row shard falls."""
    setup = planned(context=200_000, decodes=8, decode_context=5000)
    made = PlannedCost(setup)
    for step in timeline(setup).prefill:
        shape = Shape()
        shape.add_prompt(step.start, step.rows, 2048)
        shape.decode_rows, shape.decode_context = step.decode_rows, step.decode_context
        shape.decode_chosen = min(step.decode_context, step.decode_rows * 2048)
        assert made(shape) == pytest.approx(step_cost(setup, step).seconds, rel=0.03)
    alone = Shape(decode_rows=8, decode_context=40_000, decode_chosen=8 * 2048)
    assert made(alone) == pytest.approx(step_cost(setup, Step(0, 0, 0, 8, 40_000)).seconds, rel=0.02)


def test_sweeps() -> None:
    assert parse("max_num_batched_tokens=512..4096") == ("max_num_batched_tokens", [512, 1024, 2048, 4096])
    assert parse("--max-num-batched-tokens=512..3000")[1] == [512, 1024, 2048, 3000]
    assert parse("chunked_prefill_size=64,7") == ("chunked_prefill_size", [64, 7])
    for bad in ("x", "x=", "x=5..2", "x=0..4", "x=a,b"):
        with pytest.raises(ValueError, match=r"--sweep"):
            parse(bad)


def test_the_front() -> None:
    assert front([(1, 9), (2, 5), (3, 6), (4, 4), (4, 4)]) == [True, True, False, True, True]


def test_ticks_enclose() -> None:
    for low, high in ((1.0, 1.0), (3.0, 999.0), (0.02, 7.0), (100.0, 50_000.0)):
        found = ticks(low, high)
        assert found[0] <= low and found[-1] >= high and found == sorted(found)


def test_the_plot_is_whole() -> None:
    picture = pareto([Point(10, 200, "a", "512"), Point(20, 100, "a & b", "1,024")], "T <1>", "x, ms", "y, ms", "n")
    root = ElementTree.fromstring(picture)
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 2 + 2 and "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    with pytest.raises(ValueError, match="nothing"):
        pareto([], "", "", "")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = [
        {"timestamp": 400 * i, "input_length": 6000 + 500 * (i % 5), "output_length": 40, "hash_ids": [0, 1, 10 + i]}
        for i in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


LAUNCH = ["--model", "glm-5.3", "--gpus", "8xH200", "--tp", "8"]


def test_the_command(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "front.svg"
    arguments = [*LAUNCH, "--trace", str(lines), "--policy", "sglang,vllm-ledger"]
    assert main([*arguments, "--sweep", "max_num_batched_tokens=2048..8192", "--svg", str(picture), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["label"] for run in told["runs"]] == ["sglang", "2,048", "4,096", "8,192"]
    assert all(run["figures"]["completed"] == 30 for run in told["runs"])
    ledgers = [run["figures"] for run in told["runs"][1:]]
    assert [run["max_itl_ms"] for run in ledgers] == sorted(run["max_itl_ms"] for run in ledgers)
    assert "model, not measured" in told["times"][0]
    ElementTree.fromstring(picture.read_text())


def test_steps_are_written_and_can_be_fitted(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "steps.jsonl"
    assert main([*LAUNCH, "--trace", str(lines), "--overlap", "off", "--step-log", str(log), "--json"]) == 0
    by_model = json.loads(capsys.readouterr().out)["runs"][0]["figures"]
    assert len(log.read_text().splitlines()) == by_model["steps"]
    more = ["--model", "glm-5.3", "--trace", str(lines), "--fit", str(log), "--max-total-tokens", "400000"]
    assert main([*more, "--overlap", "off", "--max-num-batched-tokens", "8192", "--max-num-seqs", "256", "--json"]) == 0
    fitted = json.loads(capsys.readouterr().out)
    assert "fitted to" in fitted["times"][0]
    assert fitted["runs"][0]["figures"]["mean_ttft_ms"] == pytest.approx(by_model["mean_ttft_ms"], rel=0.15)


def test_the_table(lines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAUNCH, "--trace", str(lines), "--replicas", "2", "--router", "prefix"]) == 0
    out = capsys.readouterr().out
    assert "p99_itl_ms" in out and "30 completed, 0 refused, 0 failed" in out


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--policy", "best"], "--policy best"),
        (["--replicas", "0"], "--replicas 0"),
        (["--axes", "p50_ttft_ms,speed"], "--axes p50_ttft_ms,speed"),
        (["--sweep", "watermark"], "--sweep watermark"),
        (["--sweep", "chunked_prefill_size=64..128"], "--sweep chunked_prefill_size"),
        (["--max-total-tokens", "64"], "64 tokens"),
        (["--fit", "none.jsonl"], "none.jsonl"),
        (["--speed", "0"], "--speed 0"),
        (["--limit", "0"], "--limit 0"),
        (["--divide-lengths", "3"], "--divide-lengths 3"),
        (["--max-num-batched-tokens", "16", "--max-num-seqs", "64"], "max_num_batched_tokens"),
        (["--policy", "sglang", "--chunked-prefill-size", "0"], "chunked_prefill_size"),
        (["--gpus", "H100"], "make 8 ranks"),
    ],
)
def test_what_cannot_be(lines: Path, more: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAUNCH, "--trace", str(lines), *more]) == 2
    told = capsys.readouterr().err
    assert text in told and re.fullmatch(r"glm_runtime\.simulate: error: [^\n]+\n", told)


def test_gpus_or_a_fit_is_needed(lines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "tiny", "--trace", str(lines)]) == 2
    assert "--gpus or --fit" in capsys.readouterr().err
