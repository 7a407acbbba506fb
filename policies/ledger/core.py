"""The token ledger: one rule for prompts, resumed requests and decodes.

    every step:   rows = num_tokens_with_spec - num_computed_tokens, cut to what the budgets leave
    running       in order of admission; no KV room: the last one (or the lowest priority) is preempted
    waiting       in order, from the end of the cached prefix; no KV room: the scan ends; skipped after a preemption
    afterwards    num_computed_tokens += rows; who has reached its end samples a token

There are no phases: a step may hold decodes, any number of half-done prompts and new ones. Source: vLLM 0.33's
`Scheduler`, as told in the project's prefill facts, section 1; decode_first, the caps on partial prefills, page ends
and the pacer are ours. Decodes to which nothing happens are kept by a clock (steady.py); the result is the plain loop's.

With a step in flight (`async_scheduling`): call `schedule()` for the next step before `update()` of the last one. Every
sampling row leaves placeholders (1 + its drafts) that count as tokens until its result comes, so a decode is scheduled
on the token it does not know yet. A request preempted or aborted meanwhile keeps its plan valid: its result is folded
into the tokens it will recompute (or, given a count of 0, dropped), or ignored if it ended. Plans are folded in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from policies.ledger.budgets import Cadence, page_end, prefill_threshold, share
from policies.ledger.config import LedgerConfig
from policies.ledger.kv import NO_ROOM, KVPort
from policies.ledger.plan import Draft, StepPlan
from policies.ledger.queues import FcfsQueue, PriorityQueue
from policies.ledger.request import Request, Status
from policies.ledger.steady import Steady

Pause = Literal["none", "new", "all"]
_LOOK_PAST = 64  # waiting requests that one scan may pass over


class Pacer(Protocol):
    """Bounds a step's prefill rows, one request after another (see step_time.py)."""

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

    def predicted_ms(self) -> float | None:
        """Forecast for what was taken since begin(); None before anything was learnt."""
        ...


