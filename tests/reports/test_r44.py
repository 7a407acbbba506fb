"""R44 (vllm#29987): an abort that meets the last step has one outcome: finished if that step ended it, else aborted."""

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
        assert ends[0]["type"] == ("length" if len(tokens) == new else "abort")
        assert tokens == solo[: len(tokens)]
        drained(server)
