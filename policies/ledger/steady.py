"""Steady decodes: requests that gain one row and one token every step, kept by a clock instead of one by one.

    joins at clock 7 with 40 computed: stored as 33        clock:  7   8   9  ...  14
    computed at any clock = 33 + clock                     value: 40  41  42  ...  47

A decode needs attention only when something other than "one more token" happens to it: its KV page ends, its length
limit comes, it stops. The first two are known on joining and stand in a calendar by step; the third is told by the
caller. So a step of decodes costs what its events cost, not what its rows cost.
"""

from __future__ import annotations

from policies.ledger.request import Request


class Steady:
    """The set, its two clocks and its calendar.

    `scheduled` counts steps scheduled, `folded` steps whose results came back; the gap is the steps in flight (1
    between schedule and update, 2 at most under async scheduling).
    """

    def __init__(self, async_scheduling: bool) -> None:
        self.scheduled = 0
        self.folded = 0
        self.count = 0
        self.context = 0  # sum of the members' stored computed counts
        self._async = async_scheduling
        self._calendar: dict[int, list[Request]] = {}

    @property
    def placeholders(self) -> int:
        """Tokens in flight for each member."""
        return self.scheduled - self.folded if self._async else 0

    def join(self, request: Request, limit: int) -> None:
        """Take over a request just scheduled with one row; `limit` is the computed count that ends its quiet time.

        Its step with that many computed tokens at the end is the last one that needs no look at it.
        """
        due = self.scheduled + limit - request.computed + 1
        request.computed -= self.scheduled
        request.tokens -= self.folded
        request.steady = self
        self.count += 1
        self.context += request.computed
        days = self._calendar.get(due)
        if days is None:
            self._calendar[due] = [request]
        else:
            days.append(request)
        request.due = due

    def leave(self, request: Request) -> None:
        """Hand a request back with its own counters. The calendar forgets it when its day comes."""
        self.count -= 1
        self.context -= request.computed
        request.computed += self.scheduled
        request.tokens += self.folded
        request.placeholders = self.placeholders
        request.steady = None

    def due(self) -> list[Request]:
        """Members that the coming step must look at; called once a step."""
        day = self.scheduled + 1
        found = self._calendar.pop(day, None)
        if found is None:
            return []
        # NOTE: one may have left, and even joined again, since it was written down for today.
        return [r for r in dict.fromkeys(found) if r.steady is self and r.due == day]

    def quiet(self) -> int:
        """Steps in which nobody has to be looked at, from the coming one on."""
        return min(self._calendar, default=self.scheduled + 1) - self.scheduled - 1

    def skip(self, steps: int) -> None:
        """Let so many quiet steps pass, scheduled and folded."""
        self.scheduled += steps
        self.folded += steps
