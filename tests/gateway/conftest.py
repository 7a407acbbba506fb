"""One server with a gateway, shared by the tests that want a real one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from glm_runtime.gateway.keys import keygen
from tests.servers import Server, free_port


@dataclass
class Live:
    """A server with a gateway."""

    server: Server
    ipc: str
    tcp: str
    keys: Path

    def in_flight(self) -> int:
        """Requests that the scheduler runs or has waiting."""
        totals = self.server.get("/policy")["knobs"]["step_totals"]
        return int(totals["running"] + totals["waiting"])

    def steps(self) -> int:
        """Steps run so far."""
        return int(self.server.get("/policy")["knobs"]["step_totals"]["steps"])


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One server: an ipc file for this user, TCP for those who have a key."""
    folder = tmp_path_factory.mktemp("zmq")
    for name in ("server", "client"):
        keygen(folder, name)
    (folder / "authorized").mkdir()
    (folder / "authorized" / "client.key").write_bytes((folder / "client.key").read_bytes())
    ipc, tcp = f"ipc://{folder}/socket", f"tcp://127.0.0.1:{free_port()}"
    flags = ["--policy", "vllm-ledger", "--scheduling-policy", "priority", "--enable-metrics"]
    flags += ["--zmq-endpoint", ipc, "--zmq-endpoint", tcp, "--zmq-max-message-mb", "1"]
    flags += ["--zmq-curve-secret-key-file", str(folder / "server.key_secret")]
    flags += ["--zmq-authorized-keys", str(folder / "authorized")]
    with Server(*flags) as server:
        yield Live(server, ipc, tcp, folder)
