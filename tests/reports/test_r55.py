"""R55 (vllm#15041): an id in use is refused, the first request is unharmed; afterwards the id can be used again.

Ids are whole: an abort does not take along others that begin with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.guard.asking import Neighbour, ask, refused, strict
from tests.ledger.client import drained, settled
from tests.ledger.hall import Hall
from tests.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.hall("narrow")]


def body(rid: Any, tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True} | more
    return {"rid": rid, "input_ids": [5, 6, 7], "sampling_params": sampling}


@contextmanager
def running(server: Server, request: dict[str, Any]) -> Iterator[list[Any]]:
    """`request` runs inside; its answer is in the list afterwards."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(strict(ask(server, "/generate", request)[1])))
    thread.start()
    while not server.get("/policy")["knobs"]["step_totals"]["running"]:
        pass
    yield answers
    thread.join(120)


def test_twice_at_once_then_again(hall: Hall) -> None:
    server = hall.server("narrow")
    alone = server.post("/generate", body("r55", 800))["output_ids"]
    # NOTE: what a refused or ended stream leaves behind must not abort the id's owner seconds later.
    server.raw("/generate", body("r55", 5) | {"stream": True})
    with running(server, body("r55", 800)) as answers:
        for stream in (False, True):
            error = refused(server, "/generate", body("r55", 5) | {"stream": stream})
            assert (error["field"], error["value"]) == ("rid", "r55")
    assert answers[0]["output_ids"] == alone
    assert server.post("/generate", body("r55", 5))["output_ids"] == alone[:5]
    assert refused(server, "/generate", body(["x", "x"], 5) | {"input_ids": [[5], [6]]})["field"] == "rid"
    drained(server)


def test_an_abort_takes_one_id(hall: Hall) -> None:
    server = hall.server("narrow")
    with running(server, body("r55", 3000)) as answers, running(server, body("r55 too", 200)) as others:
        server.raw("/abort_request", {"rid": "r55"})
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert others[0]["meta_info"]["finish_reason"]["type"] == "length"
    drained(server)


def test_an_abort_takes_all_samples_of_its_id(hall: Hall) -> None:
    server = hall.server("narrow")
    with running(server, body("r55 n", 1500, n=3)) as answers:
        while server.get("/policy")["knobs"]["step_totals"]["running"] != 3:
            pass
        assert refused(server, "/generate", body("r55 n", 5, n=2))["field"] == "rid"
        server.raw("/abort_request", {"rid": "r55 n"})
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers[0]] == ["abort"] * 3
    settled(server)
    assert len(server.post("/generate", body("r55 n", 3, n=2))) == 2


def test_ids_of_the_server_itself(hall: Hall) -> None:
    """An id that the scheduler takes for a health check would never be answered."""
    server = hall.server("narrow")
    with Neighbour(server, 50):
        assert refused(server, "/generate", body("HEALTH_CHECK_me", 5))["field"] == "rid"
        assert refused(server, "/generate", body("a\nb", 5))["field"] == "rid"
