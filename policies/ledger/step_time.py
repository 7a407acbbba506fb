"""A budget in time: how long will a step take, and how many prefill rows fit into it.

    ms = c0 + c1 * prefill rows + c2 * sum of their contexts + c3 * decode rows + c4 * sum of their contexts

    n rows after C computed tokens see  pairs(C, n) = n*C + n*(n+1)/2  keys, so a long context gets fewer rows:
    the largest n with  c1*n + c2*pairs(C, n) <= target - (what is in the step already).

The coefficients are never negative. They are fitted online to relative errors by least squares that forget: after
every step the normal equations A, b decay by `memory` and take the new row (x / ms, 1); a few rounds of coordinate
descent from the last solution follow. A step that took ten times too long (a pause of the machine) weighs little, since
its row is divided by its own time.

Bounds. Decode rows always go. A step that has prefills to run takes at least `floor` rows of them, whatever the
forecast, so a prompt of N tokens that is first in line is through after ceil(N / floor) of its steps. A step never
takes more than twice the rows of the largest step measured so far (`floor` at the start), so that the model does not
extrapolate far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite, sqrt
from operator import mul

from policies.ledger.plan import StepLoad

FLOOR = 64  # prefill rows that a step may always take: one page of SGLang's DSA cache
_FEATURES = 5
_ROUNDS = 4
_LEAST_MS = 1e-3
_FORGOTTEN = 1e-30  # a feature not seen for so long keeps its coefficient


def pairs(context: int, rows: int) -> int:
    """Keys that `rows` new rows after `context` tokens see in all, each itself included."""
    return rows * context + rows * (rows + 1) // 2


def rows_within(ms: float, context: int, per_row: float, per_pair: float, most: int) -> int:
    """Largest n <= `most` with per_row * n + per_pair * pairs(context, n) <= `ms`."""
    if ms <= 0 or most <= 0:
        return 0
    linear = per_row + per_pair * (context + 0.5)
    slope = linear + sqrt(linear * linear + 2 * per_pair * ms)  # the root in the form that does not cancel
    return most if most * slope <= 2 * ms else int(2 * ms / slope)


@dataclass
class StepTime:
    """The model of one device. `memory` is what one step leaves of the steps before it."""

    memory: float = 0.99
    coefficients: list[float] = field(default_factory=lambda: [0.0] * _FEATURES)
    steps: int = 0
    error: float = 0.0  # mean of |predicted / real - 1|, forgetting likewise; forecasts made before the step was known
    _a: list[list[float]] = field(default_factory=lambda: [[0.0] * _FEATURES for _ in range(_FEATURES)], repr=False)
    _b: list[float] = field(default_factory=lambda: [0.0] * _FEATURES, repr=False)

    def predict(self, load: StepLoad) -> float:
        """Milliseconds that a step of this load should take."""
        return sum(c * x for c, x in zip(self.coefficients, _row(load), strict=True))

    def observe(self, load: StepLoad, ms: float) -> None:
        """Learn from a step that took `ms`. ValueError where that is no time."""
        if not isfinite(ms) or ms <= 0:
            raise ValueError(f"a step cannot take {ms} ms")
        ms = max(ms, _LEAST_MS)
        if self.steps:
            blame = abs(self.predict(load) / ms - 1)
            self.error += (blame - self.error) * max(1 - self.memory, 1 / self.steps)
        self.steps += 1
        row = [x / ms for x in _row(load)]
        for i, x in enumerate(row):
            self._b[i] = self.memory * self._b[i] + x
            line = self._a[i]
            for j, y in enumerate(row):
                line[j] = self.memory * line[j] + x * y
        self._solve()

    def _solve(self) -> None:
        """Coordinate descent on a non-negative quadratic: each coefficient in turn takes its best value."""
        a, b, c = self._a, self._b, self.coefficients
        for _ in range(_ROUNDS):
            for i, line in enumerate(a):
                if line[i] > _FORGOTTEN:
                    c[i] = max(0.0, c[i] + (b[i] - sum(map(mul, line, c))) / line[i])


def _row(load: StepLoad) -> tuple[float, ...]:
    return (1.0, load.prefill_rows, load.prefill_pairs, load.decode_rows, load.decode_context)


class StepPacer:
    """Keeps a step's forecast within `target_step_ms` by choosing its prefill rows. A Pacer of the ledger.

    After every step: `pacer.observe(plan.load, measured_ms)`.
    """

    def __init__(self, target_step_ms: float, floor: int = FLOOR, model: StepTime | None = None) -> None:
        if not isfinite(target_step_ms) or target_step_ms <= 0:
            raise ValueError(f"target_step_ms must be above 0, not {target_step_ms}")
        if floor < 1:
            raise ValueError(f"floor must be at least 1 row a step, not {floor}")
        self.target_step_ms = target_step_ms
        self.floor = floor
        self.model = StepTime() if model is None else model
        self.largest = 0  # prefill rows of the largest step measured
        self._load = StepLoad()

    def begin(self, decode_rows: int, decode_context: int) -> None:
        """See Pacer."""
        self._load = StepLoad(decode_rows=decode_rows, decode_context=decode_context)

    def limit(self, context: int, want: int) -> int:
        """See Pacer."""
        taken = self._load.prefill_rows
        owed = min(want, max(0, self.floor - taken))
        reach = min(want, max(self.floor, 2 * self.largest) - taken)
        _, per_row, per_pair, _, _ = self.model.coefficients
        left = self.target_step_ms - self.model.predict(self._load)
        return max(owed, rows_within(left, context, per_row, per_pair, reach))

    def take(self, context: int, rows: int) -> None:
        """See Pacer."""
        self._load.prefill_rows += rows
        self._load.prefill_pairs += pairs(context, rows)

    def give_back(self, context: int, rows: int) -> None:
        """See Pacer."""
        self._load.prefill_rows -= rows
        self._load.prefill_pairs -= pairs(context, rows)

    def load(self) -> StepLoad:
        """See Pacer."""
        if self.model.steps:
            self._load.predicted_ms = self.model.predict(self._load)
        return self._load

    def observe(self, load: StepLoad, ms: float) -> None:
        """Learn from a step that took `ms` milliseconds."""
        self.model.observe(load, ms)
        self.largest = max(self.largest, load.prefill_rows)
