"""What each step did: the record that tests, metrics, A/B timelines and the step-time model read.

    step    12   13   14   15          one entry a step that ran something
    rows    p p  d d  p d  d d         by kind: prefill tokens, decode rows
    ms      41    9   38    9          wall time until its result was processed

A ring of the last `size` steps in memory, totals since start, and, if asked for, one JSON line a step in a file. Pure.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, Any


@dataclass(slots=True)
class Step:
    """One step.

    Attributes:
        number: counts the steps that ran something, from 1.
        at: seconds on the monotonic clock when it was planned.
        mode: "decode", "extend" or "mixed", as SGLang ran it.
        rows: request id -> rows; filled only while a file is written.
        prefill_tokens, decode_rows: rows by kind.
        chunks: prompts that stay half way after it.
        admitted, preempted, failed: requests that changed place while it was planned.
        running, waiting: requests after planning.
        free_tokens: KV tokens left after its promises.
        ms: wall time from plan to processed result; None while in flight.
        predicted_ms: the step-time model's forecast; None without one.
    """

    number: int
    at: float
    mode: str
    prefill_tokens: int
    decode_rows: int
    chunks: int = 0
    admitted: int = 0
    preempted: int = 0
    failed: int = 0
    running: int = 0
    waiting: int = 0
    free_tokens: int = 0
    ms: float | None = None
    predicted_ms: float | None = None
    rows: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Rows of the step in all."""
        return self.prefill_tokens + self.decode_rows


class StepLog:
    """The record. `path`: append one JSON line a step to this file. OSError where it cannot be opened."""

    def __init__(self, size: int = 4096, path: str | None = None) -> None:
        self._steps: deque[Step] = deque(maxlen=size)
        self._file: IO[str] | None = open(path, "a", buffering=1) if path else None  # noqa: SIM115
        self.steps = 0
        self.prefill_tokens = 0
        self.decode_rows = 0
        self.preempted = 0
        self.failed = 0
        self.most_tokens = 0

    @property
    def detailed(self) -> bool:
        """Whether steps should carry their rows by request."""
        return self._file is not None

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def add(self, step: Step) -> None:
        """A step whose result has been processed."""
        self._steps.append(step)
        self.steps += 1
        self.prefill_tokens += step.prefill_tokens
        self.decode_rows += step.decode_rows
        self.preempted += step.preempted
        self.failed += step.failed
        self.most_tokens = max(self.most_tokens, step.tokens)
        if self._file is not None:
            self._file.write(json.dumps(asdict(step)) + "\n")

    def totals(self) -> dict[str, Any]:
        """Counters since start, for GET /policy."""
        return {
            "steps": self.steps,
            "prefill_tokens": self.prefill_tokens,
            "decode_rows": self.decode_rows,
            "preempted": self.preempted,
            "failed": self.failed,
            "most_tokens_in_a_step": self.most_tokens,
        }
