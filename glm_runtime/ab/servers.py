"""A server of an arm: the real launcher, in a process of its own.

with Server(arm, folder) as server:      starts; serves, or ConfigError with the launcher's own line
    server.get("/policy")                JSON
    server.steps(after)                  its step record since then
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
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from glm_runtime.ab.arms import Arm
from glm_runtime.config import ENV, ConfigError
from glm_runtime.ending import die_with_parent

COMMAND = (sys.executable, "-m", "glm_runtime.launch_server")
STOP_LIMIT_S = 60.0


def check(arm: Arm) -> None:
    """Raise ConfigError for what can be refused without starting anything: our flags, and how they fit together."""
    from glm_runtime.cli import once, split
    from glm_runtime.launch_server import Given
    from glm_runtime.prepare import choose_device, request_for
    from policies.base import PolicyError

    try:
        once(arm.flags)
        options, rest, _ = split(arm.flags)
        given = Given(rest)
        request_for(options, choose_device(given.value("--device")), given.ranks())
    except (ConfigError, PolicyError) as error:
        raise ConfigError(f"arm {arm.name}: {error}") from None


def _alive(session: int) -> bool:
    """Whether a process of that session still lives."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


class ServerFailed(RuntimeError):
    """A server that did not start, or ended; one line, and where its log is."""


class Server:
    """One server on a free port of 127.0.0.1.

    Args:
        arm: what to serve.
        folder: its log and its step record go there.
        limit_s: seconds it may take to start.
    """

    def __init__(self, arm: Arm, folder: Path, limit_s: float) -> None:
        self.arm = arm
        self._limit_s = limit_s
        self.log = folder / "logs" / f"{arm.slug}.log"
        self.step_log = folder / "steps" / f"{arm.slug}.jsonl"
        for path in (self.log, self.step_log):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self._port}"

    def begin(self) -> None:
        """Start the process without waiting for it."""
        self.step_log.unlink(missing_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        own = ("--host", "127.0.0.1", "--port", str(self._port), "--step-log", str(self.step_log))
        environment = {name: value for name, value in os.environ.items() if name != ENV}
        with open(self.log, "ab") as log:
            log.write(f"# {' '.join(self.arm.flags)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                [*COMMAND, *self.arm.flags, *own],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,  # a server must not outlive us, however we end
            )

    def wait(self) -> None:
        """Wait until it serves. ConfigError where the launcher refused the flags; ServerFailed otherwise."""
        assert self._process is not None
        end = time.monotonic() + self._limit_s
        while time.monotonic() < end:
            code = self._process.poll()
            if code is not None:
                said = self._said()
                if code == 2:
                    raise ConfigError(f"arm {self.arm.name}: {said or 'refused; see ' + str(self.log)}")
                raise ServerFailed(f"arm {self.arm.name}: the server ended with code {code}: {said} (log: {self.log})")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.2)
        raise ServerFailed(f"arm {self.arm.name}: no server within {self._limit_s:.0f} s (log: {self.log})")

    def _said(self) -> str:
        """The launcher's own last line."""
        prefix = "glm_runtime: error: "
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith(prefix)]
        return lines[-1].removeprefix(prefix) if lines else ""

    def alive(self) -> None:
        """Raise ServerFailed where the process has ended."""
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            raise ServerFailed(f"arm {self.arm.name}: the server ended (code {code}): {self._said()} (log: {self.log})")

    def get(self, path: str) -> Any:
        """JSON of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def flush(self) -> None:
        """Empty the prefix cache; waits a while for requests that are still ending."""
        for _ in range(50):
            request = urllib.request.Request(f"{self.url}/flush_cache", b"", method="POST")
            with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=60):
                return
            time.sleep(0.2)
        raise ServerFailed(f"arm {self.arm.name}: the prefix cache does not empty (log: {self.log})")

    def steps(self, since: float) -> list[dict[str, Any]]:
        """Steps planned at `since` (monotonic clock) or later; waits until no more are being written."""
        seen = -1
        for _ in range(50):
            size = sum(path.stat().st_size for path in self._step_files())
            if size == seen:
                break
            seen = size
            time.sleep(0.15)
        found = []
        for path in self._step_files():
            found += [json.loads(line) for line in path.read_text().splitlines()]
        return [step for step in found if step["at"] >= since]

    def _step_files(self) -> list[Path]:
        """The record and, before it, the part that was turned over."""
        older = self.step_log.with_name(self.step_log.name + ".1")
        return [path for path in (older, self.step_log) if path.exists()]

    def stop(self) -> None:
        """End the server and whatever it started."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its session is its own: nobody else is in the group
        self._process.wait()
        # What they hold (memory, the GPU) must be free before the next server starts.
        end = time.monotonic() + STOP_LIMIT_S
        while _alive(self._process.pid) and time.monotonic() < end:
            time.sleep(0.05)
        self._process = None

    def __enter__(self) -> Server:
        try:
            self.begin()
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
