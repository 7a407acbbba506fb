"""The test's end of an engine: start it with flags, ask it, get plain lists back.

Serving(dtype="float32") ── JSON lines ──> tests.equality.worker ──> glm_runtime.Engine ──> scheduler processes
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ask:
    """One request: greedy, no stop token ends it.

    Args:
        ids: prompt tokens.
        new: tokens to generate.
        start: first prompt position whose logprob is wanted (-1: of generated tokens only); None: no logprobs at all.
        after: (i, n): send this ask when ask i of the same call has got n tokens.
    """

    ids: Sequence[int]
    new: int = 32
    start: int | None = None
    after: tuple[int, int] | None = None


@dataclass(frozen=True)
class Reply:
    """What came back. `before` and `during`: tokens that each ask of the call had when this one was sent, and when its
    first token arrived."""

    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float | None]
    cached: int
    finish: str
    before: list[int]
    during: list[int]


class StartError(RuntimeError):
    """The engine refused to start, or ended; the text is its own."""


class Serving:
    """A running engine; a context manager, so that no test leaves a process behind.

    `folders` come first on the path of all its processes.
    """

    module = "tests.equality.worker"

    def __init__(self, *folders: Path, **flags: Any) -> None:
        self.flags = flags
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        path = os.pathsep.join(str(folder) for folder in (*folders, REPO))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module, json.dumps(flags)],
            cwd=REPO,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise StartError(f"the engine with {self.flags} ended; the last it printed:\n{self._log.read()[-4000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise StartError(answer["error"])
        return answer.get("result")

    def _call(self, **call: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return self._read()

    def together(self, asks: Iterable[Ask]) -> list[Reply]:
        """Send all asks at once; replies in the order of the asks."""
        return [Reply(**reply) for reply in self._call(call="generate", asks=[ask.__dict__ for ask in asks])]

    def alone(self, ask: Ask) -> Reply:
        """Send one ask and wait for it."""
        return self.together([ask])[0]

    def fresh(self) -> Self:
        """Empty the prefix cache; for the next ask nothing is cached."""
        if not self._call(call="flush"):
            raise StartError("flush_cache was refused")
        return self

    def report(self) -> dict[str, Any]:
        """What the scheduler process of the first rank says it runs, as in GET /policy."""
        found: dict[str, Any] = self._call(call="report")[0]
        return found

    def rpc(self, method: str, **arguments: Any) -> None:
        """Run a method of SGLang's Scheduler in every rank."""
        self._call(call="rpc", method=method, arguments=arguments)

    def close(self) -> None:
        """End the engine and its processes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
