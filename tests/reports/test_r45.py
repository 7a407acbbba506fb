"""R45 (sglang#36856): `top_logprobs_num` above the vocabulary, or negative, is refused by name, on every endpoint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.guard.asking import Neighbour, refused
from tests.ledger.client import drained
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.hall("narrow")]

VOCABULARY = 512
MESSAGES = [{"role": "user", "content": "hello"}]


def bodies(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests for `count` logprobs a token."""
    generate = {"input_ids": [5, 6], "return_logprob": True, "top_logprobs_num": count}
    return [
        ("/generate", generate),
        ("/generate", generate | {"stream": True}),
        ("/generate", generate | {"input_ids": [[5], [6]], "top_logprobs_num": [1, count]}),
        ("/v1/completions", {"model": "m", "prompt": "a", "logprobs": count}),
        ("/v1/chat/completions", {"model": "m", "messages": MESSAGES, "logprobs": True, "top_logprobs": count}),
        (
            "/v1/chat/completions",
            {"model": "m", "messages": MESSAGES, "logprobs": True, "top_logprobs": count, "stream": True},
        ),
    ]


@pytest.mark.parametrize("count", [10**9, VOCABULARY + 1, -1])
def test_refused(hall: Hall, count: int) -> None:
    server = hall.server("narrow")
    with Neighbour(server, 150):
        for path, body in bodies(count):
            error = refused(server, path, body)
            assert "logprobs" in error["field"], error
            assert error["value"] == count
    drained(server)


def test_the_bound_is_served(hall: Hall) -> None:
    server = hall.server("narrow")
    most = server.get("/policy")["knobs"]["guard_max_top_logprobs"]
    body = {
        "input_ids": [5, 6],
        "return_logprob": True,
        "top_logprobs_num": most,
        "sampling_params": {"max_new_tokens": 2},
    }
    top = server.post("/generate", body)["meta_info"]["output_top_logprobs"]
    assert [len(entries) for entries in top] == [most, most]
