"""R42 (vllm#32439, pegainfer#215): who hangs up is decoded no longer, streamed or not, on every HTTP endpoint.

The scheduler's own record tells: a step that began more than a moment after the socket was closed has no row of it, but
for the two that may be under way. The moment is the server's to notice.
"""

from __future__ import annotations

import http.client
import json
import time
from itertools import accumulate

import pytest

from tests.guard.hanging import ASKED, MOMENT_S, SAMPLING, hang_up, steps_after
from tests.ledger.client import drained
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.hall("narrow")]


@pytest.mark.parametrize("which", range(len(ASKED)))
def test_gone_within_two_steps(hall: Hall, which: int) -> None:
    server = hall.server("narrow")
    path, body = ASKED[which]
    closed = hang_up(server, path, body)
    time.sleep(0.6)
    late = steps_after(server, closed + MOMENT_S)
    assert len(late) <= 2, (path, len(late))
    drained(server)


def test_an_abort_before_the_first_token_yields_none(hall: Hall) -> None:
    """Nine chunks are to be computed; the abort is acknowledged while they are."""
    server = hall.server("narrow")
    before: list[bool] = []  # whether the last chunk never ran
    for chunks, stream in ((1, False), (1, True), (3, False), (8, True), (9, True), (9, False)):
        server.raw("/flush_cache", {})
        ids = [(i * 7 + chunks) % 400 + 5 for i in range(1100)]
        rid = f"r42 {chunks} {stream}"
        body = {"rid": rid, "input_ids": ids, "stream": stream, "sampling_params": SAMPLING | {"max_new_tokens": 40}}
        start = server.get("/policy")["knobs"]["step_totals"]["steps"]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        while server.get("/policy")["knobs"]["step_totals"]["steps"] < start + chunks:
            pass
        server.raw("/abort_request", {"rid": rid})
        acknowledged = time.monotonic()  # the clock of the step record
        text = connection.getresponse().read().decode()
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
        outputs = [json.loads(line) for line in lines]
        connection.close()
        ends = [output for output in outputs if output["meta_info"]["finish_reason"]]
        assert len(ends) == 1
        tokens = ends[0]["output_ids"]
        assert ends[0]["meta_info"]["completion_tokens"] == len(tokens)
        assert ends[0]["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        assert ends[0]["text"] == "" if not tokens else True
        drained(server)
        own = [step for step in hall.steps("narrow", start) if rid in step["rows"]]
        computed = accumulate(step["rows"][rid] for step in own)
        last = next((step["at"] for step, rows in zip(own, computed, strict=True) if rows >= len(ids)), None)
        if last is None or acknowledged + MOMENT_S < last:
            assert tokens == [], (chunks, stream)
        before.append(last is None)
    assert any(before)
