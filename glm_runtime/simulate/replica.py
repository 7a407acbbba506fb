"""One machine: its scheduler, its clock, and when results come.

overlap "off"       | plan 1 | run 1 | result 1 | plan 2 | run 2 |
overlap "device"    plan 2 while 1 runs; result 1 when 1 has run          a GPU under SGLang's overlap schedule
overlap "blocking"  | run 1 | plan 2 | run 2 | result 1 | plan 3 |        the same on a CPU, where running blocks
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

from glm_runtime.simulate.metrics import Metrics
from glm_runtime.simulate.req import Req
from glm_runtime.simulate.shape import Plan, Shape
from glm_runtime.simulate.tree import PrefixTree

Overlap = Literal["off", "device", "blocking"]
OVERLAPS: tuple[Overlap, ...] = ("off", "device", "blocking")
StepCost = Callable[[Shape], float]
"""Seconds of a step."""
LEAST_SKIP = 3
"""Fewer plain decodes than this are made one by one."""


class Side(Protocol):
    """A scheduler in the simulator."""

    tree: PrefixTree
    preemptions: int
    failed: list[Req]

    @property
    def waiting(self) -> int:
        """Requests in line."""
        ...

    @property
    def running(self) -> int:
        """Requests that hold KV."""
        ...

    def add(self, req: Req) -> None:
        """An arrival."""
        ...

    def plan(self) -> Plan | None:
        """The next step, None for none."""
        ...

    def settle(self, made: Plan) -> list[Req]:
        """A step's result has come; who ended with it. Plans settle in their order."""
        ...

    def idle(self) -> None:
        """There is nothing to do."""
        ...

    def observe(self, made: Plan, seconds: float) -> None:
        """A step took so long."""
        ...

    def quiet(self, made: Plan) -> int:
        """How many steps after `made`, the last one planned, would be the same plain decode and end nobody."""
        ...

    def skip(self, made: Plan, steps: int) -> None:
        """As so many of them, planned and settled; `made` becomes the last one (in flight, if it was)."""
        ...


class Replica:
    """A scheduler with a clock in seconds. `on_step`: called with each plan and its start and end, when its result
    comes."""

    def __init__(
        self,
        side: Side,
        cost: StepCost,
        overlap: Overlap,
        metrics: Metrics,
        on_step: Callable[[Plan, float, float], None] | None = None,
    ) -> None:
        self.side = side
        self.now = 0.0
        self.metrics = metrics
        self.inbox: deque[Req] = deque()
        self.load = 0  # prompt tokens of requests that have not ended
        self._cost = cost
        self._overlap = overlap
        self._on_step = on_step
        self._flying: tuple[Plan, float, float] | None = None
        self._busy_until = 0.0

    def send(self, req: Req) -> None:
        """A request that arrives at `req.arrival`; in order of arrival."""
        self.inbox.append(req)
        self.load += req.prompt

    def run(self, until: float = float("inf")) -> None:
        """Make steps until the clock reaches `until`, or nothing is left to do."""
        side, inbox = self.side, self.inbox
        while self.now < until:
            while inbox and inbox[0].arrival <= self.now:
                side.add(inbox.popleft())
            empty = self._flying is None and not side.running and not side.waiting
            made = None if empty else side.plan()
            if side.failed:
                self._fail()
            if made is not None:
                self._launch(made)
                if self._on_step is None:
                    self._skip(made, min(until, inbox[0].arrival) if inbox else until)
            elif self._flying is not None:
                self._land()
            elif inbox and not side.waiting:
                side.idle()
                if inbox[0].arrival >= until:
                    return
                self.now = inbox[0].arrival
            elif inbox:  # a line that cannot move until somebody comes: nobody runs, so it never will
                self._stuck()
            else:
                if side.waiting:
                    self._stuck()
                side.idle()
                return

    def _launch(self, made: Plan) -> None:
        seconds = self._cost(made.shape)
        before = self._flying
        if self._overlap == "device":
            start = max(self.now, self._busy_until)
            self._busy_until = start + seconds
            if before is not None:
                self._land()
            self._flying = made, start, self._busy_until
            return
        start = self.now
        self.now += seconds
        if self._overlap == "off":
            self._flying = made, start, self.now
            self._land()
            return
        if before is not None:
            self._land()
        self._flying = made, start, self.now

    def _land(self) -> None:
        """The oldest step's result comes."""
        assert self._flying is not None
        made, start, end = self._flying
        self._flying = None
        self.now = max(self.now, end)
        self.side.observe(made, end - start)
        ended = self.side.settle(made)
        self.metrics.step(made, start, end, self.now, self.side)
        for req in ended:
            self.load -= req.prompt
            self.metrics.end(req, self.now)
        if self._on_step is not None:
            self._on_step(made, start, end)

    def _skip(self, made: Plan, bound: float) -> None:
        """Take plain decodes that are alike in one go, as far as each is planned before `bound`.

        A step's time grows evenly along them, which the cost models do but for a kink where a term begins to bind.
        """
        steps = self.side.quiet(made)
        if steps < LEAST_SKIP:
            return
        shape = made.shape
        first = self._cost(_later(shape, 1))
        last = self._cost(_later(shape, steps))
        grow = (last - first) / (steps - 1)
        flying = self._flying
        ends = [self.now if flying is None else flying[2]]
        planned, seconds = self.now, first
        for _ in range(steps):
            if planned >= bound:
                break
            ends.append(ends[-1] + seconds)
            planned = ends[-2] if self._overlap == "device" else ends[-1]
            seconds += grow
        steps = len(ends) - 1
        if steps < 1:
            return
        if flying is None:  # "off": the steps after a landed one
            landings, spans = ends[1:], ends
        elif self._overlap == "device":
            landings, spans = ends[:-1], [flying[1], *ends[:-1]]
        else:
            landings, spans = ends[1:], [flying[1], *ends[:-1]]
        used = self.side.tree.used
        self.side.skip(made, steps)
        self.metrics.skip(shape.decode_rows, landings, spans[-1] - spans[0], (used, self.side.tree.used))
        if flying is not None:
            self._flying = made, ends[-2], ends[-1]
        self._busy_until = ends[-1]
        self.now = landings[-1]

    def _fail(self) -> None:
        for req in self.side.failed:
            self.load -= req.prompt
            self.metrics.fail(req)
        self.side.failed.clear()

    def _stuck(self) -> None:
        raise RuntimeError(
            f"{self.side.waiting} requests wait at {self.now:.3f} s, nothing runs, and the KV pool of "
            f"{self.side.tree.pages * self.side.tree.page} tokens takes none of them"
        )


def _later(shape: Shape, steps: int) -> Shape:
    """The plain decode so many steps later."""
    context = shape.decode_context + steps * shape.decode_rows
    chosen = context if shape.decode_chosen == shape.decode_context else shape.decode_chosen
    return Shape(decode_rows=shape.decode_rows, decode_context=context, decode_chosen=chosen)
