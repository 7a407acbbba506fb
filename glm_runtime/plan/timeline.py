"""The steps of one prompt, by the ledger itself: who gets how many rows when.

step        1        2      ...   64       65
prompt   [0,16384) [16384,..    ..1M)      first decode
decodes   d rows    d rows  ...  d rows    d + 1 rows
"""

from __future__ import annotations

from dataclasses import dataclass

from glm_runtime.plan.setup import PAGE, Setup
from policies.ledger import NO_ROOM, Ledger, PagePool, Request
from policies.ledger.step_time import pairs


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `start` and `rows` of the prompt's chunk (rows 0: none in it); decode rows and their contexts' sum."""

    number: int
    start: int
    rows: int
    decode_rows: int
    decode_context: int

    @property
    def end(self) -> int:
        """Context of the prompt after the step."""
        return self.start + self.rows

    @property
    def tokens(self) -> int:
        """Rows of the step in all."""
        return self.rows + self.decode_rows

    @property
    def visits(self) -> int:
        """Keys that the prompt's rows see in all."""
        return pairs(self.start, self.rows)


class _Hits(PagePool):
    """A pool in which a request's `handle` tokens are cached, whole pages of them, at most all but the last one."""

    def lookup(self, request: Request) -> int:
        """See KVPort."""
        if request.handle is None:
            return 0
        tokens = min(int(request.handle), request.num_tokens - 1)
        return tokens if request.id.startswith("decode") else tokens // self.page_size * self.page_size

    def admit(self, request: Request, hit: int, end: int, lookahead: int, whole: int, spare: bool) -> int:
        """See KVPort. There is room: a plan asks for capacity elsewhere."""
        found = super().admit(request, hit, end, lookahead, whole, spare)
        assert found != NO_ROOM
        return found


@dataclass(frozen=True)
class Timeline:
    """`prefill`: the prompt's steps; `first_decode`: number of the step that decodes the prompt's second token;
    `alone`: a step of the decodes without the prompt (None without decodes); `hit`: prompt tokens not computed."""

    prefill: tuple[Step, ...]
    first_decode: int
    alone: Step | None
    hit: int


def timeline(setup: Setup) -> Timeline:
    """Run the ledger on one prompt beside `setup.decodes` decoding requests."""
    config = setup.ledger_config()
    tokens = setup.context + setup.output + setup.decodes * (setup.decode_context + setup.most_steps) + PAGE
    ledger = Ledger(config, _Hits(tokens // PAGE + 2 * setup.decodes + 2, PAGE))
    decodes = [
        Request(f"decode{i}", setup.decode_context, handle=setup.decode_context - 1) for i in range(setup.decodes)
    ]
    for request in decodes:
        ledger.add(request)
    alone = None
    if decodes:
        while not all(request.num_output_tokens for request in decodes):
            plan = ledger.schedule()
            ledger.update(plan)
        context = sum(request.num_computed_tokens + 1 for request in decodes)
        alone = Step(0, 0, 0, len(decodes), context)
    prompt = Request("prompt", setup.context, handle=setup.cached or None)
    ledger.add(prompt)
    steps: list[Step] = []
    number = 0
    while not prompt.num_output_tokens:
        plan = ledger.schedule()
        number += 1
        rows = plan.tokens.get(prompt, 0)
        others = [request for request in plan.tokens if request is not prompt]
        context = sum(request.num_computed_tokens for request in others)
        if plan:
            steps.append(Step(number, prompt.num_computed_tokens - rows, rows, len(others), context))
        ledger.update(plan)
    return Timeline(tuple(steps), number + 1, alone, prompt.num_cached_tokens)
