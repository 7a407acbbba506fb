"""A real server for tests: ``python -m glm_runtime.launch_server`` on a free port, ended with everything it started.

with Server(["--policy", "sglang"], log=tmp_path / "server.log") as server:
    server.post("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}})
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

REPO = Path(__file__).resolve().parent.parent
READY_LIMIT_S = 400.0
STOP_LIMIT_S = 30.0
LOG_LINES = 40


class ServerDied(AssertionError):
    """The server ended or did not become ready; the text carries the end of its log."""


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One server process.

    Args:
        flags: of glm_runtime.launch_server; host and port are added.
        log: file that takes its output.
        environment: variables to add to this process's own.
    """

    def __init__(self, flags: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.command = [sys.executable, "-m", "glm_runtime.launch_server", "--port", str(self.port), *flags]
        self.environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command,
                cwd=REPO,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_ready(self) -> None:
        assert self.process is not None
        begin = time.monotonic()
        while time.monotonic() - begin < READY_LIMIT_S:
            if self.process.poll() is not None:
                raise ServerDied(f"ended with code {self.process.returncode}; the end of its log:\n{self.tail()}")
            with contextlib.suppress(OSError):
                self.request("/health", timeout=30.0)
                return
            time.sleep(0.3)
        raise ServerDied(f"not ready after {READY_LIMIT_S:.0f} s; the end of its log:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def stop(self) -> int:
        """SIGTERM, after STOP_LIMIT_S SIGKILL to its whole session; returns its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def request(self, path: str, body: Any = None, timeout: float = 300.0) -> bytes:
        """Body of a 200 answer to GET, or to POST of ``body`` as JSON. Raises urllib's HTTPError otherwise."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return bytes(answer.read())

    def get(self, path: str, timeout: float = 60.0) -> Any:
        """JSON of a GET."""
        return json.loads(self.request(path, timeout=timeout))

    def post(self, path: str, body: Any, timeout: float = 300.0) -> Any:
        """JSON of a POST."""
        return json.loads(self.request(path, body, timeout))
