"""One playing of the workload on one arm's server, and its file. Pure.

FOLDER/runs/<arm>-<round>.json      what was asked for and what came back; `--against FOLDER` compares with it later
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glm_runtime.ab.compare import Answer
from glm_runtime.config import ConfigError

FORMAT, VERSION = "glm_runtime-ab-run", 1


@dataclass
class Reply:
    """Answer to one ask. Times in seconds.

    Attributes:
        sent: after the start of the run. ttft: from sending to the first token. latency: to the last.
        itl: gaps between tokens. tokens, logprobs, top: see `compare.Answer`.
        cached: prompt tokens found in the prefix cache. retractions: times it went back to the line.
        error: why there is no answer; empty where there is one.
    """

    sent: float
    ttft: float
    latency: float
    itl: list[float]
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached: int = 0
    retractions: int = 0
    error: str = ""
    text: str = ""

    @property
    def answer(self) -> Answer:
        """What equality is about."""
        return Answer(self.tokens, self.logprobs, self.top, self.error)


@dataclass
class Run:
    """One round of one arm.

    Attributes:
        arm, flags, round: which one; rounds count from 1.
        workload: fingerprint of what was asked.
        start: seconds on the machine's monotonic clock at which the first ask was due; steps count on the same.
        seconds: until the last answer.
        replies: one for each ask.
        steps: the server's step record while it ran (policies/steps.py).
        policy: GET /policy after it. server: GET /server_info.
    """

    arm: str
    flags: list[str]
    round: int
    workload: str
    start: float
    seconds: float
    replies: list[Reply]
    steps: list[dict[str, Any]]
    policy: dict[str, Any]
    server: dict[str, Any]

    @property
    def answers(self) -> list[Answer]:
        """Of all asks."""
        return [reply.answer for reply in self.replies]

    @property
    def name(self) -> str:
        """Arm and round, for people."""
        return f"{self.arm}, round {self.round}"


def save(run: Run, path: Path) -> None:
    """Write a run as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, "version": VERSION} | asdict(run)) + "\n")


def load(path: Path) -> Run:
    """A run of `save`. Raises ConfigError naming the file."""
    try:
        values = json.loads(path.read_text())
        if values.pop("format", None) != FORMAT or values.pop("version", None) != VERSION:
            raise ConfigError(f"{path}: no run of glm_runtime.ab, version {VERSION}")
        values["replies"] = [Reply(**reply) for reply in values["replies"]]
        return Run(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} does not read as a run: {error}") from None


def load_folder(folder: str) -> list[Run]:
    """Runs of an earlier comparison, by arm and round as they were played. Raises ConfigError naming the folder."""
    paths = sorted(Path(folder, "runs").glob("*.json"))
    if not paths:
        raise ConfigError(f"{folder}: there are no runs in it (runs/*.json)")
    return sorted((load(path) for path in paths), key=lambda run: run.start)


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Arm -> its runs, arms in order of their first run."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.arm, []).append(run)
    return found
