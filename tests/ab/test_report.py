"""Table, page and files of runs that were never played."""

from __future__ import annotations

import csv
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from glm_runtime.ab.outcome import Outcome, outcome
from glm_runtime.ab.report import curves, files, page, svg, table, timeline
from glm_runtime.ab.runs import load_folder, save
from glm_runtime.ab.settings import differences, shown
from glm_runtime.ab.settings import table as settings_table
from glm_runtime.ab.slo import Slo
from glm_runtime.config import ConfigError
from tests.ab.made import LOAD, policy, run


class Letters:
    """A tokenizer for SGLang's metrics, which count the text's tokens, too."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(map(ord, text))


def made(first: int = 7, rounds: int = 2) -> Outcome:
    """Stock and ledger; the ledger is twice as quick, and its first answer ends with `first`."""
    runs = []
    for number in range(1, rounds + 1):
        runs += [run("stock", number), run("ledger", number, 0.01, "ledger", first)]
    return outcome(runs, LOAD, Letters(), Slo(200.0, 15.0), 0.0, {"cpu": "a machine"}, "python -m glm_runtime.ab")


@pytest.fixture(scope="module")
def found() -> Outcome:
    return made()


def test_figures_are_sglangs(found: Outcome) -> None:
    stock, ledger = found.figures["stock"], found.figures["ledger"]
    assert stock["completed"] == 10 and stock["total_output_tokens"] == 168 and stock["num_prompts"] == 10
    assert stock["median_itl_ms"] == pytest.approx(20) and ledger["p99_itl_ms"] == pytest.approx(10)
    assert stock["mean_ttft_ms"] == pytest.approx((4 * 50 + 400) / 5)
    assert stock["output_throughput"] == pytest.approx(168 / 2)
    assert stock["request_goodput"] == 0 and ledger["slo_attainment"] == pytest.approx(0.8)
    assert ledger["slo_attainment_by_metric"] == {"ttft": pytest.approx(0.8), "itl": 1.0}
    assert stock["stall_seconds"] == pytest.approx(2 * 4 * 0.019) and ledger["stall_seconds"] == 0
    assert stock["peak_kv_usage"] == pytest.approx(64 * 18 / 4096)
    assert found.ratios["ledger"]["p99_itl_ms"].value == pytest.approx(0.5)
    assert found.ratios["ledger"]["p99_itl_ms"].clear and not found.ratios["ledger"]["mean_ttft_ms"].clear
    assert found.kinds["stock"]["long prompt"]["max_ttft_ms"] == pytest.approx(400)


def test_settings_that_differ_come_first(found: Outcome) -> None:
    """R75 (simon-mo/vLLM-Benchmark#2, sglang#3471): arms that differ in more than their policy."""
    text = table.text(found)
    at = {word: text.index(word) for word in ("settings that differ", "prefill and decode in one step", "ITL p99")}
    assert at["settings that differ"] < at["prefill and decode in one step"] < at["ITL p99"]
    html = page.page(found)
    assert html.index("What the arms ran with") < html.index("<h2>Steps") < html.index("<h2>Figures")


def test_effective_settings_in_common_words() -> None:
    """Different names, one meaning: the chunk of stock, the budget of the ledger."""
    settings = settings_table(
        [policy("sglang", chunked_prefill_size=128), policy("ledger", max_num_batched_tokens=256)],
        [{"dtype": "float32", "port": 1}, {"dtype": "bfloat16", "port": 2}],
    )
    values = {one.name: one for one in settings}
    assert values["rows of a step, at most"].values == (128, 256) and values["rows of a step, at most"].differs
    assert values["model type"].differs and not values["KV tokens"].differs
    assert "port" not in values
    assert {one.name for one in differences(settings)} >= {"policy", "scheduler", "prefill and decode in one step"}
    alike = settings_table([policy("ledger")] * 2, [{}] * 2)
    assert differences(alike) == []
    assert [shown(value) for value in (None, True, 4096, "x")] == ["-", "yes", "4,096", "x"]


def test_equal_answers(found: Outcome) -> None:
    assert found.real == 0 and found.failed == 0
    assert [one.equal for one in found.equalities] == [5, 5]
    assert "5 of 5 answers equal" in table.text(found)


def test_a_real_difference_shows_both_tokens_and_gaps() -> None:
    found = made(first=8)
    assert found.real == 2
    for said in (table.text(found), page.page(found)):
        assert "at output token 19: token 7 (ahead by 0.25) / token 8 (ahead by at least 0.25), real" in said


def test_one_round_has_no_noise_floor() -> None:
    assert "not measured" in table.text(made(rounds=1))
    assert "No arm ran twice" in page.page(made(rounds=1))


class Links(HTMLParser):
    """What a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag in ("script", "link", "iframe", "object", "embed"):
            self.found.append(tag)


def test_the_page_needs_no_network(found: Outcome) -> None:
    html = page.page(found)
    links = Links()
    links.feed(html)
    assert links.found == []
    assert "@import" not in html and "url(" not in html
    assert "prefers-color-scheme:dark" in html


def test_drawings_are_well_formed(found: Outcome) -> None:
    alone = page.picture(found)
    root = ElementTree.fromstring(alone)
    kinds = [part.get("class") for part in root.iter() if part.tag.endswith("rect")]
    assert kinds.count("stall") >= 1 and "prefill" in kinds and "decode" in kinds
    drawings = re.findall(r"<svg.*?</svg>", page.page(found), re.S)
    assert len(drawings) >= 3
    for one in drawings:
        ElementTree.fromstring(one)


def test_lanes_share_one_axis() -> None:
    """The same moment is at the same place in every lane, however long the lanes are."""
    short, long = run("a", 1), run("b", 2)
    long.steps[-1]["at"] += 3.0
    text = timeline.draw([timeline.Lane(one.arm, "", one.steps, one.start) for one in (short, long)], [0.0])
    first = [re.findall(r'x="([\d.]+)"[^>]*class="decode"', part)[0] for part in text.split('class="b"')[1:]]
    assert len(first) == 2 and first[0] == first[1]


def test_narrow_steps_are_drawn_together_and_none_is_lost() -> None:
    one = run("a", 1)
    lane = timeline.Lane("a", "", one.steps, one.start)
    together = timeline.bars(lane, 0.1)
    assert len(together) < len(one.steps) == sum(bar.steps for bar in together)
    assert {bool(bar.prefill) for bar in together} == {True, False}
    assert len(timeline.bars(lane, 0.0)) == len(one.steps)


@pytest.mark.parametrize(("high", "last"), [(0.0, 0.0), (0.9, 0.9), (7.0, 7.0), (123.0, 120.0)])
def test_ticks_are_round_and_within(high: float, last: float) -> None:
    found = svg.ticks(high, 10)
    assert found[0] == 0 and found[-1] == pytest.approx(last) and len(found) <= 21


def test_curves_reach_one_and_keep_the_tail() -> None:
    values = [float(i) for i in range(1, 5001)]
    points = curves.points(values)
    assert points[-1] == (5000.0, 1.0) and len(points) < 600
    assert curves.draw("t", {"a": []}) == "" and "<path" in curves.draw("t", {"a": values}, 100.0)


def test_files(found: Outcome, tmp_path: Path) -> None:
    names = [path.name for path in files.write(found, tmp_path)]
    assert names == ["figures.json", "figures.csv", "bench.jsonl", "trace.json"]
    whole = json.loads((tmp_path / "figures.json").read_text())
    assert whole["figures"]["ledger"]["p99_itl_ms"] == pytest.approx(10) and whole["equality"][0]["equal"] == 5
    rows = list(csv.reader((tmp_path / "figures.csv").open()))
    assert rows[0] == ["figure", "unit", "stock", "ledger"]
    assert next(row for row in rows if row[0] == "p99_itl_ms")[1:] == ["ms", "20.0", "10.0"]
    lines = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    # What SGLang's and vLLM's plots read.
    wanted = {"completed", "duration", "request_throughput", "output_throughput", "total_input_tokens"}
    wanted |= {f"{stat}_{what}_ms" for stat in ("mean", "median", "p99") for what in ("ttft", "tpot", "itl")}
    wanted |= {
        "total_throughput",
        "total_token_throughput",
        "ttfts",
        "itls",
        "input_lens",
        "output_lens",
        "num_prompts",
    }
    assert len(lines) == 4 and all(wanted <= set(line) for line in lines)
    assert [line["completed"] for line in lines] == [5] * 4
    assert "NaN" not in (tmp_path / "figures.json").read_text()


def test_perfetto_trace(found: Outcome) -> None:
    events = files.trace_events([runs[-1] for runs in found.runs.values()])["traceEvents"]
    steps = [event for event in events if event.get("cat") == "step"]
    assert len(steps) == 36 and {event["pid"] for event in steps} == {1, 2}
    assert steps[0]["ts"] == pytest.approx(20_000) and steps[0]["dur"] == pytest.approx(18_000)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"rows", "requests", "KV tokens"}
    spans = [event for event in events if event.get("cat") == "request"]
    assert len(spans) == 2 * 2 * 5 and all(event["dur"] >= 0 for event in spans)


def test_runs_are_kept(tmp_path: Path) -> None:
    one = run("stock", 1)
    save(one, tmp_path / "runs" / "stock-1.json")
    assert load_folder(str(tmp_path))[0].answers[0].top[0][0] == [-0.5, 30]
    (tmp_path / "runs" / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"other\.json"):
        load_folder(str(tmp_path))
    with pytest.raises(ConfigError, match="no runs"):
        load_folder(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (math.nan, "ms", "-"),
        (None, "", "-"),
        (0.1234, "ms", "0.123"),
        (1234.5, "ms", "1,234"),
        (0.5, "%", "50%"),
        (7, "", "7"),
    ],
)
def test_numbers(value: float | None, unit: str, text: str) -> None:
    assert table.number(value, unit) == text