class Ledger:
    """All requests of one engine and what they get each step.

    add -> schedule -> (run the plan) -> update -> schedule ...; abort and finish at any time between calls.
    `fast=False` visits every running request every step; the results are the same.
    """

    def __init__(self, config: LedgerConfig, kv: KVPort, pacer: Pacer | None = None, fast: bool = True) -> None:
        self.config = config
        self.kv = kv
        self.pacer = pacer
        self.paused: Pause = "none"
        self.requests: dict[str, Request] = {}
        self.running: dict[Request, int] = {}  # in order of admission; the value is always 1
        self.waiting: FcfsQueue | PriorityQueue = (
            PriorityQueue() if config.scheduling_policy == "priority" else FcfsQueue()
        )
        self.cadence = Cadence(config.prefill_schedule_interval)
        self.steady = Steady(config.async_scheduling)
        self._fast = fast and config.num_spec_tokens == 0
        self._seats: list[int] = []  # seat numbers of the running requests, ascending
        self._loose: dict[Request, None] = {}  # running, not steady
        self._in_flight: list[StepPlan] = []
        self._arrivals = 0
        self._admissions = 0
        self._no_room = False  # the last waiting scan ended for want of KV
        self._capped = config.max_num_partial_prefills > 0 or config.max_long_partial_prefills > 0
        self._shaped = self._capped or config.chunk_align > 1 or pacer is not None or config.num_prefill_lookahead > 0

    # The way of a request -------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A new request joins the waiting line. ValueError on an id that is in use."""
        if request.id in self.requests:
            raise ValueError(f"id {request.id!r} is in use by a request that has not ended")
        self._arrivals += 1
        request.order = self._arrivals
        self.requests[request.id] = request
        self.waiting.add(request)

    def unfit(self, request: Request) -> str | None:
        """Why this request can never be served, or None. For the caller to refuse it at admission."""
        if request.num_prompt_tokens >= self.config.max_model_len:
            return (
                f"prompt of {request.num_prompt_tokens} tokens leaves no room for an output token within "
                f"max_model_len ({self.config.max_model_len})"
            )
        if request.num_prompt_tokens > self.kv.capacity:
            return f"prompt of {request.num_prompt_tokens} tokens is above the KV pool's {self.kv.capacity}"
        if not self.config.enable_chunked_prefill:
            budget = min(self.config.token_budget, self.config.max_num_batched_tokens - self.config.draft_slots)
            if request.num_prompt_tokens > budget:
                return f"prompt of {request.num_prompt_tokens} tokens is above a step's {budget}, and chunks are off"
        return None

    def abort(self, id: str) -> Request | None:
        """End a request wherever it is; its KV is freed now. None where the id is unknown."""
        request = self.requests.get(id)
        if request is not None:
            self.finish(request)
        return request

    def finish(self, request: Request) -> None:
        """End a request: stop, length, abort. Results still in flight for it are ignored."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            self._leave_running(request)
            self.kv.free(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        del self.requests[request.id]

    def set_drafts(self, request: Request, count: int) -> None:
        """Speculative tokens to verify next; a request in mid prompt takes none."""
        if not 0 <= count <= self.config.num_spec_tokens:
            raise ValueError(f"{count} drafts for {request.id!r}, num_spec_tokens is {self.config.num_spec_tokens}")
        if request.status is not Status.FINISHED:
            request.spec = 0 if request.is_prefill_chunk else count

    # One step -------------------------------------------------------------------------------------------------------

    def schedule(self, throttle: bool = False) -> StepPlan:
        """Decide the next step. `throttle`: hold prefills back if nothing is left waiting for room."""
        if self.paused == "all":
            return StepPlan()
        defer = self.cadence.defers(throttle, self._decode_running())
        draft = self._visit_steady(defer)
        if draft is None:
            draft = self._visit_all(defer)
        if not draft.preempted and self.paused == "none":
            self._visit_waiting(draft)
        if not defer:
            self.cadence.capacity_bound = len(self.waiting) > 0
        return self._commit(draft)

    def _decode_running(self) -> bool:
        return self.steady.count > 0 or any(not request.is_prefill_chunk for request in self._loose)

    def _begin(self, defer: bool) -> Draft:
        config = self.config
        threshold = prefill_threshold(config, len(self.running) + len(self.waiting))
        if threshold and config.chunk_align > threshold:
            threshold = config.chunk_align
        if self.pacer is not None:
            self.pacer.begin(*self._decodes())
        return Draft(config.token_budget, config.max_num_batched_tokens, threshold, defer)

    def _decodes(self) -> tuple[int, int]:
        """Decode rows that stand at the start of the step, and the sum of their contexts."""
        rows = self.steady.count
        context = self.steady.context + rows * self.steady.scheduled
        for request in self._loose:
            if _decodes(request):
                rows += 1
                context += request.computed
        return rows, context

    def _visit_all(self, defer: bool) -> Draft:
        """The running loop, one request after another."""
        self._release_steady()
        draft = self._begin(defer)
        for turn in self._turns(self.running):
            for request in turn:
                if draft.tokens_left <= 0 or draft.input_left <= self.config.draft_slots:
                    return draft
                if request.status is not Status.RUNNING:
                    continue  # preempted or failed in this very step
                rows = self._rows(request, draft)
                while rows > 0:
                    if self._give(request, rows, draft):
                        break
                    if self.config.fail_unfit and self._outgrows(request.computed + rows):
                        self._fail(request, draft)
                        break
                    victim = self._victim()
                    self._preempt(victim, draft)
                    if victim is request:
                        break
        return draft

    def _visit_steady(self, defer: bool) -> Draft | None:
        """The running loop, looking only at requests to which something happens; None where that cannot be exact."""
        if not self.steady.count:
            return None
        for request in self.steady.due():
            self._loosen(request)
        draft = self._begin(defer)
        cost = 1 + self.config.draft_slots
        passed = met = 0
        if self.config.decode_first:
            passed = self.steady.count
            decodes = passed + sum(_decodes(request) for request in self._loose)
            if decodes > draft.tokens_left or decodes * cost > draft.input_left:
                return None
            draft.tokens_left -= passed
            draft.input_left -= passed * cost
        for turn in self._turns(sorted(self._loose, key=_seat)):
            for request in turn:
                if not self.config.decode_first:
                    ahead = bisect_left(self._seats, request.seat) - met - passed
                    passed += ahead
                    draft.tokens_left -= ahead
                    draft.input_left -= ahead * cost
                    met += 1
                if draft.tokens_left < 0 or draft.input_left < 0:
                    return None
                if draft.tokens_left == 0 or draft.input_left <= self.config.draft_slots:
                    continue
                rows = self._rows(request, draft)
                if rows > 0 and not self._give(request, rows, draft):
                    return None
        rest = self.steady.count - passed
        draft.tokens_left -= rest
        draft.input_left -= rest * cost
        if draft.tokens_left < 0 or draft.input_left < 0:
            return None
        draft.someone_ran = True
        return draft

    def _turns(self, requests: Iterable[Request]) -> Iterable[list[Request]]:
        """Who is visited when: in order, or decodes first and then the rest in order."""
        line = list(requests)
        if not self.config.decode_first:
            return (line,)
        return ([r for r in line if _decodes(r)], [r for r in line if not _decodes(r)])

    def _visit_waiting(self, draft: Draft) -> None:
        """Admit waiting requests while budgets, seats and KV last."""
        config, slots = self.config, self.config.draft_slots
        self._no_room = False
        skipped: list[Request] = []
        while (
            self.waiting
            and draft.tokens_left > 0
            and draft.input_left > slots
            and len(self.running) < config.active_seqs
            and len(skipped) < _LOOK_PAST
        ):
            request = self.waiting.peek()
            hit = self.kv.lookup(request)
            left = request.tokens - hit
            if draft.defer and left > 1:
                self.kv.abandon(request)
                break
            drafts = self._padding(request, hit, draft)
            rows = self._first_rows(left, hit, drafts, draft)
            if rows is None:
                self.kv.abandon(request)
                break
            if rows and self._capped and rows < left and self._cap_reached(left, draft):
                rows = 0
            if rows == 0:
                self.kv.abandon(request)
                skipped.append(self.waiting.pop())
                continue
            whole = request.tokens if config.scheduler_reserve_full_isl else 0
            quiet = self.kv.admit(request, hit, hit + rows, config.num_spec_tokens, whole, bool(self.running))
            if quiet == NO_ROOM:
                self.kv.abandon(request)
                self._no_room = True
                break
            self.waiting.pop()
            self._enter_running(request, quiet)
            request.computed = request.num_cached_tokens = hit
            draft.admitted[request] = hit
            self._book(request, rows, drafts, draft)
            draft.prefill_ran = draft.prefill_ran or left > 1
        self.waiting.restore(skipped)

    # How many rows --------------------------------------------------------------------------------------------------

    def _rows(self, request: Request, draft: Draft) -> int:
        """Rows a running request gets, 0 to sit this step out."""
        config = self.config
        ahead = request.tokens + request.placeholders - request.computed
        if draft.defer and request.is_prefill_chunk:
            return 0
        if request.placeholders and request.max_tokens:
            end = request.num_prompt_tokens + request.max_tokens
            if request.computed + 2 - request.placeholders >= end:
                return 0  # what is in flight ends it
        rows = ahead + request.spec
        if 0 < draft.threshold < rows:
            rows = draft.threshold
        rows = min(
            rows,
            draft.tokens_left,
            draft.input_left - config.draft_slots,
            config.max_model_len - request.computed - 1,
        )
        if self._shaped and ahead > 1 and rows > 0:
            others = self._others(request, draft) if self._capped and ahead > config.long_tokens else None
            rows = self._shape(request.computed, rows, ahead, draft, others)
        return rows

    def _first_rows(self, left: int, hit: int, drafts: int, draft: Draft) -> int | None:
        """Rows a waiting request would start with; 0: pass it over; None: end the scan."""
        config = self.config
        budget = min(draft.tokens_left, draft.input_left - config.draft_slots)
        rows = left + drafts
        if drafts and rows > budget:
            return None
        if 0 < draft.threshold < rows:
            rows = draft.threshold
        if rows > budget:
            if not config.enable_chunked_prefill:
                return None
            rows = budget
        if self._shaped and left > 1:
            if self.pacer is not None and not self.pacer.limit(hit, rows):
                return None
            rows = self._shape(hit, rows, left, draft, None)
        return rows

    def _shape(self, computed: int, rows: int, left: int, draft: Draft, others: tuple[int, int] | None) -> int:
        """Cut prefill rows by share, pacer, MTP look-ahead and page end, in this order."""
        config = self.config
        if others is not None:
            rows = min(rows, max(share(draft.tokens_left, *others), config.chunk_align))
        if self.pacer is not None:
            rows = min(rows, self.pacer.limit(computed, rows))
        keep = config.num_prefill_lookahead
        if keep and 0 < left - rows < keep:
            rows = max(0, left - keep)
        return page_end(computed, rows, computed + left, config.chunk_align, config.chunk_align_strict)

    def _padding(self, request: Request, hit: int, draft: Draft) -> int:
        """Filler drafts for a request one token short of its end, so that its row block looks like its neighbours'."""
        count = self.config.num_spec_tokens
        if (
            count
            and request.tokens - hit == 1
            and not draft.chunk_ran
            and (draft.someone_ran or hit > 0)
            and hit + 1 + count + 1 <= self.config.max_model_len
        ):
            return count
        return 0

    def _others(self, request: Request, draft: Draft) -> tuple[int, int]:
        """Prefills that still want a part of this step, the long `request` included, and what the others need of it."""
        config = self.config
        count, need = 1, 0
        for other in self._loose:
            if other is not request and other not in draft.rows and not _decodes(other):
                count += 1
                need += other.tokens - other.computed
        if not self._no_room and self.paused == "none" and len(self.running) < config.active_seqs:
            for other in self.waiting.first(_LOOK_PAST // 4):
                if other.tokens <= config.long_tokens or not self._cap_reached(other.tokens, draft):
                    count += 1
                    need += other.tokens
        return min(count, max(2, config.max_num_partial_prefills)), need

    def _cap_reached(self, left: int, draft: Draft) -> bool:
        """Whether one more half-done prompt with `left` tokens to go would be one too many."""
        config = self.config
        partial = long = 0
        for request in self._loose:
            todo = request.tokens + request.placeholders - request.computed
            if todo > 1 and todo > draft.rows.get(request, 0):
                partial += 1
                long += todo > config.long_tokens
        if 0 < config.max_num_partial_prefills <= partial:
            return True
        return left > config.long_tokens and 0 < config.max_long_partial_prefills <= long

    # Books ----------------------------------------------------------------------------------------------------------

    def _give(self, request: Request, rows: int, draft: Draft) -> bool:
        """KV and budget for a running request's rows; False where KV has no room."""
        quiet = self.kv.grow(request, request.computed + rows, self.config.num_spec_tokens)
        if quiet == NO_ROOM:
            return False
        request.quiet = quiet
        drafts = max(0, rows + request.computed - request.tokens - request.placeholders) if request.spec else 0
        self._book(request, rows, drafts, draft)
        draft.someone_ran = True
        if request.is_prefill_chunk:
            draft.chunk_ran = draft.prefill_ran = True
        return True

    def _book(self, request: Request, rows: int, drafts: int, draft: Draft) -> None:
        draft.rows[request] = rows
        draft.tokens_left -= rows
        draft.input_left -= rows + self.config.draft_slots
        if drafts:
            draft.drafts[request] = drafts
            if request in draft.admitted:
                draft.padded.append(request)
        if self.pacer is not None and request.tokens + request.placeholders - request.computed > 1:
            self.pacer.take(request.computed, rows)

    def _victim(self) -> Request:
        if self.config.scheduling_policy == "priority":
            return max(self.running, key=_rank)
        return next(reversed(self.running))

    def _preempt(self, request: Request, draft: Draft) -> None:
        """Back to the waiting line with nothing computed; tokens known so far are kept and recomputed."""
        self._take_back(request, draft)
        self._leave_running(request)
        self.kv.free(request)
        request.status = Status.PREEMPTED
        request.computed = request.spec = 0
        request.num_preemptions += 1
        self.waiting.put_back(request)
        draft.preempted.append(request)

    def _fail(self, request: Request, draft: Draft) -> None:
        """End a request that the whole pool cannot hold."""
        reason = f"request needs KV for more than {request.computed} tokens, the pool holds {self.kv.capacity} in all"
        self._take_back(request, draft)
        self.finish(request)
        draft.failed.append((request, reason))

    def _outgrows(self, end: int) -> bool:
        return min(end + self.config.num_spec_tokens, self.config.max_model_len) > self.kv.capacity

    def _take_back(self, request: Request, draft: Draft) -> None:
        rows = draft.rows.pop(request, 0)
        if rows:
            draft.tokens_left += rows
            draft.input_left += rows + self.config.draft_slots
            draft.drafts.pop(request, None)
            if self.pacer is not None and request.tokens + request.placeholders - request.computed > 1:
                self.pacer.give_back(request.computed, rows)

    def _enter_running(self, request: Request, quiet: int) -> None:
        self._admissions += 1
        request.seat = self._admissions
        request.status = Status.RUNNING
        request.quiet = quiet
        self.running[request] = 1
        self._seats.append(request.seat)
        self._loose[request] = None

    def _leave_running(self, request: Request) -> None:
        if request.steady is not None:
            self._loosen(request)
        del self._loose[request]
        del self.running[request]
        del self._seats[bisect_left(self._seats, request.seat)]

    def _loosen(self, request: Request) -> None:
        """A steady request is looked at again; its results in flight are folded one by one."""
        self.steady.leave(request)
        self._loose[request] = None
        for plan in self._in_flight:
            plan.singles.setdefault(request, 0)

    def _release_steady(self) -> None:
        if self.steady.count:
            for request in self.running:
                if request.steady is not None:
                    self._loosen(request)

    # The end of a step ----------------------------------------------------------------------------------------------

    def _commit(self, draft: Draft) -> StepPlan:
        """Make the step real: counters move, quiet decodes become steady."""
        rows, steady, pacer = draft.rows, self.steady, self.pacer
        plan = StepPlan(drafts=draft.drafts, padded=draft.padded, preempted=draft.preempted, failed=draft.failed)
        plan.admitted = list(draft.admitted)
        kept = steady.count
        if rows or kept:
            steady.scheduled += 1
            plan.number = steady.scheduled
            self._in_flight.append(plan)
            plan.tokens = self._in_order(rows) if kept or self.config.decode_first else rows
        if pacer is not None and plan.number:
            plan.predicted_ms = pacer.predicted_ms()
        total = kept
        for request, count in rows.items():
            total += count
            self._settle(request, count, draft.drafts.get(request, 0) if draft.drafts else 0, plan)
        plan.total_tokens = total
        plan.decode_rows = total - plan.prefill_tokens
        self.cadence.stamp(plan.number > 0, draft.prefill_ran)
        return plan

    def _in_order(self, rows: Mapping[Request, int]) -> dict[Request, int]:
        """All rows in running order: one for each steady request, `rows` for the others."""
        tokens = self.running.copy()
        for request in self._loose:
            if request in rows:
                tokens[request] = rows[request]
            else:
                del tokens[request]
        return tokens

    def _settle(self, request: Request, rows: int, drafts: int, plan: StepPlan) -> None:
        """One request's counters after its rows were given."""
        target = request.tokens + request.placeholders
        if target - request.computed > 1 or not request.computed:
            plan.extends[request] = rows
            plan.prefill_tokens += rows
        request.computed += rows
        request.spec = 0
        chunk = request.is_prefill_chunk = request.computed < target
        if chunk:
            plan.chunks.append(request)
            return
        plan.singles[request] = drafts
        if self.config.async_scheduling:
            request.placeholders += 1 + drafts
        if self._fast and request.placeholders == self.steady.placeholders and self._one_step_open():
            self._keep(request)

    def _one_step_open(self) -> bool:
        """Without async scheduling exactly this step may be in flight, else a result would be counted twice."""
        return self.config.async_scheduling or self.steady.scheduled == self.steady.folded + 1

    def _keep(self, request: Request) -> None:
        """Leave a decode to the clock, up to its KV's, the model's or its own last token."""
        limit = min(request.quiet, self.config.max_model_len - 1)
        if self.config.async_scheduling and request.max_tokens:
            limit = min(limit, request.num_prompt_tokens + request.max_tokens - 1)
        if limit > request.computed:
            del self._loose[request]
            self.steady.join(request, limit)

    def update(
        self,
        plan: StepPlan,
        counts: Mapping[Request, int] | None = None,
        finished: Iterable[Request] = (),
    ) -> None:
        """Fold a step's results back, in the order of the plans.

        Every sampling row brought one token, but for the exceptions in `counts` (accepted drafts + 1; 0 if dropped).
        `finished` end here and free their KV. An empty plan needs no update. ValueError on a plan out of order.
        """
        if plan.number:
            if not self._in_flight or self._in_flight[0] is not plan:
                raise ValueError(f"plan {plan.number} is not the oldest step in flight")
            for request in counts or ():
                if request.steady is not None and plan.tokens.get(request):
                    self._loosen(request)
            del self._in_flight[0]
            for request, drafts in plan.singles.items():
                if request.steady is None and request.status is not Status.FINISHED:
                    brought = 1 if counts is None else counts.get(request, 1)
                    self._fold(request, brought, 1 + drafts)
            self.steady.folded += 1
        for request in finished:
            self.finish(request)

    def _fold(self, request: Request, brought: int, expected: int) -> None:
        request.tokens += brought
        if self.config.async_scheduling:
            request.placeholders -= expected
        if brought < expected and request.computed:  # 0: preempted since, nothing left to take back
            request.computed -= expected - brought


def _decodes(request: Request) -> bool:
    """One token to go: a decode, or the last token of a prompt."""
    return request.tokens + request.placeholders - request.computed <= 1


def _seat(request: Request) -> int:
    return request.seat


def _rank(request: Request) -> tuple[int, float, int]:
    return request.rank
