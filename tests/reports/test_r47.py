"""R47 (sglang#31908): token ids outside of the vocabulary, or that are none, are refused; the server lives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.guard.asking import Neighbour, refused
from tests.ledger.client import drained
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.hall("narrow")]

WRONG: list[tuple[Any, str]] = [
    ([512], "input_ids[0]"),
    ([5, -1], "input_ids[1]"),
    ([2**40], "input_ids[0]"),
    ([1.5], "input_ids"),
    ([True], "input_ids[0]"),
    (["5"], "input_ids"),
    ([[5], [512]], "input_ids[1][0]"),
    ([[5], [-1]], "input_ids[1][0]"),
    ([[5], 6], "input_ids"),
    ([2**70], "input_ids"),
]


def test_refused(hall: Hall) -> None:
    server = hall.server("narrow")
    with Neighbour(server, 150):
        for ids, field in WRONG:
            for stream in (False, True):
                assert refused(server, "/generate", {"input_ids": ids, "stream": stream})["field"] == field, ids
        for prompt in ([512], [[5], [-1]]):
            for stream in (False, True):
                body = {"model": "m", "prompt": prompt, "max_tokens": 2, "stream": stream}
                assert refused(server, "/v1/completions", body)["field"].startswith("input_ids")
        for name in ("stop_token_ids", "token_ids_logprob"):
            inside = {name: [512]}
            body = (
                {"input_ids": [5], "sampling_params": inside}
                if name.startswith("stop")
                else {"input_ids": [5]} | inside
            )
            assert refused(server, "/generate", body)["field"] == f"{name}[0]"
        assert refused(server, "/generate", {"input_ids": [5], "sampling_params": {"logit_bias": {"512": 1}}})
    drained(server)
