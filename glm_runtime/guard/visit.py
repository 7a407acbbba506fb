"""One HTTP request's way through the guard: what the front (`front.py`) and the tokenizer manager (`hook.py`) tell each
other. It travels in a context variable, which tasks started by the endpoint inherit.

    front: Visit made ─> endpoint ─> generate_request: rids noted, admitted or refused ─> front: answer, hang-up
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from glm_runtime.guard.refusal import Refusal


class Visit:
    """State of one HTTP request.

    Attributes:
        refusal: set where the guard refused a request of it.
        admitted: a request of it has been answered by the scheduler.
        live: engine requests in flight, and how each is aborted.
        gone: the client has hung up.
    """

    def __init__(self) -> None:
        self.refusal: Refusal | None = None
        self.admitted = False
        self.live: dict[str, Callable[[], None]] = {}
        self.gone = False

    def note(self, rid: str, abort: Callable[[], None]) -> None:
        """An engine request begins."""
        self.live[rid] = abort
        if self.gone:
            abort()

    def hang_up(self) -> None:
        """The client is gone: abort what it left in flight."""
        self.gone = True
        for abort in list(self.live.values()):
            abort()
        self.live.clear()


class Family:
    """One client's request and the engine requests that SGLang makes of it: one a prompt, one a sample of `n`."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.members: list[str] = []
        self.aborted = False


family: ContextVar[Family | None] = ContextVar("glm_runtime_family", default=None)
current: ContextVar[Visit | None] = ContextVar("glm_runtime_visit", default=None)
# Ids of this process's health checks. The scheduler knows them by their prefix, which clients' ids must not have.
own_rids: set[str] = set()
