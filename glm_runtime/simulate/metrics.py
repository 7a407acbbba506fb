"""What a run was like: waits, gaps between tokens, KV use, preemptions.

    TTFT   arrival to first token          ITL   between two tokens of one request      E2E   arrival to last token

A gap that many requests share is stored once with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from glm_runtime.simulate.req import Req
from glm_runtime.simulate.shape import Plan
from glm_runtime.simulate.tree import PrefixTree

PERCENTILES = (50, 90, 99)


class _Machine(Protocol):
    """What is asked of a scheduler."""

    tree: PrefixTree

    @property
    def running(self) -> int:
        """Requests that hold KV."""
        ...

    @property
    def waiting(self) -> int:
        """Requests in line."""
        ...


@dataclass(frozen=True, slots=True)
class Ended:
    """One request that was served. Seconds; `preempted`: how often it was sent back."""

    index: int
    arrival: float
    first: float
    last: float
    prompt: int
    output: int
    preempted: int


class Metrics:
    """Of one replica."""

    def __init__(self) -> None:
        self.ended: list[Ended] = []
        self.failed: list[int] = []
        self.steps = 0
        self.prefill_tokens = 0
        self.decode_rows = 0
        self.tokens = 0
        self.preemptions = 0
        self.busy = 0.0
        self.last = 0.0
        self.most_running = 0
        self.most_waiting = 0
        self.most_used = 0
        self._used_seconds = 0.0
        self._gaps: list[float] = []
        self._weights: list[int] = []
        self._at: list[float] = [0.0]  # when each step's result came

    def step(self, made: Plan, start: float, end: float, now: float, side: _Machine) -> None:
        """A step's result came at `now`."""
        shape, at = made.shape, self._at
        at.append(now)
        self.steps += 1
        self.prefill_tokens += shape.prefill_rows
        self.decode_rows += shape.decode_rows
        self.preemptions += made.preempted
        self.busy += end - start
        self.last = now
        used = side.tree.used
        self._used_seconds += used * (end - start)
        self.most_used = max(self.most_used, used)
        self.most_running = max(self.most_running, side.running)
        self.most_waiting = max(self.most_waiting, side.waiting)
        self.tokens += made.steady + len(made.singles)
        if made.steady:
            self._gaps.append(now - at[made.steady_since])
            self._weights.append(made.steady)
        for req, before in made.singles:
            if req.first_at < 0:
                req.first_at = now
            elif before:
                self._gaps.append(now - at[before])
                self._weights.append(1)

    def skip(self, rows: int, landings: Sequence[float], busy: float, used: tuple[int, int]) -> None:
        """Plain decodes of the same `rows` requests, whose results came at `landings`; pages in use before and after.

        `kv_use_mean` takes the use between the two to grow evenly.
        """
        at, steps = self._at, len(landings)
        before = at[-1]
        for now in landings:
            self._gaps.append(now - before)
            self._weights.append(rows)
            before = now
        at.extend(landings)
        self.steps += steps
        self.decode_rows += steps * rows
        self.tokens += steps * rows
        self.busy += busy
        self.last = landings[-1]
        self._used_seconds += sum(used) / 2 * busy
        self.most_used = max(self.most_used, *used)

    def end(self, req: Req, now: float) -> None:
        """A request's last token came."""
        self.ended.append(Ended(req.index, req.arrival, req.first_at, now, req.prompt, req.output, req.preempted))

    def fail(self, req: Req) -> None:
        """A request could not be served."""
        self.failed.append(req.index)


def report(runs: Sequence[Metrics], pages: int, refused: int = 0) -> dict[str, Any]:
    """Figures of one or more replicas together, as plain JSON values; times in ms, under SGLang's benchmark's names.

    Args:
        pages: of one replica's pool. refused: requests that a server would not have taken.
    """
    ended = [entry for run in runs for entry in run.ended]
    gaps = np.concatenate([np.asarray(run._gaps) for run in runs])
    weights = np.concatenate([np.asarray(run._weights, dtype=np.int64) for run in runs])
    seconds = max((run.last for run in runs), default=0.0)
    busy = sum(run.busy for run in runs)
    prompts = sum(entry.prompt for entry in ended)
    computed = sum(run.prefill_tokens for run in runs)
    found: dict[str, Any] = {
        "completed": len(ended),
        "refused": refused,
        "failed": sum(len(run.failed) for run in runs),
        "duration_s": seconds,
        "steps": sum(run.steps for run in runs),
        "prefill_tokens": computed,
        "decode_rows": sum(run.decode_rows for run in runs),
        "output_tokens": sum(entry.output for entry in ended),
        "prompt_tokens": prompts,
        "cached_share": max(0.0, 1 - computed / prompts) if prompts else 0.0,
        "request_throughput": len(ended) / seconds if seconds else 0.0,
        "output_throughput": sum(run.tokens for run in runs) / seconds if seconds else 0.0,
        "busy_share": busy / (seconds * len(runs)) if seconds else 0.0,
        "preemptions": sum(run.preemptions for run in runs),
        "most_running": max((run.most_running for run in runs), default=0),
        "most_waiting": max((run.most_waiting for run in runs), default=0),
        "kv_use_mean": sum(run._used_seconds for run in runs) / (busy * pages) if busy else 0.0,
        "kv_use_max": max((run.most_used for run in runs), default=0) / pages,
    }
    found |= _spread("ttft_ms", [1e3 * (entry.first - entry.arrival) for entry in ended])
    found |= _spread("e2e_latency_ms", [1e3 * (entry.last - entry.arrival) for entry in ended])
    more = [1e3 * (entry.last - entry.first) / (entry.output - 1) for entry in ended if entry.output > 1]
    found |= _spread("tpot_ms", more)
    found |= _weighted("itl_ms", gaps * 1e3, weights)
    return found


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return _weighted(name, np.asarray(values, dtype=float), np.ones(len(values), dtype=np.int64))


def _weighted(name: str, values: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Mean, percentiles (the value below which so many are) and maximum of values that occur `weights` times."""
    if not len(values):
        return {f"mean_{name}": 0.0, **{f"p{p}_{name}": 0.0 for p in PERCENTILES}, f"max_{name}": 0.0}
    order = np.argsort(values)
    values, running = values[order], np.cumsum(weights[order])
    total = int(running[-1])
    at = np.searchsorted(running, [max(1, -(-total * p // 100)) for p in PERCENTILES])
    spread = {f"p{p}_{name}": float(values[i]) for p, i in zip(PERCENTILES, at, strict=True)}
    mean = float((values * weights[order]).sum() / total)
    return {f"mean_{name}": mean, **spread, f"max_{name}": float(values[-1])}
