"""Asks a compiler process (`compiler.py`) whether a grammar works, for at most so many seconds.

    check(name, text) ─ known? ─> its answer
                      └ process (started at the first grammar, ended after IDLE_S) ─ answer in time ─> kept
                                                                                   └ else killed ──> refused

Up to `PROCESSES` at once; callers wait in threads, so the event loop runs on.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import Any

PROCESSES = 2
START_S = 120.0  # xgrammar imports torch
IDLE_S = 300.0
KEPT = 1024  # answers


class Compiler:
    """One compiler process; started when it is asked, started anew after it was lost."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def try_lock(self, wait: bool) -> bool:
        """Take it, if nobody has it (or once nobody has)."""
        return self._lock.acquire(blocking=wait)

    def ask(self, name: str, text: str, limit_s: float) -> str | None:
        """Why the grammar cannot be used; None where it can. The caller has the lock, and gives it back by this."""
        try:
            if self._timer is not None:
                self._timer.cancel()
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps([name, text]) + "\n")
                self._process.stdin.flush()
                answer = self._read(limit_s)
            except OSError:
                answer = None
            if answer is not None:
                return answer["error"]
            crashed = self._process.poll() is not None
            self.stop()
            return "the compiler crashed on it" if crashed else f"it did not compile within {limit_s:g} s"
        finally:
            self._timer = threading.Timer(IDLE_S, self._idle)
            self._timer.daemon = True
            self._timer.start()
            self._lock.release()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "glm_runtime.guard.compiler"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._read(START_S) is None:
            self.stop()
            raise RuntimeError("the grammar compiler did not start")

    def _read(self, limit_s: float) -> dict[str, Any] | None:
        """One answer; None where there is none in time."""
        assert self._process is not None and self._process.stdout is not None
        # NOTE: one line a question: nothing is ever left in Python's buffer, so the descriptor tells.
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            return None
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else None

    def _idle(self) -> None:
        if self._lock.acquire(blocking=False):
            self.stop()
            self._lock.release()

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None


_compilers = [Compiler() for _ in range(PROCESSES)]
_known: OrderedDict[tuple[str, str], str | None] = OrderedDict()
_guard = threading.Lock()


def known(name: str, text: str) -> tuple[bool, str | None]:
    """Whether a grammar was tried before, and what came of it."""
    with _guard:
        key = (name, text)
        if key not in _known:
            return False, None
        _known.move_to_end(key)
        return True, _known[key]


def check(name: str, text: str, limit_s: float) -> str | None:
    """Why a grammar cannot be used; None where it can. Blocks for at most `limit_s` seconds and a process's start."""
    seen, answer = known(name, text)
    if seen:
        return answer
    compiler = next((one for one in _compilers if one.try_lock(wait=False)), None)
    if compiler is None:
        compiler = _compilers[len(text) % PROCESSES]
        compiler.try_lock(wait=True)
    answer = compiler.ask(name, text, limit_s)
    with _guard:
        _known[name, text] = answer
        while len(_known) > KEPT:
            _known.popitem(last=False)
    return answer
