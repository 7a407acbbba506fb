"""A stock server under the guard: random requests, health, aborts. The ledger's: tests/reports/test_r42.py to r55."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.guard import odd
from tests.guard.asking import Neighbour, ask, refused, strict
from tests.guard.hanging import ASKED, MOMENT_S, hang_up, steps_after
from tests.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.server]

HEALTH_S = 3
FLAGS = ("--served-model-name", "m", "--health-timeout-s", str(HEALTH_S), "--guard-max-n", "8", "--enable-metrics")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--policy", "sglang", *FLAGS) as server:
        yield server


def test_any_request_is_answered_and_harms_nobody(server: Server) -> None:
    """No 5xx, every refusal is JSON, and the stream beside equals itself alone."""

    @settings(
        max_examples=80,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(odd.requests())
    def sent(request: tuple[str, bytes]) -> None:
        path, body = request
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=3)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        except TimeoutError:
            return  # sound, and asks for much: we hang up
        finally:
            connection.close()
        assert answer.status < 500, (path, body, answer.status, text[:300])
        if answer.status >= 400:
            strict(text)

    with Neighbour(server, 1500):
        sent()
    assert ask(server, "/health", method="GET")[0] == 200


CONTROL: tuple[tuple[str, object], ...] = (
    ("/start_expert_distribution_record", None),
    ("/stop_expert_distribution_record", None),
    ("/dump_expert_distribution_record", None),
    ("/start_profile", {"output_dir": "/proc/nowhere", "num_steps": 1, "activities": ["CPU"]}),
    ("/stop_profile", None),
    ("/generate", {"text": "a", "custom_labels": {"a": "b"}}),
)


def test_what_this_server_was_not_started_for_is_refused(server: Server) -> None:
    """The scheduler's handlers of such requests raise, and unknown labels end the metrics: nobody else is touched."""
    with Neighbour(server, 400):
        for path, body in CONTROL:
            error = refused(server, path, body)
            assert error["message"], path
    assert ask(server, "/health", method="GET")[0] == 200


def test_limits_are_flags(server: Server) -> None:
    assert server.get("/policy")["knobs"]["guard_max_n"] == 8
    sampling = {"max_new_tokens": 1, "n": 9}
    error = refused(server, "/generate", {"text": "a", "sampling_params": sampling})
    assert (error["field"], error["value"]) == ("n", 9)
    assert len(server.post("/generate", {"text": "a", "sampling_params": sampling | {"n": 8}})) == 8


def test_a_prompt_and_its_answer_fit_the_context(server: Server) -> None:
    """More is refused, never cut; without max_new_tokens the answer ends where the context does."""
    context = server.get("/v1/models")["data"][0]["max_model_len"]
    body = {"input_ids": [5] * 100, "sampling_params": {"max_new_tokens": context - 99}}
    assert refused(server, "/generate", body)["field"] == "max_new_tokens"
    assert refused(server, "/generate", {"text": "😀" * (context // 2)})["field"] == "text"
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": context}
    assert refused(server, "/v1/chat/completions", chat)["field"] == "max_new_tokens"


def test_health_is_quick_and_true(server: Server) -> None:
    """Idle, busy, stuck, and well again."""
    (scheduler,) = server.schedulers()

    def health() -> tuple[int, float]:
        started = time.monotonic()
        status, _ = ask(server, "/health", method="GET")
        return status, time.monotonic() - started

    time.sleep(1.5)
    idle = [health() for _ in range(5)]
    assert [status for status, _ in idle] == [200] * 5
    assert min(seconds for _, seconds in idle) < 0.8, "SGLang's own takes a second at least"
    with Neighbour(server, 300):
        assert health()[0] == 200
    time.sleep(1.5)
    stuck = psutil.Process(scheduler.pid)
    stuck.suspend()
    try:
        status, seconds = health()
        assert status == 503
        assert seconds >= HEALTH_S - 0.5
        status, again = health()
        assert status == 503
        assert again < HEALTH_S - 0.5, "what is known to be stuck is not waited for"
    finally:
        stuck.resume()
    end = time.monotonic() + 60
    while health()[0] != 200:
        assert time.monotonic() < end, "well again, but it does not say so"
        time.sleep(0.1)


def test_hang_ups_and_early_aborts_under_stock_scheduling(server: Server) -> None:
    for path, body in ASKED:
        closed = hang_up(server, path, body)
        time.sleep(0.6)
        late = steps_after(server, closed + MOMENT_S)
        assert len(late) <= 2, (path, len(late))
    ids = [(i * 7) % 400 + 5 for i in range(3000)]
    for stream in (False, True):
        server.raw("/flush_cache", {})
        body = {"rid": "early", "input_ids": ids, "stream": stream, "sampling_params": {"max_new_tokens": 20}}
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(0.2)  # in the midst of the prompt
        server.raw("/abort_request", {"rid": "early"})
        text = connection.getresponse().read().decode()
        connection.close()
        outputs = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        last = outputs[-1] if stream else json.loads(text)
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert (last["output_ids"], last["text"], last["meta_info"]["completion_tokens"]) == ([], "", 0)
        assert all(not output["output_ids"] for output in outputs)


def test_a_body_that_is_too_large(server: Server) -> None:
    most = server.get("/policy")["knobs"]["guard_max_body_mb"] << 20
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", "/generate")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(most + 1))
    connection.endheaders()
    answer = connection.getresponse()  # before the body is sent
    assert answer.status == 413
    assert strict(answer.read().decode())["error"]["field"] == "body"
    connection.close()
