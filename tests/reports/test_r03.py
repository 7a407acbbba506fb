"""R03 (sglang#40443, #14050): the interval between prefills trades decode speed against time to first token.

Four requests decode, then a prompt of ten budgets comes. Swept over `prefill_schedule_interval`, on the ledger alone:
both costs are told, the streams' stall in prefill steps and the newcomer's wait in steps. Then on running servers: one
comparison of stock at intervals 0, 1, 4 and of the ledger, all on one replay; its table tells both costs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glm_runtime.ab.runs import Run, by_arm, load_folder
from policies.ledger import Ledger, LedgerConfig, PagePool, Request
from tests.ab.command import ab
from tests.servers import Run as Command

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


INTERVALS = (0, 1, 4)
CHUNK = 128
LOAD = "interference --streams 3 --new 160 --long 1100 --after 0.3"


@dataclass
class Swept:
    """What the comparison printed and wrote."""

    command: Command
    folder: Path

    @property
    def arms(self) -> dict[str, Run]:
        return {name: runs[0] for name, runs in by_arm(load_folder(str(self.folder))).items()}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swept]:
    folder = tmp_path_factory.mktemp("r03") / "out"
    stock = "--policy sglang --prefill-decode-interval"
    arms = [word for n in INTERVALS for word in ("--arm", f"interval {n}: {stock} {n}")]
    arms += ["--arm", "ledger: --policy vllm-ledger"]
    more = ("--workload", LOAD, "--budget", str(CHUNK), "--rounds", "1")
    yield Swept(ab(folder, *arms, *more), folder)


@pytest.mark.slow
@pytest.mark.server
class TestRunningServers:
    def test_all_arms_answer_the_same(self, swept: Swept) -> None:
        assert swept.command.code == 0, swept.command.errors
        assert swept.command.output.count("4 of 4 answers equal") == 3
        assert swept.command.left == []

    def test_the_table_tells_both_costs(self, swept: Swept) -> None:
        text = swept.command.output
        headings = [line for line in text.splitlines() if line.strip().startswith("interval 0")]
        assert len(headings) == 3  # settings, figures, kinds of request
        assert all(word in line for line in headings for word in ("interval 1", "interval 4", "ledger"))
        for cost in ("stream: ITL p99", "stream: ITL max", "long prompt: TTFT median"):
            row = next(line for line in text.splitlines() if cost in line)
            assert len(row.split(cost)[1].split()) == 4
        # The settings that make the sweep stand above it.
        sweep = next(line for line in text.splitlines() if "a prefill runs" in line)
        assert text.index(sweep) < text.index("ITL p99")
        for words in ("whenever one waits", "after 1 decode steps", "after 4 decode steps", "each step"):
            assert words in sweep

    @pytest.mark.parametrize("interval", INTERVALS)
    def test_decode_steps_between_two_chunks(self, swept: Swept, interval: int) -> None:
        """The replay is the same; the steps between two chunks of the prompt are what the interval says."""
        run = swept.arms[f"interval {interval}"]
        modes = ["prefill" if _of_long(step) else "decode" for step in run.steps if step["left_out"] or _busy(step)]
        chunks = [place for place, mode in enumerate(modes) if mode == "prefill"]
        assert len(chunks) == -(-1100 // CHUNK)
        assert {b - a - 1 for a, b in itertools.pairwise(chunks)} == {interval}

    def test_the_ledger_leaves_no_stream_out(self, swept: Swept) -> None:
        run = swept.arms["ledger"]
        assert [step for step in run.steps if step["left_out"]] == []
        assert max(step["prefill_tokens"] + step["decode_rows"] for step in run.steps) <= CHUNK

    def test_files_beside_the_table(self, swept: Swept) -> None:
        assert {path.name for path in swept.folder.iterdir()} == {
            *("report.html", "figures.json", "figures.csv", "bench.jsonl", "trace.json", "runs", "steps", "logs")
        }
        html = (swept.folder / "report.html").read_text()
        assert html.count("interval 4") >= 5 and "http://" not in html.replace("http://www.w3.org/2000/svg", "")
        events = json.loads((swept.folder / "trace.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events if event.get("cat") == "step"} == {1, 2, 3, 4}
        assert json.loads((swept.folder / "figures.json").read_text())["figures"]["ledger"]["failed"] == 0


def _of_long(step: dict[str, Any]) -> bool:
    """Whether a chunk of the long prompt, the last request, ran."""
    return bool(any(rid.endswith("1-3") and rows > 1 for rid, rows in step["rows"].items()))


def _busy(step: dict[str, Any]) -> bool:
    """Whether all streams decode."""
    return bool(step["decode_rows"] >= 3)
