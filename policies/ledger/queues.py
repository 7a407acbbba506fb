"""The waiting line: a deque for first come first served, a heap for priority."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from policies.ledger.request import Request

_Entry = tuple[tuple[int, float, int], Request]


class FcfsQueue:
    """Arrival order; a preempted request goes to the front."""

    def __init__(self) -> None:
        self._line: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """A new request: to the end."""
        self._line.append(request)

    def put_back(self, request: Request) -> None:
        """A preempted request: to the front."""
        self._line.appendleft(request)

    def restore(self, skipped: Iterable[Request]) -> None:
        """Requests passed over in this step, in their order: to the front again."""
        self._line.extendleft(reversed(list(skipped)))

    def peek(self) -> Request:
        """The next request."""
        return self._line[0]

    def pop(self) -> Request:
        """Take the next request."""
        return self._line.popleft()

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self._line.remove(request)

    def first(self, count: int) -> Iterable[Request]:
        """The next `count` requests, left in place."""
        return islice(self._line, count)

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)


class PriorityQueue:
    """Order of (priority, arrival time); a preempted request takes its old place."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []

    def add(self, request: Request) -> None:
        """A new request."""
        heapq.heappush(self._heap, (request.rank, request))

    put_back = add

    def restore(self, skipped: Iterable[Request]) -> None:
        """Requests passed over in this step."""
        for request in skipped:
            self.add(request)

    def peek(self) -> Request:
        """The next request."""
        return self._heap[0][1]

    def pop(self) -> Request:
        """Take the next request."""
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self._heap.remove((request.rank, request))
        heapq.heapify(self._heap)

    def first(self, count: int) -> Iterable[Request]:
        """`count` requests from the front, left in place; the next one first, the others roughly in order."""
        return [request for _, request in self._heap[:count]]

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap))
