"""R77 (LMCache#1459, vllm#39795, sglang#9839): replay by time stamps, with the trace's prefix reuse.

150 rows of Mooncake's synthetic trace, lengths divided by 32, ten times as fast. The server records what arrives
(`--record`), so the replay is checked from both ends; the record is a trace again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from glm_runtime import traces
from glm_runtime.ab import workloads
from glm_runtime.ab.asks import Workload
from tests.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.server]

TRACE = "mooncake_synthetic_tiny32_first150.csv"
PAGE = 64
SPEED = 10.0


@dataclass
class Replay:
    """The workload, what the client saw and what the server wrote down."""

    load: Workload
    sent: list[float]
    cached: list[int]
    lengths: list[int]
    errors: list[str]
    record: list[traces.Request]


def expected_hits(load: Workload) -> list[int]:
    """Prompt tokens in whole pages that an earlier prompt began with; the last token is always computed."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for ask in load.asks:
        assert isinstance(ask.prompt, tuple)
        pages = [ask.prompt[: end + PAGE] for end in range(0, len(ask.prompt) // PAGE * PAGE, PAGE)]
        hits = 0
        for page in pages:
            if page not in seen or len(page) >= len(ask.prompt):
                break
            hits = len(page)
        found.append(hits)
        seen.update(pages)
    return found


@pytest.fixture(scope="module")
def replay(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    path = shared / "traces" / TRACE
    if not path.exists():
        pytest.skip(f"no {path}")
    load = workloads.load(str(path), SPEED, range(480), lambda: None, 0)
    from glm_runtime.ab.client import play

    record = tmp_path_factory.mktemp("r77") / "record.jsonl"
    flags = ("--policy", "vllm-ledger", "--dtype", "float32", "--max-total-tokens", "131072", "--record", str(record))
    with Server(*flags, small=False) as server:
        played = asyncio.run(play(server.url, load.asks, "r77", logprobs=False))
    yield Replay(
        load,
        [output.start_time - played.start for output in played.outputs],
        [output.cached_tokens for output in played.outputs],
        [len(output.token_ids) for output in played.outputs],
        [output.error for output in played.outputs],
        traces.read(record),
    )


def test_every_row_is_answered_in_its_length(replay: Replay) -> None:
    assert replay.errors == [""] * 150
    assert replay.lengths == [ask.new for ask in replay.load.asks]


def test_arrivals_are_the_traces(replay: Replay) -> None:
    """On the client and, from the record, in the server: most within 50 ms of the time stamp; none early."""
    due = np.array([ask.at for ask in replay.load.asks])
    assert due[-1] == pytest.approx(4.431)
    late = np.array(replay.sent) - due
    assert late.min() > -0.005 and np.median(late) < 0.05 and np.quantile(late, 0.9) < 0.5
    seen = np.array([request.arrival_s for request in replay.record])
    assert np.median(np.abs((seen - seen[0]) - due)) < 0.1


def test_reuse_is_the_traces(replay: Replay) -> None:
    """Of its tokens in 16-token blocks the trace repeats a share; the cache holds pages of 64 tokens.

    Requests that arrive together cannot yet hit each other's pages; the others must.
    """
    asked = sum(ask.prompt_tokens for ask in replay.load.asks)
    assert replay.load.reuse is not None and replay.load.reuse > 0.07
    expected = expected_hits(replay.load)
    assert sum(expected) / asked == pytest.approx(replay.load.reuse, abs=0.005)
    assert all(hit <= most for hit, most in zip(replay.cached, expected, strict=True))
    assert sum(replay.cached) >= 0.8 * sum(expected)


def test_the_record_is_the_trace_again(replay: Replay) -> None:
    asks = {f"r77-{place}": ask for place, ask in enumerate(replay.load.asks)}
    assert {request.rid for request in replay.record} == set(asks)
    for request in replay.record:
        ask = asks[str(request.rid)]
        assert (request.prompt_tokens, request.output_tokens) == (ask.prompt_tokens, ask.new)
        assert len(request.block_ids) == ask.prompt_tokens // PAGE
    # Blocks are named by content and what is before it: the same sharing as in the prompts.
    ordered = sorted(replay.record, key=lambda request: int(str(request.rid).split("-")[1]))
    seen: set[int] = set()
    hits = []
    for request, ask in zip(ordered, replay.load.asks, strict=True):
        known = [block in seen for block in request.block_ids]
        assert known == sorted(known, reverse=True)
        hits.append(min(PAGE * sum(known), (ask.prompt_tokens - 1) // PAGE * PAGE))
        seen.update(request.block_ids)
    assert hits == expected_hits(replay.load)
    assert all(request.text is None for request in replay.record)
