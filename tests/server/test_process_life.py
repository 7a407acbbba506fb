"""A server ends whole: stopped, interrupted, killed, or with a child lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

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

    The second takes flags of both kinds from a --config file.
    """
    file = tmp_path / "serve.yaml"
    file.write_text("policy: sglang\nindexer_scratch_mb: 32\nchunked-prefill-size: 128\nenable-metrics: true\n")
    made += [Server().begin(), Server("--config", str(file)).begin()]
    one, two = made
    assert one.wait_ready().generate("two at once", 4) == two.wait_ready().generate("two at once", 4)
    knobs = two.get("/policy")["knobs"]
    assert (knobs["indexer_scratch_mb"], knobs["chunked_prefill_size"]) == (32, 128)
    assert "sglang:" in two.raw("/metrics")
    assert one.process is not None and two.process is not None
    one.process.send_signal(signal.SIGTERM)
    os.killpg(two.session, signal.SIGINT)  # what a terminal's Ctrl-C does
    for server in made:
        assert server.process is not None
        assert server.process.wait(40) == 0, server.tail()
        all_gone(server)
        assert "Traceback" not in server.log.read_text(errors="replace"), server.tail()


def test_a_lost_scheduler_ends_the_server(made: list[Server]) -> None:
    server = Server().start()
    made.append(server)
    (scheduler,) = server.schedulers()
    scheduler.kill()
    assert server.process is not None
    assert server.process.wait(20) == 1, server.tail()
    all_gone(server)
    lines = server.log.read_text(errors="replace").splitlines()
    assert len([line for line in lines if line.startswith("glm_runtime: error: ")]) == 1


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
