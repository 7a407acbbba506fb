"""Every endpoint of SGLang answers under the runtime; /policy and /server_info tell what the scheduler process runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
from typing import Any

import pytest

from glm_runtime.version import __version__
from policies.base import SLOTS
from tests.servers import Server

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.server
PROMPT = "The way of a request"


@pytest.fixture
def client(server: Server) -> Any:
    """The real OpenAI client on the server."""
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture
def name(client: Any) -> str:
    """The served model's name."""
    (model,) = client.models.list().data
    return str(model.id)


def test_models(server: Server, client: Any, name: str) -> None:
    (model,) = server.get("/v1/models")["data"]
    assert model["id"] == name
    assert model["max_model_len"] == 32768
    assert client.models.retrieve(name).id == name


def test_generate(server: Server) -> None:
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
    first, second = server.post("/generate", body), server.post("/generate", body)
    assert first["output_ids"] == second["output_ids"]
    assert len(first["output_ids"]) == 8
    assert first["meta_info"]["completion_tokens"] == 8


def test_generate_streams(server: Server) -> None:
    body = {
        "text": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        "stream": True,
    }
    events = [line.removeprefix("data: ") for line in server.raw("/generate", body).splitlines() if line]
    assert events[-1] == "[DONE]"
    parts = [json.loads(event) for event in events[:-1]]
    assert len(parts) > 1
    assert parts[-1]["meta_info"]["completion_tokens"] == 8
    assert parts[-1]["text"] == server.post("/generate", body | {"stream": False})["text"]


def test_completions(server: Server, client: Any, name: str) -> None:
    asked: dict[str, Any] = {
        "model": name,
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**asked)
    assert whole.usage.completion_tokens == 8
    parts = list(client.completions.create(**asked, stream=True))
    assert len(parts) > 1
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    ids = server.generate(PROMPT, 8)
    assert server.post("/v1/completions", {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0})
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
    native = server.post("/generate", body)
    assert (native["output_ids"], native["text"]) == (ids, whole.choices[0].text)


def test_chat(client: Any, name: str) -> None:
    asked: dict[str, Any] = {
        "model": name,
        "messages": [{"role": "user", "content": "Which policy answers?"}],
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    text = (getattr(message, "reasoning_content", None) or "") + (message.content or "")
    assert whole.usage.completion_tokens == 12
    parts = list(client.chat.completions.create(**asked, stream=True))
    streamed = ""
    for part in parts:
        for choice in part.choices:
            streamed += (getattr(choice.delta, "reasoning_content", None) or "") + (choice.delta.content or "")
    assert len(parts) > 1
    assert streamed == text


def test_curl(server: Server) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}})
    done = subprocess.run(
        [curl, "-sS", "-f", server.url + "/generate", "-H", "Content-Type: application/json", "-d", body],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert json.loads(done.stdout)["output_ids"] == server.generate(PROMPT, 4)


def test_metrics(server: Server) -> None:
    server.generate(PROMPT, 4)
    lines = server.raw("/metrics").splitlines()
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line and line[0] != "#"}
    assert values["sglang:generation_tokens_total"] > 0
    assert values["sglang:prompt_tokens_total"] > 0


def test_policy_is_what_the_scheduler_reports(server: Server) -> None:
    shown = server.get("/policy")
    assert shown["policy"] == "sglang"
    assert shown["runtime_version"] == __version__
    assert shown["device"] == "cpu"
    assert set(shown["slots"]) == set(SLOTS)
    assert shown["slots"]["scheduler"] == "sglang"
    knobs = shown["knobs"]
    assert knobs["max_total_num_tokens"] == 40960
    assert knobs["page_size"] == 64
    assert knobs["kv_cache_dtype"] == "float32"
    assert knobs["omp_threads"] == 1
    info = server.get("/server_info")
    states = info["internal_states"]
    assert [state["glm_runtime"] for state in states] == [shown]


def test_a_bad_request_is_answered_and_harms_nobody(server: Server) -> None:
    before = server.generate(PROMPT, 4)
    for body in ({"text": PROMPT, "sampling_params": {"max_new_tokens": -1}}, {}):
        with pytest.raises(urllib.error.HTTPError) as raised:
            server.post("/generate", body)
        assert 400 <= raised.value.code < 500, body
    assert server.generate(PROMPT, 4) == before


def test_start_is_quiet(server: Server) -> None:
    log = server.log.read_text(errors="replace")
    for noise in ("Cannot detect CUDA", "Only CUDA", "Triton is not supported", "Traceback", "glm_runtime: error"):
        assert noise not in log, noise
    assert "glm_runtime: policy sglang, CPU, 1 rank(s) of 1 OpenMP thread(s)" in log
    assert "active: scheduler=sglang" in log


def test_idle_processes_are_quiet(server: Server) -> None:
    """An idle server waits; it does not poll."""
    import time

    from tests.servers import of_session

    server.generate(PROMPT, 1)
    time.sleep(1)
    processes = of_session(server.session)
    before = {p.pid: sum(p.cpu_times()[:2]) for p in processes}
    time.sleep(10)
    used = {p.name(): sum(p.cpu_times()[:2]) - before[p.pid] for p in processes}
    assert sum(used.values()) < 0.5, used
