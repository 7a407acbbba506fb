"""R44 (vllm#29987): an abort that meets the last step has one outcome, and only one terminal event.

The abort wins if it arrives before the step's result is processed, even where that step brought the last token.
"""

from __future__ import annotations

import pytest

from tests.equality.prompts import prompt
from tests.ledger.client import Case, ask, drained, events, post
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.mark.hall("narrow")
def test_one_terminal_event(hall: Hall) -> None:
    """The abort is sent when all tokens but 4, 3, 2, 1 and 0 are out."""
    server = hall.server("narrow")
    new = 12
    solo = ask(server, Case("r44 solo", tuple(prompt(30, "R44")), new)).tokens
    for left in (4, 3, 2, 1, 0):
        name = f"r44 {left}"
        ends: list[dict[str, object]] = []
        tokens: list[int] = []
        for event in events(server, Case(name, tuple(prompt(30, "R44")), new)):
            tokens = event.get("output_ids") or tokens
            if event["meta_info"]["finish_reason"] is not None:
                ends.append(event["meta_info"]["finish_reason"])
            if len(tokens) == new - left:
                post(server, "/abort_request", {"rid": name})
        assert len(ends) == 1, ends
        assert ends[0]["type"] in ("length", "abort")
        assert ends[0]["type"] == "abort" or len(tokens) == new
        assert ends[0]["type"] == "length" or left > 0, "an abort after the end changed it"
        assert tokens == solo[: len(tokens)]
        drained(server)
