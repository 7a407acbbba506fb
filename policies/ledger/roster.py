"""Who is running: in order of admission, and who of them must be looked at.

running   r4  r7  r8  r9  r12 r13        seats ascend; a resumed request gets a new seat at the end
steady     *       *   *       *         kept by the clock, one row a step
loose          r7          r12           looked at one by one
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from operator import attrgetter

from policies.ledger.plan import StepPlan
from policies.ledger.request import Request
from policies.ledger.steady import Steady

_by_seat = attrgetter("seat")


class Roster:
    """The running requests."""

    def __init__(self, async_scheduling: bool) -> None:
        self.running: dict[Request, int] = {}  # in order of admission; the value is always 1, a steady request's row
        self.loose: dict[Request, None] = {}
        self.steady = Steady(async_scheduling)
        self.in_flight: list[StepPlan] = []
        self._seats: list[int] = []
        self._admissions = 0

    def __len__(self) -> int:
        return len(self.running)

    def enter(self, request: Request) -> None:
        """An admitted request takes the next seat."""
        self._admissions += 1
        request.seat = self._admissions
        self.running[request] = 1
        self.loose[request] = None
        self._seats.append(request.seat)

    def leave(self, request: Request) -> None:
        """A request ends or is preempted."""
        if request.steady is not None:
            self.loosen(request)
        del self.loose[request]
        del self.running[request]
        del self._seats[bisect_left(self._seats, request.seat)]

    def ahead(self, request: Request) -> int:
        """How many running requests sit before this one."""
        return bisect_left(self._seats, request.seat)

    def last(self) -> Request:
        """The tail of the running list."""
        return next(reversed(self.running))

    def keep(self, request: Request, limit: int) -> None:
        """Leave a loose request to the clock until it has `limit` computed tokens."""
        del self.loose[request]
        self.steady.join(request, limit)

    def loosen(self, request: Request) -> None:
        """Look at a steady request again; its results in flight are folded one by one."""
        self.steady.leave(request)
        self.loose[request] = None
        for plan in self.in_flight:
            plan.singles.setdefault(request, 0)

    def loosen_due(self) -> None:
        """Loosen those to which something happens in the coming step."""
        for request in self.steady.due():
            self.loosen(request)

    def loosen_all(self) -> None:
        """Give up the clock."""
        if self.steady.count:
            for request in self.running:
                if request.steady is not None:
                    self.loosen(request)

    def loose_in_order(self) -> list[Request]:
        """Loose requests in running order."""
        return sorted(self.loose, key=_by_seat)

    def decode_running(self) -> bool:
        """Whether some running request is past its prompt (its last rows reached its end)."""
        return self.steady.count > 0 or any(not request.is_prefill_chunk for request in self.loose)

    def decodes(self) -> tuple[int, int]:
        """Requests with one token to go, and the sum of their contexts."""
        rows = self.steady.count
        context = self.steady.context + rows * self.steady.scheduled
        for request in self.loose:
            if request.one_to_go:
                rows += 1
                context += request.computed
        return rows, context

    def half_done(self, rows: Mapping[Request, int]) -> Iterable[int]:
        """Tokens to go of every prompt that is still unfinished after `rows`, counted before them."""
        for request in self.loose:
            if not request.one_to_go and request.to_go > rows.get(request, 0):
                yield request.to_go

    def in_order(self, rows: Mapping[Request, int]) -> dict[Request, int]:
        """All rows in running order: one for each steady request, `rows` for the others."""
        tokens = self.running.copy()
        for request in self.loose:
            if request in rows:
                tokens[request] = rows[request]
            else:
                del tokens[request]
        return tokens
