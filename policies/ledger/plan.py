"""What one step does: the ledger's answer, and what the ledger keeps to fold its results back."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.ledger.request import Request


@dataclass(slots=True)
class StepLoad:
    """What a step's time depends on. `prefill_pairs` and `decode_context` count the keys that the rows see in all."""

    prefill_rows: int = 0
    prefill_pairs: int = 0
    decode_rows: int = 0
    decode_context: int = 0
    predicted_ms: float | None = None


@dataclass(eq=False, slots=True)
class StepPlan:
    """One step. Requests keep the order of the running list.

    tokens        rows of each request in this step; `request.num_computed_tokens` already counts them, so a row block
                  starts at that minus the rows
    extends       the part of `tokens` that is not plain decode: prompts and resumed requests, one-token tails included
    chunks        of these, the ones that do not reach the end of their prompt: nothing is sampled
    drafts        speculative tokens among the rows; those of an admitted request are fillers of value -1
    admitted      taken from the waiting line, `request.num_cached_tokens` each found in the prefix cache
    preempted     sent back to the waiting line, KV freed, in order; nothing is admitted in such a step
    failed        ended by the ledger: a reason each
    prefill_tokens, decode_rows   rows by kind
    load          the pacer's view of the step and its forecast; None without a pacer
    """

    number: int = 0
    tokens: dict[Request, int] = field(default_factory=dict)
    extends: dict[Request, int] = field(default_factory=dict)
    chunks: list[Request] = field(default_factory=list)
    drafts: dict[Request, int] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)
    total_tokens: int = 0
    prefill_tokens: int = 0
    decode_rows: int = 0
    load: StepLoad | None = None
    singles: dict[Request, int] = field(default_factory=dict)  # sampling rows to fold one by one -> their drafts

    def __bool__(self) -> bool:
        """Whether anything runs."""
        return self.total_tokens > 0

    @property
    def predicted_ms(self) -> float | None:
        """The pacer's forecast of the step's time; None without a pacer, or before it has learnt anything."""
        return None if self.load is None else self.load.predicted_ms

    @property
    def decode_only(self) -> bool:
        """Every row adds one token to a non-empty context (vLLM's `prefill_runs_as_decode` included)."""
        return self.total_tokens == len(self.tokens) > 0 and all(
            request.num_computed_tokens > 1 for request in self.extends
        )


@dataclass(slots=True)
class Draft:
    """A step in the making. Nothing in it has touched a request yet, so it can be thrown away and begun again."""

    tokens_left: int
    input_left: int
    threshold: int
    defer: bool
    rows: dict[Request, int] = field(default_factory=dict)
    drafts: dict[Request, int] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)
    chunk_ran: bool = False  # a running request's prefill chunk was scheduled
    prefill_ran: bool = False  # ... or a waiting one admitted with more than one token to compute
    someone_ran: bool = False  # the running loop scheduled something

    def charge(self, rows: int, slots: int) -> None:
        """Pay for `rows` requests of one row each."""
        self.tokens_left -= rows
        self.input_left -= rows * (1 + slots)
