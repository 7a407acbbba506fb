"""Starts the server, follows it until it is ready, shows a first request with its answer, and stays with it.

    python scripts/serve.py --policy NAME --port N [further flags of glm_runtime.launch_server]

Ctrl-C (or SIGTERM) ends the server and this program; a second one does not wait. Standard library only, apart from the
embedded model, which is built here when no --model-path is given so that its progress can be seen.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import FrameType
from typing import Any

READY_LIMIT_S = 1800.0
POLL_S = 1.5
SIGN_OF_LIFE_S = 5.0
STOP_LIMIT_S = 20.0
PROMPT = "Which prefill policy answers this?"


class Stop(Exception):
    """The user asked to end."""


def say(text: str) -> None:
    """One line of our own, told apart from the server's log."""
    print(f"[serve] {text}", flush=True)


def on_signal(number: int, frame: FrameType | None) -> None:
    """SIGINT and SIGTERM."""
    raise Stop


def die_with_parent() -> None:
    """In the new child: SIGTERM when this program goes away without a word. Linux only; elsewhere nothing is done."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def is_taken(host: str, port: int) -> bool:
    """Whether somebody listens there already; else their answers would be taken for our server's."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


class Front:
    """The server's HTTP side. ``base`` is like ``http://127.0.0.1:30000``."""

    def __init__(self, base: str, api_key: str | None) -> None:
        self.base = base
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 10.0) -> bytes:
        """Body of a 200 answer. Raises OSError (URLError, HTTPError, timeout) otherwise."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.base + path, data, self.headers)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return bytes(answer.read())

    def is_ready(self) -> bool:
        """Whether /health says so."""
        try:
            self.call("/health")
        except OSError:
            return False
        return True


def wait_ready(front: Front, server: subprocess.Popen[bytes]) -> bool:
    """Follows the start; False when the server ended or the limit passed."""
    begin = told = time.monotonic()
    while server.poll() is None:
        if front.is_ready():
            say(f"ready after {time.monotonic() - begin:.0f} s")
            return True
        now = time.monotonic()
        if now - begin > READY_LIMIT_S:
            say(f"not ready after {READY_LIMIT_S:.0f} s, giving up")
            return False
        if now - told >= SIGN_OF_LIFE_S:
            told = now
            say(f"starting, {now - begin:.0f} s so far")
        time.sleep(POLL_S)
    say(f"the server ended with code {server.returncode} before it was ready; its lines above say why")
    return False


def first_request(front: Front, policy: str) -> bool:
    """Sends one chat request and prints it, as for curl, with its answer. False when it fails."""
    try:
        model = json.loads(front.call("/v1/models"))["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 32,
            "temperature": 0,
        }
        say(f"a first request to policy {policy}:")
        print(f"\n  curl {front.base}/v1/chat/completions -H 'Content-Type: application/json' \\")
        print(f"       -d '{json.dumps(body)}'\n", flush=True)
        begin = time.monotonic()
        answer = json.loads(front.call("/v1/chat/completions", body, timeout=300.0))
        choice = answer["choices"][0]
        print(f"  answer ({time.monotonic() - begin:.2f} s): {json.dumps(choice['message'], ensure_ascii=False)}")
        print(f"  finish_reason {choice['finish_reason']}, usage {json.dumps(answer['usage'])}\n", flush=True)
    except urllib.error.HTTPError as error:
        say(f"the first request failed: {error} {error.read()[:500].decode(errors='replace')}")
        return False
    except (OSError, ValueError, KeyError, IndexError) as error:
        say(f"the first request failed: {type(error).__name__}: {error}")
        return False
    return True


def exit_code(code: int) -> int:
    """Popen's code as a shell would give it: 128 + n for an end by signal n."""
    return 128 - code if code < 0 else code


def end(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL to the server's whole group after STOP_LIMIT_S or a second Ctrl-C."""
    if server.poll() is None:
        say("ending the server")
        server.terminate()
    try:
        server.wait(STOP_LIMIT_S)
    except (subprocess.TimeoutExpired, Stop):
        say("it does not end by itself: killing it")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)  # whatever of its session is left
    server.wait()


def main(argv: list[str]) -> int:
    """Entry point; 0 when the user ended it, else the server's exit code or 1."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--policy", default="sglang")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--api-key")
    parser.add_argument("--model-path", "--model")
    options, extra = parser.parse_known_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)

    near = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    if is_taken(near, options.port):
        say(f"port {options.port} is taken; choose another: make serve PORT={options.port + 1}")
        return 1
    command = [sys.executable, "-m", "glm_runtime.launch_server"]
    command += ["--policy", options.policy, "--host", options.host, "--port", str(options.port)]
    if options.model_path:
        command += ["--model-path", options.model_path]
    command += extra
    shown = " ".join(["python", *command[1:]])
    if options.api_key:
        command += ["--api-key", options.api_key]
        shown += " --api-key ..."

    server: subprocess.Popen[bytes] | None = None
    try:
        if not options.model_path:
            from glm_runtime.model import ensure

            say("embedded model: building it if this is the first time")
            say(f"embedded model: {ensure()} (untrained: its answers are noise, but the same noise every time)")
        say(shown)
        server = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)
        front = Front(f"http://{near}:{options.port}", options.api_key)
        if not wait_ready(front, server):
            return exit_code(server.poll() or 1)
        if not first_request(front, options.policy):
            return 1
        say(f"serving at {front.base} (policy: {front.base}/policy); Ctrl-C ends it")
        code = server.wait()
        say(f"the server ended with code {code}")
        return exit_code(code)
    except Stop:
        return 0
    finally:
        if server is not None:
            end(server)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
