"""A server ends whole: stopped, interrupted, killed, or with a child lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Keeper
from tests.servers import Server, gone_within, of_session, port_is_free

pytestmark = pytest.mark.server


@pytest.fixture(autouse=True)
def alone(keeper: Keeper) -> None:
    """No shared server beside those started here."""
    keeper.end()


@pytest.fixture
def made() -> Iterator[list[Server]]:
    """Servers of a test; whatever lives of them at its end is ended."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        if server.process is not None:
            server.kill()
        server.log.unlink(missing_ok=True)


def all_gone(server: Server, seconds: float = 5.0) -> None:
    """No process of the server and nobody on its port after `seconds`."""
    left = gone_within(server.session, seconds)
    assert left == [], [p.cmdline() for p in left]
    assert port_is_free(server.port)


def test_two_start_at_once_and_both_stop_cleanly(made: list[Server], tmp_path: Path) -> None:
    """R67: two launches do not take each other's ports. One is then terminated, the other interrupted.

    The second takes flags of both kinds from a --config file. The first is in the midst of an answer: it takes nothing
    new, lets the answer go on for as long as --drain-timeout-s says, and then aborts it.
    """
    file = tmp_path / "serve.yaml"
    file.write_text("policy: sglang\nindexer_scratch_mb: 32\nchunked-prefill-size: 128\nenable-metrics: true\n")
    made += [Server("--drain-timeout-s", "2").begin(), Server("--config", str(file)).begin()]
    one, two = made
    assert one.wait_ready().generate("two at once", 4) == two.wait_ready().generate("two at once", 4)
    knobs = two.get("/policy")["knobs"]
    assert (knobs["indexer_scratch_mb"], knobs["chunked_prefill_size"]) == (32, 128)
    assert "sglang:" in two.raw("/metrics")
    assert one.process is not None and two.process is not None
    answers: list[Any] = []
    long = {"text": "a", "sampling_params": {"max_new_tokens": 30000, "ignore_eos": True}}
    asking = threading.Thread(target=lambda: answers.append(one.post("/generate", long)))
    asking.start()
    while not one.get("/steps?last=1")["steps"][-1]["decode_rows"]:
        time.sleep(0.05)
    one.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    with pytest.raises(urllib.error.HTTPError) as turned_away:
        one.generate("late", 1)
    assert turned_away.value.code == 503
    assert "shutting down" in json.loads(turned_away.value.read())["error"]["message"]
    with pytest.raises(urllib.error.HTTPError):
        one.raw("/health")
    asking.join(30)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert answers[0]["meta_info"]["completion_tokens"] > 1
    os.killpg(two.session, signal.SIGINT)  # what a terminal's Ctrl-C does
    for server in made:
        assert server.process is not None
        assert server.process.wait(40) == 0, server.tail()
        all_gone(server)
        assert "Traceback" not in server.log.read_text(errors="replace"), server.tail()


@pytest.mark.parametrize("which", ["scheduler", "detokenizer"])
def test_a_lost_process_ends_the_server(made: list[Server], which: str) -> None:
    """With a code that is not 0, and one line that says who it was and how it ended."""
    server = Server().start()
    made.append(server)
    (child,) = [p for p in server.children() if which in " ".join(p.cmdline()) or which in p.name()]
    child.kill()
    assert server.process is not None
    assert server.process.wait(20) == 1, server.tail()
    all_gone(server)
    lines = server.log.read_text(errors="replace").splitlines()
    (line,) = [line for line in lines if line.startswith("glm_runtime: error: ")]
    assert which in line and f"pid {child.pid}" in line and "SIGKILL" in line


def test_killed_while_starting_leaves_nobody(made: list[Server]) -> None:
    """Children are still importing then, and have not yet asked SGLang's own way to die with their parent."""
    server = Server().begin()
    made.append(server)
    assert server.process is not None
    end = time.monotonic() + 120
    while len([p for p in of_session(server.session) if "multiprocessing.spawn" in " ".join(p.cmdline())]) < 1:
        assert time.monotonic() < end and server.process.poll() is None, server.tail()
        time.sleep(0.1)
    time.sleep(1)
    server.process.kill()
    server.process.wait(10)
    all_gone(server)


def test_r70_a_killed_parent_leaves_no_child_and_no_port_at_tp_2(made: list[Server], keeper: Keeper) -> None:
    """R70, and tensor parallelism without exported variables: the same tokens as on one rank."""
    flags = {"OMP_NUM_THREADS": None}
    server = Server("--tp-size", "2", env=flags).start()
    made.append(server)
    prompts = ["one", "two ranks share the heads of every layer " * 8]
    parallel = [server.generate(prompt, 16) for prompt in prompts]
    assert len(server.schedulers()) == 2
    assert server.process is not None
    server.process.kill()
    server.process.wait(10)
    all_gone(server)
    single = keeper.get("--policy", "sglang", "--enable-metrics")
    assert [single.generate(prompt, 16) for prompt in prompts] == parallel
