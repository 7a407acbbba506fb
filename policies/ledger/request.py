"""One request in the ledger: a few counters, no tokens.

    |<------------- num_tokens: prompt + generated ------------->|<- drafts ->|
    |<--- num_computed_tokens --->|<-- still to compute: the next row(s) ---->|

A prompt, a resumed request and a decode differ only in how far apart the two marks are.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies.ledger.steady import Steady


class Status(IntEnum):
    """Where a request is. FINISHED covers every end: stop, length, abort, failure."""

    WAITING = 0
    PREEMPTED = 1
    RUNNING = 2
    FINISHED = 3


class Request:
    """Counters of one request, in tokens.

    `handle` is the caller's own object (SGLang's Req, a line of a trace); the ledger never looks into it.
    `max_tokens` 0 means unknown; it is read only under async scheduling, to leave out a row that would be thrown away.
    A smaller `priority` value goes first, then the earlier `arrival_time`.

    NOTE: `computed`, `tokens` and `placeholders` are the ledger's own; while `steady` is set they are relative to its
    clock. Read the properties.
    """

    __slots__ = (
        "arrival_time",
        "computed",
        "due",
        "handle",
        "id",
        "is_prefill_chunk",
        "last_hit",
        "max_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "placeholders",
        "priority",
        "quiet",
        "seat",
        "spec",
        "status",
        "steady",
        "tokens",
    )

    def __init__(
        self,
        id: str,
        num_prompt_tokens: int,
        max_tokens: int = 0,
        priority: int = 0,
        arrival_time: float = 0.0,
        handle: Any = None,
    ) -> None:
        if num_prompt_tokens < 1:
            raise ValueError(f"num_prompt_tokens of request {id!r} must be at least 1, not {num_prompt_tokens}")
        self.id = id
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.priority = priority
        self.arrival_time = arrival_time
        self.handle = handle
        self.status = Status.WAITING
        self.tokens = num_prompt_tokens
        self.computed = 0
        self.spec = 0
        self.placeholders = 0
        self.is_prefill_chunk = False
        self.num_cached_tokens = 0
        self.last_hit = -1  # what the prefix cache held of it when last looked up; -1: never looked up
        self.num_preemptions = 0
        self.order = 0  # number of the arrival; breaks ties of priority and time
        self.seat = 0  # number of the admission; running order is seat order
        self.quiet = 0  # tokens up to which the KV port need not be asked again
        self.due = 0  # step of the calendar that must look at it again, while steady
        self.steady: Steady | None = None

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is computed or in the step being computed."""
        return self.computed if self.steady is None else self.computed + self.steady.scheduled

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens known so far."""
        return self.tokens if self.steady is None else self.tokens + self.steady.folded

    @property
    def num_output_placeholders(self) -> int:
        """Tokens that steps in flight will bring; always 0 without async scheduling."""
        return self.placeholders if self.steady is None else self.steady.placeholders

    @property
    def num_tokens_with_spec(self) -> int:
        """What the ledger works towards: known tokens, pending drafts and tokens in flight."""
        return self.num_tokens + self.spec + self.num_output_placeholders

    @property
    def to_go(self) -> int:
        """Tokens still to compute, drafts not counted; for requests that are not steady."""
        return self.tokens + self.placeholders - self.computed

    @property
    def one_to_go(self) -> bool:
        """A decode, or the last token of a prompt; for requests that are not steady."""
        return self.tokens + self.placeholders - self.computed <= 1

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens known so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def rank(self) -> tuple[int, float, int]:
        """Place by priority: the smallest goes first, the largest is preempted first."""
        return (self.priority, self.arrival_time, self.order)

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens_with_spec})"
