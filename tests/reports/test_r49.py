"""R49 (sglang#28153): NaN and infinities, as numbers, as text and as 1e400; the answer is JSON itself."""

from __future__ import annotations

import pytest

from tests.guard.asking import Neighbour, refused
from tests.ledger.client import drained
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.hall("narrow")]

NAMES = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def test_refused(hall: Hall) -> None:
    server = hall.server("narrow")
    with Neighbour(server, 200):
        for name in NAMES:
            for value in (b"NaN", b"Infinity", b"-Infinity", b"1e400"):
                raw = b'{"input_ids": [5], "sampling_params": {"%s": %s}}' % (name.encode(), value)
                assert refused(server, "/generate", raw=raw)["field"] == "body"
            for text in ("NaN", "inf", "0.5"):
                assert (
                    refused(server, "/generate", {"input_ids": [5], "sampling_params": {name: text}})["field"] == name
                )
            for path in ("/v1/completions", "/v1/chat/completions"):
                body = {"model": "m", "prompt": "a", "messages": [{"role": "user", "content": "a"}], name: "NaN"}
                assert refused(server, path, body)["field"] == name
        bias = {"input_ids": [5], "sampling_params": {"logit_bias": {"5": "NaN"}}}
        assert refused(server, "/generate", bias)["field"].startswith("logit_bias")
    drained(server)
