"""The token ledger: one rule for prompts, resumed requests and decodes.

    every step:   rows = num_tokens_with_spec - num_computed_tokens, cut to what the budgets leave
    running       in order of admission; no KV room: the last one (or the lowest priority) is preempted
    waiting       in order, from the end of the cached prefix; no KV room: the scan ends; skipped after a preemption
    afterwards    num_computed_tokens += rows; who has reached its end samples a token

There are no phases: a step may hold decodes, any number of half-done prompts and new ones. Source: vLLM 0.33's
`Scheduler`, as told in the project's prefill facts, section 1. Ours: decode_first, the caps on partial prefills, page
ends and the pacer. Decodes to which nothing happens are kept by a clock (steady.py); the result is the plain loop's.

With a step in flight (`async_scheduling`): call `schedule()` for the next step before `update()` of the last one. Every
sampling row leaves placeholders (1 + its drafts) that count as tokens until its result comes, so a decode is scheduled
on the token it does not know yet. A request preempted or aborted meanwhile keeps its plan valid: its result is folded
into the tokens it will recompute (or, given a count of 0, dropped), or ignored if it ended. Plans fold in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Literal

from policies.ledger.budgets import Cadence
from policies.ledger.config import LedgerConfig
from policies.ledger.kv import NO_ROOM, KVPort
from policies.ledger.plan import Draft, StepPlan
from policies.ledger.queues import FcfsQueue, PriorityQueue
from policies.ledger.request import Request, Status
from policies.ledger.roster import Roster
from policies.ledger.sizes import Pacer, Sizer

Pause = Literal["none", "new", "all"]
LOOK_PAST = 64  # waiting requests that one scan may pass over
_by_rank = attrgetter("rank")


class Ledger:
    """All requests of one engine and what they get each step.

    add -> schedule -> (run the plan) -> update -> schedule ...; finish and abort at any time between calls.
    `fast=False` visits every running request every step; the results are the same.
    """

    def __init__(self, config: LedgerConfig, kv: KVPort, pacer: Pacer | None = None, fast: bool = True) -> None:
        if pacer is not None and config.chunk_align_strict and pacer.floor < config.chunk_align:
            raise ValueError(f"floor ({pacer.floor}) is below chunk_align ({config.chunk_align}): no chunk would go")
        self.config = config
        self.kv = kv
        self.paused: Pause = "none"  # "new": nobody is admitted; "all": nothing runs
        self.requests: dict[str, Request] = {}
        self.roster = Roster(config.async_scheduling)
        self.waiting: FcfsQueue | PriorityQueue
        self.waiting = PriorityQueue() if config.scheduling_policy == "priority" else FcfsQueue()
        self.cadence = Cadence(config.prefill_schedule_interval)
        self._sizer = Sizer(config, self.roster, pacer)
        self._pacer = pacer
        self._fast = fast and config.num_spec_tokens == 0
        self._arrivals = 0
        self._no_room = False  # the last waiting scan ended for want of KV

    # The way of a request -------------------------------------------------------------------------------------------

    @property
    def running(self) -> Mapping[Request, int]:
        """Running requests in order of admission (the values mean nothing)."""
        return self.roster.running

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
        config, prompt = self.config, request.num_prompt_tokens
        if prompt >= config.max_model_len:
            return (
                f"a prompt of {prompt} tokens leaves no room for output within max_model_len ({config.max_model_len})"
            )
        if prompt > self.kv.capacity:
            return f"a prompt of {prompt} tokens is above the {self.kv.capacity} that the KV pool holds"
        budget = min(config.token_budget, config.max_num_batched_tokens - config.draft_slots)
        if prompt > budget and not config.enable_chunked_prefill:
            return f"a prompt of {prompt} tokens is above a step's {budget}, and chunked prefill is off"
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
            self.roster.leave(request)
            self.kv.free(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        del self.requests[request.id]

    def adopt(self, requests: Iterable[Request], in_flight: Collection[Request] = ()) -> StepPlan | None:
        """Requests that somebody else has run so far join the running list, in their order.

        Their `tokens`, `computed`, `quiet` and `is_prefill_chunk` say where they stand, and the KV port knows what they
        hold. Those `in_flight` have a step under way that will bring one token each (async scheduling only): fold it
        with the plan returned, as the oldest one. None where nothing is under way. ValueError on an id that is in use.
        """
        flying = list(in_flight)
        if flying and not self.config.async_scheduling:
            raise ValueError("without async scheduling nothing is in flight between two steps")
        for request in requests:
            if request.id in self.requests:
                raise ValueError(f"id {request.id!r} is in use by a request that has not ended")
            self._arrivals += 1
            request.order = self._arrivals
            request.status = Status.RUNNING
            self.requests[request.id] = request
            self.roster.enter(request)
        if not flying:
            return None
        self.roster.steady.scheduled += 1
        plan = StepPlan(
            number=self.roster.steady.scheduled,
            tokens=dict.fromkeys(flying, 1),
            singles=dict.fromkeys(flying, 0),
            total_tokens=len(flying),
            decode_rows=len(flying),
        )
        for request in flying:
            request.placeholders = 1
        self.roster.in_flight.append(plan)
        return plan

    def send_back(self, request: Request) -> None:
        """A running request gives its KV back and stands first in line; what it has generated stays known."""
        self.roster.leave(request)
        self.kv.free(request)
        request.status = Status.PREEMPTED
        request.computed = request.spec = 0
        request.num_preemptions += 1
        self.waiting.put_back(request)

    def set_drafts(self, request: Request, count: int) -> None:
        """Speculative tokens to verify next; a request in mid prompt takes none."""
        if not 0 <= count <= self.config.num_spec_tokens:
            raise ValueError(f"{count} drafts for {request.id!r}, num_spec_tokens is {self.config.num_spec_tokens}")
        if request.status is not Status.FINISHED:
            request.spec = 0 if request.is_prefill_chunk else count

    # One step -------------------------------------------------------------------------------------------------------

    def schedule(self, throttle: bool = False) -> StepPlan:
        """Decide the next step. `throttle`: hold prefills back, unless work is left waiting for room."""
        if self.paused == "all":
            return StepPlan()
        defer = self.cadence.defers(throttle, self.roster.decode_running())
        draft = self._visit_loose(defer) if self.roster.steady.count else None
        if draft is None:
            draft = self._visit_all(defer)
        draft.someone_ran = len(draft.rows) > 0
        if not draft.preempted and self.paused == "none":
            self._visit_waiting(draft)
        if not defer:
            self.cadence.capacity_bound = len(self.waiting) > 0
        return self._commit(draft)

    def _begin(self, defer: bool) -> Draft:
        return self._sizer.begin(len(self.roster) + len(self.waiting), defer)

    def _visit_all(self, defer: bool) -> Draft:
        """The running loop, one request after another, each once."""
        self.roster.loosen_all()
        draft = self._begin(defer)
        for request in self._line(self.roster.running):
            if draft.tokens_left <= 0 or draft.input_left <= self.config.draft_slots:
                break
            if request.status is not Status.RUNNING:
                continue  # preempted in this very step
            rows = self._sizer.running(request, draft, self._admissible)
            while rows > 0 and not self._give(request, rows, draft):
                if self.config.fail_unfit and self._outgrows(request.computed + rows):
                    self._fail(request, draft)
                    break
                victim = self._victim()
                self._preempt(victim, draft)
                if victim is request:
                    break
        return draft

    def _visit_loose(self, defer: bool) -> Draft | None:
        """The running loop without its steady requests, whose single rows are only counted.

        None where that cannot be exact: budgets that do not reach everyone, or a preemption. Nothing but KV room that
        the plain loop would take as well has changed by then.
        """
        roster, slots = self.roster, self.config.draft_slots
        roster.loosen_due()
        draft = self._begin(defer)
        counted = met = 0
        if self.config.decode_first:
            counted = roster.steady.count
            decodes = counted + sum(request.one_to_go for request in roster.loose)
            if decodes > draft.tokens_left or decodes * (1 + slots) > draft.input_left:
                return None
            draft.charge(counted, slots)
        for request in self._line(roster.loose_in_order()):
            if not self.config.decode_first:
                before = roster.ahead(request) - met
                draft.charge(before - counted, slots)
                counted, met = before, met + 1
            if draft.tokens_left < 0 or draft.input_left < 0:
                return None
            if draft.tokens_left == 0 or draft.input_left <= slots:
                continue
            rows = self._sizer.running(request, draft, self._admissible)
            if rows > 0 and not self._give(request, rows, draft):
                return None
        draft.charge(roster.steady.count - counted, slots)
        return None if draft.tokens_left < 0 or draft.input_left < 0 else draft

    def _line(self, requests: Iterable[Request]) -> list[Request]:
        """In order, or decodes first and then the rest in order."""
        line = list(requests)
        if self.config.decode_first:
            line.sort(key=_to_go_many)
        return line

    def _visit_waiting(self, draft: Draft) -> None:
        """Admit waiting requests while budgets, seats and KV last."""
        config, sizer = self.config, self._sizer
        self._no_room = False
        skipped: list[Request] = []
        while self.waiting and draft.tokens_left > 0 and draft.input_left > config.draft_slots:
            if len(self.roster) >= config.active_seqs or len(skipped) >= LOOK_PAST:
                break
            request = self.waiting.peek()
            if sizer.held_back(request, draft):
                skipped.append(self.waiting.pop())
                continue
            hit = request.last_hit = self.kv.lookup(request)
            prefill = request.tokens - hit > 1
            padding = sizer.padding(request, hit, draft)
            rows = None if draft.defer and prefill else sizer.waiting(request, hit, padding, draft)
            if not rows:
                self.kv.abandon(request)
                if rows is None:
                    break
                skipped.append(self.waiting.pop())
                continue
            whole = request.tokens if config.scheduler_reserve_full_isl else 0
            quiet = self.kv.admit(request, hit, hit + rows, config.num_spec_tokens, whole, len(self.roster) > 0)
            if quiet == NO_ROOM:
                self.kv.abandon(request)
                if config.fail_unfit and self._outgrows(request.tokens):
                    self._fail(request, draft)
                    continue
                self._no_room = True
                break
            self._admit(self.waiting.pop(), hit, quiet, draft)
            self._book(request, rows, max(0, rows - request.to_go), draft)
            draft.prefill_ran = draft.prefill_ran or prefill
        self.waiting.restore(skipped)

    def _admissible(self) -> Iterable[Request]:
        """Waiting requests that could have a part of this step, as far as one can tell beforehand."""
        if self._no_room or self.paused != "none" or len(self.roster) >= self.config.active_seqs:
            return ()
        return self.waiting.first(LOOK_PAST // 4)

    # Books ----------------------------------------------------------------------------------------------------------

    def _give(self, request: Request, rows: int, draft: Draft) -> bool:
        """KV and budget for a running request's rows; False where KV has no room."""
        end = request.computed + rows
        if end > request.quiet:
            quiet = self.kv.grow(request, end, self.config.num_spec_tokens)
            if quiet == NO_ROOM:
                return False
            request.quiet = quiet
        self._book(request, rows, max(0, rows - request.to_go) if request.spec else 0, draft)
        if request.is_prefill_chunk:
            draft.chunk_ran = draft.prefill_ran = True
        return True

    def _admit(self, request: Request, hit: int, quiet: int, draft: Draft) -> None:
        request.status = Status.RUNNING
        request.computed = request.num_cached_tokens = hit
        request.is_prefill_chunk = True  # until its rows of this step are settled
        request.quiet = quiet
        self.roster.enter(request)
        draft.admitted.append(request)

    def _book(self, request: Request, rows: int, drafts: int, draft: Draft) -> None:
        draft.rows[request] = rows
        draft.tokens_left -= rows
        draft.input_left -= rows + self.config.draft_slots
        if drafts:
            draft.drafts[request] = drafts
        if self._pacer is not None and not request.one_to_go:
            self._pacer.take(request.computed, rows)

    def _take_back(self, request: Request, draft: Draft) -> None:
        """What a request was given in this step returns to the budgets."""
        rows = draft.rows.pop(request, 0)
        if rows:
            draft.tokens_left += rows
            draft.input_left += rows + self.config.draft_slots
            draft.drafts.pop(request, None)
            if self._pacer is not None and not request.one_to_go:
                self._pacer.give_back(request.computed, rows)

    def _victim(self) -> Request:
        if self.config.scheduling_policy == "priority":
            return max(self.roster.running, key=_by_rank)
        return self.roster.last()

    def _preempt(self, request: Request, draft: Draft) -> None:
        """Back to the waiting line with nothing computed; the tokens known so far are kept, to be recomputed."""
        self._take_back(request, draft)
        self.send_back(request)
        draft.preempted.append(request)

    def _outgrows(self, end: int) -> bool:
        return min(end + self.config.num_spec_tokens, self.config.max_model_len) > self.kv.capacity

    def _fail(self, request: Request, draft: Draft) -> None:
        """End a request that the whole pool cannot hold."""
        known = max(request.computed, request.tokens - 1)
        reason = f"needs KV for more than {known} tokens, the whole pool holds {self.kv.capacity}"
        self._take_back(request, draft)
        self.finish(request)
        draft.failed.append((request, reason))

    # The end of a step ----------------------------------------------------------------------------------------------

    def _commit(self, draft: Draft) -> StepPlan:
        """Make the step real: counters move, quiet decodes are left to the clock."""
        steady, rows = self.roster.steady, draft.rows
        plan = StepPlan(drafts=draft.drafts, admitted=draft.admitted, preempted=draft.preempted, failed=draft.failed)
        kept = steady.count
        if rows or kept:
            steady.scheduled += 1
            plan.number = steady.scheduled
            self.roster.in_flight.append(plan)
            plan.tokens = self.roster.in_order(rows) if kept or self.config.decode_first else rows
            if self._pacer is not None:
                plan.load = self._pacer.load()
        for request, count in rows.items():
            self._settle(request, count, plan)
        plan.total_tokens = kept + sum(rows.values())
        plan.decode_rows = plan.total_tokens - plan.prefill_tokens
        self.cadence.stamp(plan.number > 0, draft.prefill_ran)
        return plan

    def _settle(self, request: Request, rows: int, plan: StepPlan) -> None:
        """One request's counters after its rows were given."""
        to_go = request.to_go
        if to_go > 1 or request.is_prefill_chunk:
            plan.extends[request] = rows
            plan.prefill_tokens += rows
        request.computed += rows
        request.spec = 0
        request.is_prefill_chunk = rows < to_go
        if request.is_prefill_chunk:
            plan.chunks.append(request)
            return
        drafts = plan.drafts.get(request, 0)
        plan.singles[request] = drafts
        if self.config.async_scheduling:
            request.placeholders += 1 + drafts
        if self._fast:
            self._leave_to_clock(request)

    def _leave_to_clock(self, request: Request) -> None:
        """A decode becomes steady, up to its KV's, the model's or its own last token."""
        config, steady = self.config, self.roster.steady
        in_flight = steady.scheduled - steady.folded
        if in_flight != (request.placeholders if config.async_scheduling else 1):
            return  # it has no share in one of the steps in flight, so the clock would miscount
        limit = min(request.quiet, config.max_model_len - 1)
        if config.async_scheduling and request.max_tokens:
            limit = min(limit, request.num_prompt_tokens + request.max_tokens - 1)
        if limit > request.computed:
            self.roster.keep(request, limit)

    def update(
        self, plan: StepPlan, counts: Mapping[Request, int] | None = None, finished: Iterable[Request] = ()
    ) -> None:
        """Fold a step's results back, in the order of the plans.

        Every sampling row brought one token, but for the exceptions in `counts` (accepted drafts + 1; 0 if dropped).
        `finished` end here and free their KV. An empty plan needs no update. ValueError on a plan out of order.
        """
        roster = self.roster
        if plan.number:
            if not roster.in_flight or roster.in_flight[0] is not plan:
                raise ValueError(f"step {plan.number} is not the oldest step in flight")
            for request, brought in (counts or {}).items():
                most = 1 + plan.drafts.get(request, 0)
                if request not in plan.tokens or not 0 <= brought <= most:
                    raise ValueError(
                        f"counts: {brought} tokens for {request.id!r}, step {plan.number} brings it 0 to {most} if any"
                    )
                if request.steady is not None:
                    roster.loosen(request)
            del roster.in_flight[0]
            for request, drafts in plan.singles.items():
                if request.steady is None and request.status is not Status.FINISHED:
                    self._fold(request, 1 if counts is None else counts.get(request, 1), 1 + drafts)
            roster.steady.folded += 1
        for request in finished:
            self.finish(request)

    def _fold(self, request: Request, brought: int, expected: int) -> None:
        request.tokens += brought
        if self.config.async_scheduling:
            request.placeholders -= expected
        if request.computed:  # 0: preempted since, nothing is left to take back
            request.computed -= expected - brought

    # Many steps at once, for the simulator --------------------------------------------------------------------------

    def quiet_steps(self) -> int:
        """How many coming steps would give each running request its one row and do nothing else; 0 where unknown."""
        roster = self.roster
        busy = len(roster.loose) > 0 or len(self.waiting) > 0 or self._pacer is not None or self.paused != "none"
        if busy or len(roster.in_flight) > 1 or not roster.steady.count:
            return 0
        most = min(self.config.token_budget, self.config.max_num_batched_tokens // (1 + self.config.draft_slots))
        return roster.steady.quiet() if roster.steady.count <= most else 0

    def skip(self, steps: int) -> None:
        """As so many rounds of `schedule` and `update` (at most `quiet_steps()`); a plan in flight becomes the last."""
        roster = self.roster
        roster.steady.skip(steps)
        self.cadence.executed += steps
        for plan in roster.in_flight:
            plan.number += steps


def _to_go_many(request: Request) -> bool:
    return not request.one_to_go
