"""R51 (sglang#4481): an empty prompt is refused, in every shape that it can have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.guard.asking import Neighbour, ask, refused, strict
from tests.ledger.client import drained
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.hall("narrow")]

EMPTY: list[dict[str, Any]] = [
    {"text": ""},
    {"text": []},
    {"text": [""]},
    {"text": ["a", ""]},
    {"text": None},
    {"input_ids": []},
    {"input_ids": [[]]},
    {"input_ids": [[5], []]},
    {"input_ids": None},
    {},
]


def test_refused(hall: Hall) -> None:
    server = hall.server("narrow")
    with Neighbour(server, 150):
        for body in EMPTY:
            for stream in (False, True):
                assert refused(server, "/generate", body | {"stream": stream})["field"].startswith(
                    ("text", "input_ids")
                )
        for prompt in ("", [], [""], [[]], None):
            status, text = ask(server, "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 2})
            assert status == 400, (prompt, text)
            strict(text)
        for messages in ([], None):
            status, text = ask(server, "/v1/chat/completions", {"model": "m", "messages": messages})
            assert status == 400, (messages, text)
            strict(text)
    drained(server)
