"""A real server, or a real failing launch, as a child process that cannot outlive its test.

    with Server("--policy", "sglang") as server:          starts, waits until it serves
        server.post("/generate", {...})                   JSON in, JSON out
    run = launch("--policy", "nonsense")                  run.code, run.errors, run.left (processes that survived)

A launch opens a session of its own; who is left is found by that session, however it was reparented.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

REPO = Path(__file__).resolve().parent.parent
COMMAND = (sys.executable, "-m", "glm_runtime.launch_server")
START_LIMIT_S = 240.0
# Small enough for any machine, large enough for the longest prompts of the tests.
SMALL = ("--max-total-tokens", "40960", "--dtype", "float32")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether the port can be bound again."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def of_session(session: int) -> list[psutil.Process]:
    """Living processes of the session that a launch opened; membership survives the death of every parent."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    return found


def gone_within(session: int, seconds: float) -> list[psutil.Process]:
    """Processes of the session that still live after at most `seconds`; empty once all have gone."""
    end = time.monotonic() + seconds
    while (left := of_session(session)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def environment(extra: dict[str, str | None] | None) -> dict[str, str]:
    """This process's environment with one OpenMP thread and `extra` (None removes a variable)."""
    env = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    env.pop("GLM_RUNTIME_CONFIG", None)
    for name, value in (extra or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


@dataclass
class Run:
    """A launch that ended by itself (or was killed at the limit: `code` None)."""

    code: int | None
    output: str
    errors: str
    seconds: float
    left: list[str] = field(default_factory=list)

    def error_lines(self) -> list[str]:
        """Lines of standard error that are ours."""
        return [line for line in self.errors.splitlines() if line.startswith("glm_runtime: error: ")]


def kill_all(session: int) -> None:
    """End every process of the session."""
    for process in of_session(session):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    gone_within(session, 10)


def launch(
    *flags: str,
    env: dict[str, str | None] | None = None,
    limit_s: float = START_LIMIT_S,
    command: tuple[str, ...] = COMMAND,
    cwd: Path = REPO,
) -> Run:
    """Run a command that is expected to end by itself.

    Args:
        flags: appended to `command`.
        env: variables on top of this process's environment; None removes one.
        limit_s: after so long everything is killed and `code` is None.
    """
    if command == COMMAND and "--port" not in flags:
        # NOTE: the default port is one for all, and another worker's launch may hold it.
        flags = ("--port", str(free_port()), *flags)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [*command, *flags],
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            env=environment(env),
            cwd=cwd,
            start_new_session=True,
        )
        session = process.pid
        code: int | None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - started
        left = [] if code is None else [" ".join(p.cmdline()) for p in gone_within(session, 5) if p.is_running()]
        kill_all(session)
        process.wait(10)
        out.seek(0)
        err.seek(0)
        return Run(code, out.read(), err.read(), seconds, left)


class Server:
    """One server on a free port; standard output and error go to `log`.

    Args:
        flags: flags of glm_runtime.launch_server beside --host and --port.
        env: variables on top of this process's environment; None removes one.
        small: put the flags of `SMALL` first.
    """

    def __init__(
        self,
        *flags: str,
        env: dict[str, str | None] | None = None,
        small: bool = True,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        self.flags = [*(SMALL if small else ()), *flags]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = command
        self._env = environment(env)
        self._log = tempfile.NamedTemporaryFile("w", prefix="glm-server-", suffix=".log", delete=False)  # noqa: SIM115
        self.log = Path(self._log.name)
        self.process: subprocess.Popen[str] | None = None
        self.start_seconds = 0.0

    def begin(self) -> Server:
        """Start the process without waiting."""
        self.process = subprocess.Popen(
            [*self.command, *self.flags, "--host", "127.0.0.1", "--port", str(self.port)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=self._env,
            cwd=REPO,
            text=True,
            start_new_session=True,
        )
        return self

    @property
    def session(self) -> int:
        """Session of all its processes: the pid of the one that was started."""
        assert self.process is not None
        return self.process.pid

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> Server:
        """Wait until /health answers 200. Raises RuntimeError with the log's tail when it never does."""
        assert self.process is not None
        started = time.monotonic()
        while time.monotonic() - started < limit_s:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with code {self.process.returncode} while starting:\n{self.tail()}"
                )
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=20) as answer:
                    if answer.status == 200:
                        self.start_seconds = time.monotonic() - started
                        return self
            except OSError:
                time.sleep(0.25)
        tail = self.tail()
        self.kill()
        raise RuntimeError(f"the server did not serve within {limit_s:.0f} s:\n{tail}")

    def start(self) -> Server:
        """Start the process and wait until it serves; nothing is left where it does not come to that."""
        try:
            return self.begin().wait_ready()
        except BaseException:
            self.kill()
            raise

    def tail(self, lines: int = 60) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def children(self) -> list[psutil.Process]:
        """Every living process of this server but the one that was started."""
        return [p for p in of_session(self.session) if p.pid != self.session]

    def schedulers(self) -> list[psutil.Process]:
        """The scheduler processes, which SGLang names ``sglang::scheduler...``."""
        return [p for p in self.children() if "scheduler" in " ".join(p.cmdline()) or "scheduler" in p.name()]

    def get(self, path: str, timeout: float = 60.0) -> Any:
        """JSON of a GET."""
        return json.loads(self.raw(path, timeout=timeout))

    def post(self, path: str, body: Any, timeout: float = 300.0) -> Any:
        """JSON of a POST with a JSON body."""
        return json.loads(self.raw(path, body, timeout))

    def raw(self, path: str, body: Any = None, timeout: float = 300.0) -> str:
        """Text of an answer. Raises urllib.error.HTTPError for a status of 400 and up."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return str(answer.read().decode())

    def generate(self, prompt: str | list[int], tokens: int = 16, **sampling: Any) -> list[int]:
        """Greedy output ids of /generate; `prompt` is text or token ids."""
        field_name = "text" if isinstance(prompt, str) else "input_ids"
        params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        return list(self.post("/generate", {field_name: prompt, "sampling_params": params})["output_ids"])

    def stop(self, how: signal.Signals = signal.SIGTERM, limit_s: float = 40.0) -> int | None:
        """Send a signal and wait; the exit code, None where the process had to be killed. Nothing is left after it."""
        assert self.process is not None
        code: int | None
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        return code

    def kill(self) -> None:
        """End whatever is left of it."""
        if self.process is not None:
            kill_all(self.session)
            self.process.wait(10)
        self._log.close()

    def __enter__(self) -> Server:
        try:
            return self.start()
        except BaseException:
            self.kill()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None:
            self.log.unlink(missing_ok=True)
