"""Intervals for the difference of two arms: a paired bootstrap over requests. Pure (numpy).

    request      1      2      3      4                one resample: 3, 1, 3, 4   the same in both arms
    arm A      210    950    214    380   ms
    arm B      180    400    190    390                statistic of B / statistic of A; 1,000 times; 2.5% and 97.5%

The same requests are drawn in both arms, so that what is common to both (a long prompt is slow everywhere) cancels.
A statistic over the gaps of requests (ITL) draws requests too, never single gaps: those of one request belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
RESAMPLES = 1000
MOST = 40_000_000  # values touched in all: fewer resamples for large runs, never below LEAST
LEAST = 100


@dataclass(frozen=True)
class Ratio:
    """Statistic of arm B over that of arm A, with the bounds of a 95% interval; nan where there is none."""

    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves 1 out."""
        return bool(self.high < 1 or self.low > 1)


class Sample:
    """Values of one arm, grouped by request.

    Args:
        groups: values of each request; a request without any is an empty sequence.
    """

    def __init__(self, groups: Sequence[Sequence[float]]) -> None:
        values = np.concatenate([np.asarray(group, dtype=np.float64) for group in groups]) if groups else np.empty(0)
        owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        order = np.argsort(values, kind="stable")
        self.values: Values = values[order]
        self.owner = owner[order]
        self.groups = len(groups)

    def quantile(self, q: float, counts: Values | None = None) -> float:
        """Quantile of all values; `counts`: how often each request was drawn. Linear between values, nan of nothing."""
        if not len(self.values):
            return float("nan")
        if counts is None:
            return float(np.quantile(self.values, q))
        weights = np.cumsum(counts[self.owner])
        total = weights[-1]
        if total == 0:
            return float("nan")
        place = q * (total - 1)
        low = int(np.searchsorted(weights, np.floor(place), side="right"))
        high = min(int(np.searchsorted(weights, np.floor(place) + 1, side="right")), len(self.values) - 1)
        part = place - np.floor(place)
        return float(self.values[low] * (1 - part) + self.values[high] * part)

    def mean(self, counts: Values | None = None) -> float:
        """Mean of all values, nan of nothing."""
        if not len(self.values):
            return float("nan")
        if counts is None:
            return float(self.values.mean())
        weights = counts[self.owner]
        return float((self.values * weights).sum() / weights.sum()) if weights.sum() else float("nan")


Statistic = Callable[[Sample, "Values | None"], float]


def paired(a: Sample, b: Sample, statistic: Statistic, seed: int = 0, resamples: int = RESAMPLES) -> Ratio:
    """Ratio of the arms' statistics with its interval.

    Args:
        a, b: of the same requests in the same order; ValueError otherwise.
    """
    if a.groups != b.groups:
        raise ValueError(f"{a.groups} requests in one arm, {b.groups} in the other")
    base, other = statistic(a, None), statistic(b, None)
    value = other / base if base else float("nan")
    if a.groups < 2:
        return Ratio(value, float("nan"), float("nan"))
    rounds = max(LEAST, min(resamples, MOST // max(1, len(a.values) + len(b.values))))
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(rounds):
        counts = np.bincount(rng.integers(0, a.groups, a.groups), minlength=a.groups).astype(np.float64)
        below = statistic(a, counts)
        if below > 0:
            found.append(statistic(b, counts) / below)
    kept = [one for one in found if np.isfinite(one)]
    if len(kept) < LEAST // 2:
        return Ratio(value, float("nan"), float("nan"))
    low, high = np.quantile(kept, [0.025, 0.975])
    return Ratio(value, float(low), float(high))
