"""GET /steps, --step-log and the step metrics under stock scheduling."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.server.conftest import Keeper
from tests.servers import Server

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps") / "steps.jsonl"


@pytest.fixture(scope="module")
def server(keeper: Keeper, log: Path) -> Server:
    return keeper.get("--policy", "sglang", "--enable-metrics", "--chunked-prefill-size", "128", "--step-log", str(log))


def settled(log: Path, before: int) -> list[dict[str, Any]]:
    """Steps after the first `before`, read when a quarter of a second has brought no more: an answer leaves first."""
    seen: list[str] = []
    for _ in range(80):
        time.sleep(0.25)
        now = log.read_text().splitlines()[before:]
        if now and now == seen:
            break
        seen = now
    return [json.loads(line) for line in seen]


def test_every_token_is_in_a_step(server: Server, log: Path) -> None:
    before = len(log.read_text().splitlines()) if log.exists() else 0
    prompt = [5 + (11 * i) % 190 for i in range(300)]
    server.generate(prompt, 8)
    lines = settled(log, before)
    assert sum(step["prefill_tokens"] for step in lines) == 300
    assert [step["prefill_tokens"] for step in lines if step["mode"] == "extend"] == [128, 128, 44]
    # The overlap schedule may run one row past the last token.
    assert sum(step["decode_rows"] for step in lines) in (7, 8)
    assert all(step["ms"] > 0 and len(step["rows"]) == 1 for step in lines)
    shown = server.get("/steps?last=5")["steps"]
    assert [step["number"] for step in shown] == [step["number"] for step in lines[-5:]]
    assert server.get("/policy")["knobs"]["step_totals"]["prefill_tokens"] >= 300


@pytest.mark.parametrize("last", ["-1", "129", "x", "1.5"])
def test_a_bad_count_is_refused(server: Server, last: str) -> None:
    with pytest.raises(HTTPError) as refused:
        server.get(f"/steps?last={last}")
    assert refused.value.code == 400
    assert "last" in json.loads(refused.value.read())["error"]["message"]


def test_metrics(server: Server) -> None:
    text = server.raw("/metrics")
    assert "glm_runtime:step_tokens_total{" in text
    assert 'kind="prefill"' in text
