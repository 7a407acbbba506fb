"""How many rows a request gets: what it wants, cut by one bound after another.

to go + drafts -> threshold -> budgets -> max_model_len -> share -> pacer -> look-ahead -> page end
                  '------------- vLLM's, every row ----'  '------ prefills only, each off by default ----'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from policies.ledger.budgets import page_end, prefill_threshold, share
from policies.ledger.config import LedgerConfig
from policies.ledger.plan import Draft, StepLoad
from policies.ledger.request import Request
from policies.ledger.roster import Roster


class Pacer(Protocol):
    """Bounds a step's prefill rows, one request after another (see step_time.py)."""

    floor: int  # rows that a step may always take

    def begin(self, decode_rows: int, decode_context: int) -> None:
        """A step starts with these decode rows over so many context tokens in all."""
        ...

    def limit(self, context: int, want: int) -> int:
        """How many of `want` prefill rows may follow `context` computed tokens."""
        ...

    def take(self, context: int, rows: int) -> None:
        """These rows go."""
        ...

    def give_back(self, context: int, rows: int) -> None:
        """They were taken back in the same step."""
        ...

    def load(self) -> StepLoad:
        """The step as taken since begin(), with a forecast once something was learnt."""
        ...


class Sizer:
    """The bounds of one ledger."""

    def __init__(self, config: LedgerConfig, roster: Roster, pacer: Pacer | None) -> None:
        self._config = config
        self._roster = roster
        self._pacer = pacer
        self._slots = config.draft_slots
        self._capped = config.max_num_partial_prefills > 0 or config.max_long_partial_prefills > 0
        self._shaped = self._capped or config.chunk_align > 1 or pacer is not None or config.num_prefill_lookahead > 0

    def begin(self, requests: int, defer: bool) -> Draft:
        """A fresh step among so many requests, running and waiting."""
        config = self._config
        threshold = prefill_threshold(config, requests)
        if threshold:
            threshold = max(threshold, config.chunk_align)
        if self._pacer is not None:
            self._pacer.begin(*self._roster.decodes())
        return Draft(config.token_budget, config.max_num_batched_tokens, threshold, defer)

    def running(self, request: Request, draft: Draft, waiting: Callable[[], Iterable[Request]]) -> int:
        """Rows of a running request, none to sit this step out. `waiting` tells who could still be admitted in it."""
        config = self._config
        if draft.defer and request.is_prefill_chunk:
            return 0
        if request.placeholders and request.max_tokens:
            end = request.num_prompt_tokens + request.max_tokens
            if request.computed + 2 - request.placeholders >= end:
                return 0  # what is in flight ends it
        to_go = request.tokens + request.placeholders - request.computed
        rows = to_go + request.spec
        most = config.max_model_len - request.computed - 1
        if rows == 1:
            return min(1, most)  # the caller has seen that the budgets have one left
        if 0 < draft.threshold < rows:
            rows = draft.threshold
        rows = min(rows, draft.tokens_left, draft.input_left - self._slots, most)
        if self._shaped and to_go > 1 and rows > 0:
            if self._capped and to_go > config.long_tokens:
                rows = min(rows, max(self._share(request, draft, waiting()), config.chunk_align))
            rows = self._shape(request.computed, rows, to_go)
        return rows

    def waiting(self, request: Request, hit: int, padding: int, draft: Draft) -> int | None:
        """Rows a waiting request would start with after `hit` cached tokens; 0: pass it over; None: end the scan."""
        config = self._config
        to_go = request.tokens - hit
        rows = to_go + padding
        budget = min(draft.tokens_left, draft.input_left - self._slots)
        if padding and rows > budget:
            return None
        if 0 < draft.threshold < rows:
            rows = draft.threshold
        if rows > budget:
            if not config.enable_chunked_prefill:
                return None
            rows = budget
        if self._shaped and to_go > 1:
            if self._pacer is not None and not self._pacer.limit(hit, rows):
                return None
            rows = self._shape(hit, rows, to_go)
            if self._capped and rows < to_go and self._cap_reached(to_go, self._half_done(draft)):
                return 0
        return rows

    def held_back(self, request: Request, draft: Draft) -> bool:
        """Whether a cap is known to hold a waiting request back, so that it need not be looked up in every step."""
        if not self._capped or request.last_hit < 0:
            return False
        to_go = request.tokens - request.last_hit
        ends_here = to_go <= draft.tokens_left and not 0 < draft.threshold < to_go
        return not ends_here and self._cap_reached(to_go, self._half_done(draft))

    def padding(self, request: Request, hit: int, draft: Draft) -> int:
        """Filler drafts for a request one token short of its end, so that its rows look like its neighbours'."""
        count = self._config.num_spec_tokens
        if (
            count
            and request.tokens - hit == 1
            and not draft.chunk_ran
            and (draft.someone_ran or hit > 0)
            and hit + 1 + count + 1 <= self._config.max_model_len
        ):
            return count
        return 0

    def _half_done(self, draft: Draft) -> list[int]:
        return list(self._roster.half_done(draft.rows))

    def _cap_reached(self, to_go: int, half_done: Sequence[int]) -> bool:
        """Whether one more half-done prompt with `to_go` tokens left would be one too many."""
        config = self._config
        if 0 < config.max_num_partial_prefills <= len(half_done):
            return True
        long = sum(left > config.long_tokens for left in half_done)
        return to_go > config.long_tokens and 0 < config.max_long_partial_prefills <= long

    def _share(self, request: Request, draft: Draft, waiting: Iterable[Request]) -> int:
        """What a long prefill may take of this step while others want a part of it."""
        config = self._config
        count, need = 1, 0
        for other in self._roster.loose:
            if other is not request and other not in draft.rows and not other.one_to_go:
                count += 1
                need += other.to_go
        half_done = self._half_done(draft)
        for other in waiting:
            if other.tokens <= config.long_tokens or not self._cap_reached(other.tokens, half_done):
                count += 1
                need += other.tokens
        return share(draft.tokens_left, min(count, max(2, config.max_num_partial_prefills)), need)

    def _shape(self, computed: int, rows: int, to_go: int) -> int:
        config = self._config
        if self._pacer is not None:
            rows = min(rows, self._pacer.limit(computed, rows))
        keep = config.num_prefill_lookahead
        if keep and 0 < to_go - rows < keep:
            rows = max(0, to_go - keep)
        return page_end(computed, rows, computed + to_go, config.chunk_align, config.chunk_align_strict)
