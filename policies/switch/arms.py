"""What each scheduler has done in its turns: the figures of a live A/B. Pure.

active   sglang │ ledger │ sglang          seconds    time in which it planned
steps    p d d d  m m m d  p d              gap        from one result with decode rows to the next: what a stream sees
                 '-gap-' counted for the scheduler whose result ends it
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from policies.steps import Step

KEPT = 4096  # newest step times and gaps that the percentiles are taken of


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """p50, p99 and max (nearest rank); None of nothing."""
    line = sorted(values)
    if not line:
        return None
    return {name: line[min(len(line) - 1, int(share * len(line)))] for name, share in (("p50", 0.5), ("p99", 0.99))} | {
        "max": line[-1]
    }


class Arm:
    """One scheduler's share."""

    def __init__(self) -> None:
        self.turns = 0
        self.seconds = 0.0
        self.since: float | None = None
        self.steps = 0
        self.by_mode: dict[str, int] = {}
        self.prefill_tokens = 0
        self.decode_rows = 0
        self.left_out = 0
        self.preempted = 0
        self.busy_ms = 0.0
        self.step_ms: deque[float] = deque(maxlen=KEPT)
        self.gap_ms: deque[float] = deque(maxlen=KEPT)

    def begin(self) -> None:
        """Its turn begins."""
        self.turns += 1
        self.since = time.monotonic()

    def end(self) -> None:
        """Its turn ends."""
        if self.since is not None:
            self.seconds += time.monotonic() - self.since
            self.since = None

    def add(self, step: Step) -> None:
        """A step that it planned, with its time."""
        ms = step.ms or 0.0
        self.steps += 1
        self.by_mode[step.mode] = self.by_mode.get(step.mode, 0) + 1
        self.prefill_tokens += step.prefill_tokens
        self.decode_rows += step.decode_rows
        self.left_out += step.left_out
        self.preempted += step.preempted
        self.busy_ms += ms
        self.step_ms.append(ms)

    def facts(self) -> dict[str, Any]:
        """Plain JSON values. `tokens_per_s`: rows of both kinds by busy time."""
        running = 0.0 if self.since is None else time.monotonic() - self.since
        tokens = self.prefill_tokens + self.decode_rows
        return {
            "turns": self.turns,
            "seconds": self.seconds + running,
            "steps": self.steps,
            "steps_by_mode": dict(self.by_mode),
            "prefill_tokens": self.prefill_tokens,
            "decode_rows": self.decode_rows,
            "decode_rows_left_out": self.left_out,
            "preempted": self.preempted,
            "busy_ms": self.busy_ms,
            "tokens_per_s": tokens / self.busy_ms * 1e3 if self.busy_ms else None,
            "step_ms": percentiles(self.step_ms),
            "decode_gap_ms": percentiles(self.gap_ms),
        }


class Arms:
    """The arms by name, and the last result with decode rows, whoever planned it."""

    def __init__(self, names: Iterable[str], active: str) -> None:
        self.of = {name: Arm() for name in names}
        self.of[active].begin()
        self._decoded: float | None = None

    def change(self, old: str, new: str) -> None:
        """`new` plans from here on."""
        self.of[old].end()
        self.of[new].begin()

    def add(self, step: Step) -> None:
        """A step whose result has been processed just now."""
        arm = self.of[step.scheduler]
        arm.add(step)
        now = time.monotonic()
        if step.decode_rows:
            if self._decoded is not None:
                arm.gap_ms.append((now - self._decoded) * 1e3)
            self._decoded = now
        elif not step.left_out:
            self._decoded = None  # nobody was decoding, so nobody waited

    def facts(self) -> dict[str, Any]:
        """Plain JSON values, by name."""
        return {name: arm.facts() for name, arm in self.of.items()}
