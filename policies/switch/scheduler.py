"""SGLang's Scheduler that plans by the ledger or by SGLang's own rules, and changes between two steps.

    to sglang   ledger, nobody admitted ... until at most one prompt is half done:  it becomes `chunked_req`,
                                            the decodes `running_batch`, the ledger forgets everybody
    to ledger   at once:  `running_batch` and `chunked_req` become running entries with num_computed = kv_committed_len,
                          the waiting queue becomes the ledger's line

    step        t-1 sglang   t ledger        a result is processed by the side that launched its step; under the overlap
    result                   t-1 sglang      schedule the ledger takes over t-1 as a plan that it has yet to fold, and
                                             SGLang's side needs nothing but the requests themselves

KV, sampling state, penalties, grammars and logprobs stay with SGLang's Req and ScheduleBatch, which both sides use:
nothing is copied or computed again. What a switch depends on (queues, rooms, the order of messages) is the same on
every rank; clocks are read on rank 0 only (wire.py).
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from sglang.srt.managers.io_struct import SetInternalStateReq, SetInternalStateReqOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import NextBatchPlan

from policies.ledger import dropped, lowering
from policies.ledger.core import Ledger
from policies.ledger.flags import LedgerFlags
from policies.ledger.plan import StepPlan
from policies.ledger.request import Request
from policies.ledger.scheduler import LedgerScheduler, NoBeams
from policies.step_metrics import PREFIX, StepMetrics
from policies.steps import Sharing, Step
from policies.stock_step import StockSteps
from policies.switch import wire
from policies.switch.arms import Arms
from policies.switch.flags import KNOWN
from policies.switch.state import Switch
from policies.switch.wire import Message


class NoBeamsHere(NoBeams):
    """Beam search cannot change hands."""

    def validate_and_init(self, req: Any, recv_req: Any) -> str:
        width = req.sampling_params.beam_width
        return f"beam_width {width}: beam search is not supported with --allow-policy-switch; start without it"


class SwitchScheduler(LedgerScheduler):
    """Scheduler of a server started with --allow-policy-switch."""

    glm_first: str  # who plans from the start; set by install()
    glm_alternate_s: float | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kind = type(self)
        self.switch = Switch(kind.glm_first, kind.glm_alternate_s)
        self.arms = Arms(KNOWN, kind.glm_first)
        self._launched: deque[Step | None] = deque()  # steps in flight: SGLang's own, or None for the ledger's
        self._carried: StepPlan | None = None  # SGLang's step in flight whose tokens the ledger counts on
        self._orphans = 0  # plans in flight of a ledger that is no more
        self._reader = StockSteps(kind.glm_sharing)
        self._numbers = 0
        self._retracted = 0  # by SGLang's rules, since its last step
        self._stock_metrics: StepMetrics | None = None
        self._switched: Any = None
        super().__init__(*args, **kwargs)

    @property
    def glm_scheduler(self) -> str:  # type: ignore[override]
        """Who plans now."""
        return self.switch.active

    @property
    def _stock(self) -> bool:
        return self.switch.active == "sglang"

    # Seams of SGLang ------------------------------------------------------------------------------------------------

    def _step_metrics(self, labels: dict[str, str]) -> StepMetrics:
        from prometheus_client import Counter

        def of(name: str, families: Any = None) -> StepMetrics:
            mine = dict(labels) | {"scheduler": name}
            budget, ranks = self.ledger.config.token_budget, self.glm_sharing.ranks
            return StepMetrics(mine, budget, self.pacer is not None, ranks=ranks, families=families)

        ledger = of("ledger")
        self._stock_metrics = of("sglang", ledger.families)
        counter = Counter(
            PREFIX + "policy_switches_total", "Changes of the scheduler, to each.", [*labels, "scheduler"]
        )
        self._switched = {name: counter.labels(**labels, scheduler=name) for name in KNOWN}
        return ledger

    def init_beam_coordinator(self) -> None:
        super().init_beam_coordinator()
        self.beam_coordinator.__class__ = NoBeamsHere

    def _running_rows(self) -> Any:
        return self.running_batch if self._stock else super()._running_rows()

    def _pending_prefill(self) -> Any:
        return self.chunked_req if self._stock else super()._pending_prefill()

    def _state(self) -> dict[str, Any]:
        """As the ledger's; under SGLang's rules its entries are SGLang's queues."""
        facts = super()._state()
        if self._stock:
            running = self._stock_running()
            facts["running"] = len(running)
            facts["waiting"] = len(self.waiting_queue)
            facts["requests_holding_kv"] = sum(req.kv.holds_kv for req in running)
        return facts

    def _stock_running(self) -> list[Any]:
        """Unfinished requests that SGLang's side has begun."""
        found = {id(req): req for batch in self._collect_inflight_batches() if batch is not None for req in batch.reqs}
        if self.chunked_req is not None:
            found[id(self.chunked_req)] = self.chunked_req
        return [req for req in found.values() if not req.finished()]

    def switch_facts(self) -> dict[str, Any]:
        """For GET /policy."""
        return self.switch.facts(self.arms.facts())

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        if not self._stock:
            super()._add_request_to_queue(req, is_retracted)
            return
        self._retracted += is_retracted
        super(LedgerScheduler, self)._add_request_to_queue(req, is_retracted)

    # Messages -------------------------------------------------------------------------------------------------------

    def set_internal_state(self, recv_req: SetInternalStateReq) -> Any:
        """SGLang's, and the switch's own messages among them."""
        try:
            message = wire.read(recv_req.server_args)
        except ValueError:
            return SetInternalStateReqOutput(updated=False)
        if message is None:
            return super().set_internal_state(recv_req)
        answer = self._hear(message)
        return None if recv_req.rid == wire.OWN else SetInternalStateReqOutput(updated=answer)

    def _hear(self, message: Message) -> bool:
        if message.verb == "to":
            return self.switch.ask(message.scheduler, message.deadline_s)
        if message.verb == "done":
            return not self.switch.draining
        if message.verb == "turn":
            self.switch.turn()
        else:
            self.switch.force()
        return True

    def _poll_timeout_aborts(self) -> list[Any]:
        """SGLang asks rank 0 here for what its clock decides, and broadcasts it in order with the requests."""
        said = list(super()._poll_timeout_aborts())
        if self.switch.overdue():
            said.append(SetInternalStateReq(rid=wire.OWN, server_args=Message("send_back").values()))
        if self.switch.due():
            said.append(SetInternalStateReq(rid=wire.OWN, server_args=Message("turn").values()))
        return said

    # One step -------------------------------------------------------------------------------------------------------

    def get_next_batch_to_run(self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None) -> NextBatchPlan:
        target = self.switch.target
        if target == "ledger":
            running_batch, last_batch = self._to_ledger(running_batch, last_batch), None
        elif target == "sglang":
            self.process_pending_chunked_abort()
            running_batch, last_batch = self._absorb(running_batch, last_batch), None
            if not self._to_stock(running_batch):
                self.switch.waited()
        if self._stock:
            # NOTE: not the ledger's, whose base this is.
            return super(LedgerScheduler, self).get_next_batch_to_run(running_batch, last_batch)
        return super().get_next_batch_to_run(running_batch, last_batch)

    def _done(self) -> None:
        old = self.switch.active
        self.switch.done()
        self.arms.change(old, self.switch.active)
        if self._switched is not None:
            self._switched[self.switch.active].inc()

    def _to_stock(self, running: ScheduleBatch) -> bool:
        """Hand over to SGLang's rules; False where half-done prompts stand in the way, and then nobody is admitted."""
        half = [entry for entry in self.ledger.roster.loose_in_order() if entry.is_prefill_chunk]
        last = half[-1] if half and self._stock_can_finish(half[-1], len(running.reqs)) else None
        if len(half) > (last is not None):
            self.ledger.paused = "new"
            if self.switch.forced:
                # NOTE: SGLang may admit them in a later step only, when the result in flight of their last chunk has
                # been dropped: so they go back now and the switch follows.
                self._send_back([entry for entry in half if entry is not last])
            return False
        self._orphans = len(self._plans)
        self._entries.clear()
        self._lost.clear()
        self.kv_port.held.clear()
        self.ledger = Ledger(self.ledger.config, self.kv_port, self.pacer)
        self.chunked_req = None if last is None else last.handle
        running.batch_is_full = False
        self._done()
        return True

    def _stock_can_finish(self, entry: Request, decodes: int) -> bool:
        """Whether SGLang's rules can run this half-done prompt to its end, come what may.

        They take room for each next chunk without asking whether there is any, and start penalties of a resumed request
        at zero.
        """
        req = entry.handle
        if len(req.output_ids):
            return False
        page, rows = self.page_size, entry.to_go
        self.kv_port.begin_step()
        steps = -(-rows // (self.chunked_prefill_size or rows))
        decoding = decodes * (1 + steps // page) if self.is_mixed_chunk or self.prefill_decode_interval else 0
        return bool((-(-rows // page) + 1 + decoding) * page <= self.kv_port.room())

    def _send_back(self, entries: list[Request]) -> None:
        """Half-done prompts return to the front of the line; what they have computed stays in the prefix tree."""
        for entry in reversed(entries):
            self.ledger.send_back(entry)
            self.waiting_queue.insert(0, entry.handle)
            entry.handle.time_stats.set_retract_time()
        self.switch.sent_back += len(entries)

    def _to_ledger(self, running: ScheduleBatch, last: ScheduleBatch | None) -> ScheduleBatch:
        """Take over from SGLang's rules; returns the running batch, into which the last one has been merged."""
        self.process_pending_chunked_abort()
        chunked, self.chunked_req = self.chunked_req, None
        # NOTE: a chunk that ran has not been checkpointed yet; _absorb does it and keeps it out of the running batch.
        ran = chunked is not None and chunked.extend_end > chunked.prefix_len
        self._chunked = [chunked] if ran else []
        running = self._absorb(running, last)
        running.filter_batch()
        if running.is_empty():
            running = lowering.empty_batch()
        flying = {id(req) for batch, _ in self.result_queue for req in batch.reqs}
        entries = [self._adopt(req) for req in running.reqs]
        in_flight = [entry for entry in entries if id(entry.handle) in flying]
        if chunked is not None:
            entries.append(self._adopt(chunked, half=True))
        self._carried = self.ledger.adopt(entries, in_flight)
        self._done()
        for req in self.waiting_queue:
            self._enter(req)
        return running

    def _adopt(self, req: Any, half: bool = False) -> Request:
        """The ledger's entry of a request that SGLang's rules have begun."""
        entry = self._entry(req)
        entry.computed = req.kv.kv_committed_len
        entry.is_prefill_chunk = half
        entry.num_cached_tokens = entry.computed if half else 0
        page = self.page_size
        entry.quiet = self.kv_port.held[entry] = -(-max(entry.computed, req.kv.kv_allocated_len) // page) * page
        self._entries[entry.id] = entry
        return entry

    def _record(self, plan: StepPlan, batch: ScheduleBatch | None, started: float, left_out: int) -> Step:
        step = super()._record(plan, batch, started, left_out)
        step.number = self._next_number()
        step.scheduler = "ledger"
        return step

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # Results back ---------------------------------------------------------------------------------------------------

    def run_batch(self, batch: ScheduleBatch, pp_proxy_tensors: Any = None) -> Any:
        if not self._stock:
            self._launched.append(None)
            return super().run_batch(batch, pp_proxy_tensors)
        step = self._reader.read(self, batch, self._next_number(), self.steps.detailed)
        step.scheduler = "sglang"
        step.preempted, self._retracted = self._retracted, 0
        self._launched.append(step)
        # NOTE: the ledger's times its own newest plan; here that is somebody else's.
        result = super(LedgerScheduler, self).run_batch(batch, pp_proxy_tensors)
        if self.device == "cpu":
            step.ms = (time.monotonic() - step.at) * 1e3
        return result

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        step = self._launched.popleft()
        if step is None:
            super().process_batch_result(batch, result)
            self.arms.add(self.steps.last(1)[0])
            return
        plan, self._carried = self._carried, None
        if plan is not None and self._lost:
            self.output_streamer.silent = frozenset(id(req) for req in batch.reqs if req.is_retracted)
        dropped.cut(batch, result)
        super(LedgerScheduler, self).process_batch_result(batch, result)
        self.output_streamer.silent = frozenset()
        self._ended = True
        if plan is not None:
            self._fold(plan, batch)
        now = time.monotonic()
        if step.ms is None:
            step.ms = (now - max(step.at, self._last_result)) * 1e3
        self._last_result = now
        self.steps.add(step)
        self.arms.add(step)
        if self._stock_metrics is not None:
            self._stock_metrics.note(step)

    def _fold(self, plan: StepPlan, batch: ScheduleBatch) -> None:
        if self._orphans:
            self._orphans -= 1
            return
        super()._fold(plan, batch)


def install(request: Any) -> None:
    """Put SwitchScheduler in Scheduler's place; run by the plugin in every process, before SGLang makes a scheduler."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    SwitchScheduler.glm_flags = LedgerFlags.from_knobs(request.knobs)
    SwitchScheduler.glm_sharing = Sharing.of(request)
    SwitchScheduler.glm_first = request.slots["scheduler"]
    SwitchScheduler.glm_alternate_s = request.knobs["ab_alternate_s"]
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler", SwitchScheduler, HookType.REPLACE)
