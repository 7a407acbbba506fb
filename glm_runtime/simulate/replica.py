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
            made = side.plan()
            if side.failed:
                self._fail()
            if made is not None:
                self._launch(made)
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
