"""A step-cost model from a step log: least squares on rows and key visits.

    seconds = c0 + c1 prefill rows + c2 their keys + c3 decode rows + c4 their keys + c5 prompts        c >= 0

The log (--step-log) tells rows by request; their contexts are summed up from it, starting at each request's prefix hit.
A step's time is from its planning to the next one's where the machine was busy all the while, else its own `ms` plus
the usual pause between steps. Rows are divided by their time, so that all steps count alike (as in
policies/ledger/step_time.py), and a step that took LONG times the median of its like does not count at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_runtime.simulate.shape import Shape

NAMES = ("constant", "prefill_rows", "prefill_keys", "decode_rows", "decode_keys", "prompts")
LONG = 4.0
ROUNDS = 3


@dataclass(frozen=True)
class Logged:
    """One step of a log: its work, its wall time in seconds, its rows by request and prefix hits."""

    number: int
    at: float
    seconds: float
    shape: Shape
    mode: str
    rows: dict[str, int]
    hits: dict[str, int]


class LogError(ValueError):
    """A step log that cannot be used; one line naming the file and the line."""


def read_log(path: str | os.PathLike[str], topk: int) -> list[Logged]:
    """Steps of a --step-log file with their work. Raises LogError naming the line."""
    raw: list[dict[str, Any]] = []
    try:
        with open(path, encoding="utf-8") as lines:
            for place, text in enumerate(lines, 1):
                try:
                    step = json.loads(text)
                    if not isinstance(step["rows"], dict) or step["ms"] is None:
                        raise KeyError("rows")
                    float(step["at"]), float(step["ms"]), int(step["prefill_tokens"]), int(step["decode_rows"])
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise LogError(f"{path}:{place}: no step record ({error})") from None
                raw.append(step)
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from None
    return logged(raw, topk)


def logged(raw: Sequence[dict[str, Any]], topk: int) -> list[Logged]:
    """Steps with their work, from step records in order."""
    computed: dict[str, int] = {}
    decoding: set[str] = set()
    pauses = [b["at"] - a["at"] - a["ms"] / 1e3 for a, b in pairwise(raw)]
    pause = float(np.median(pauses)) if pauses else 0.0
    found = []
    for i, step in enumerate(raw):
        rows: dict[str, int] = step["rows"]
        hits: dict[str, int] = step.get("hits") or {}
        shape = Shape()
        for rid, hit in hits.items():  # admitted, perhaps anew after a preemption
            computed[rid] = hit
            decoding.discard(rid)
        singles = [rid for rid, count in rows.items() if count == 1 and rid in decoding]
        prompts = [rid for rid in rows if rid not in set(singles)]
        if len(singles) > step["decode_rows"]:  # one-row parts of prompts
            singles, extra = singles[: step["decode_rows"]], singles[step["decode_rows"] :]
            prompts += extra
        for rid in prompts:
            start = computed.get(rid, 0)
            shape.add_prompt(start, rows[rid], topk)
            computed[rid] = start + rows[rid]
            decoding.add(rid)
        for rid in singles:
            computed[rid] = computed.get(rid, 0) + 1
            shape.decode_rows += 1
            shape.decode_context += computed[rid]
            shape.decode_chosen += min(computed[rid], topk)
        own = step["ms"] / 1e3
        seconds = own + pause
        if i + 1 < len(raw):
            period = raw[i + 1]["at"] - step["at"]
            if own <= period <= own * 1.5 + 0.02:
                seconds = period
        found.append(Logged(step["number"], step["at"], seconds, shape, step["mode"], rows, hits))
    return found


def features(shape: Shape) -> tuple[float, ...]:
    """The model's terms of one step, in the order of NAMES."""
    return (
        1.0,
        shape.prefill_rows,
        shape.prefill_pairs,
        shape.decode_rows,
        shape.decode_context,
        shape.chunks,
    )


@dataclass(frozen=True)
class Fitted:
    """Seconds a unit of each term. `error`: median of |predicted / real - 1| over the steps fitted to."""

    coefficients: tuple[float, ...]
    error: float
    steps: int

    def __call__(self, shape: Shape) -> float:
        """Seconds of a step."""
        return sum(c * x for c, x in zip(self.coefficients, features(shape), strict=True))

    def json(self) -> dict[str, Any]:
        """Plain JSON values."""
        terms = dict(zip(NAMES, self.coefficients, strict=True))
        return {"seconds": terms, "median_error": self.error, "steps": self.steps}


def fit(steps: Iterable[Logged]) -> Fitted:
    """Least squares with coefficients that are not negative. ValueError for fewer steps than terms."""
    used = [step for step in steps if step.seconds > 0]
    if len(used) < len(NAMES):
        raise ValueError(f"a step log of {len(used)} steps is too short to fit {len(NAMES)} terms to")
    x = np.array([features(step.shape) for step in used], dtype=float)
    y = np.array([step.seconds for step in used])
    keep = np.ones(len(y), dtype=bool)
    c = np.zeros(x.shape[1])
    for _ in range(ROUNDS):
        c = _not_negative(x[keep] / y[keep, None], np.ones(int(keep.sum())))
        ratio = y / np.maximum(x @ c, 1e-12)
        fresh = ratio < LONG * float(np.median(ratio[keep]))
        if bool((fresh == keep).all()) or int(fresh.sum()) < len(NAMES):
            break
        keep = fresh
    error = float(np.median(np.abs(x @ c / y - 1)))
    return Fitted(tuple(c.tolist()), error, len(used))


def _not_negative(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with coefficients >= 0, by Lawson and Hanson's active set; columns are scaled to unit length."""
    length = np.linalg.norm(x, axis=0)
    scaled = x / np.where(length > 0, length, 1.0)
    c = np.zeros(x.shape[1])
    active = np.zeros(x.shape[1], dtype=bool)
    for _ in range(4 * x.shape[1]):
        gain = scaled.T @ (y - scaled @ c)
        gain[active] = -np.inf
        best = int(np.argmax(gain))
        if gain[best] <= 1e-10 * len(y):
            break
        active[best] = True
        while True:
            trial = np.zeros_like(c)
            trial[active] = np.linalg.lstsq(scaled[:, active], y, rcond=None)[0]
            below = active & (trial <= 0)
            if not below.any():
                break
            step = np.min(c[below] / np.maximum(c[below] - trial[below], 1e-300))
            c += step * (trial - c)
            active &= c > 1e-15
        c = trial
    return c / np.where(length > 0, length, 1.0)
