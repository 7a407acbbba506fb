"""R01 (sglang#32549): prompts that arrive do not stop a running stream.

stream   t t t t t t t t t t t t t      a row in every step from its first to its last
prompts          1280 1280              share those steps, chunk by chunk
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.equality.prompts import prompt
from tests.ledger.client import Case, ask, drained, events, post, totals
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.mark.hall("narrow")
def test_no_step_leaves_the_stream_out(hall: Hall) -> None:
    server = hall.server("narrow")
    alone = Case("r01 alone", tuple(prompt(40, "R01")), 200)
    expected = ask(server, alone).tokens
    post(server, "/flush_cache")
    before = totals(server)["steps"]
    late = [Case(f"r01 late{i}", tuple(prompt(1280, f"R01/{i}")), 4) for i in range(2)]
    tokens: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        asked = []
        for event in events(server, Case("r01 stream", alone.ids, 200)):
            tokens = event["output_ids"]
            if len(tokens) >= 20 and not asked:
                asked = [pool.submit(ask, server, case) for case in late]
        assert all(len(future.result().tokens) == 4 for future in asked)
    assert tokens == expected
    steps = hall.steps("narrow", before)
    own = [step["number"] for step in steps if "r01 stream" in step["rows"]]
    assert len(own) == own[-1] - own[0] + 1, "some step left the stream out"
    assert sum(any(name.startswith("r01 late") for name in step["rows"]) for step in steps) >= 2 * 1280 // 128
    drained(server)
