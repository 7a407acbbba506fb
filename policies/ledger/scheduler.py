"""SGLang's Scheduler, scheduled by the ledger.

    step t     absorb    last batch's finished prompts join the running batch; half-done prompts are checkpointed
               schedule  ledger plans over running and waiting; what it preempts gives its KV back now
               lower     one ScheduleBatch (lowering.py)
    result     fold      tokens, ends and drops go back into the ledger, in the order of the plans

Under SGLang's overlap schedule step t is planned before the result of t-1 is known: the ledger counts that token as a
placeholder (core.py, `async_scheduling`). Everything else of SGLang's loop runs unchanged: receiving, forward,
sampling, result processing, streaming, grammar, sessions, metrics.

Invariant, checked each step under SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY: a running request's
`num_computed_tokens` equals SGLang's `req.kv.kv_committed_len`.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from sglang.srt.beam_search.coordinator import BeamCoordinator
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch, release_req
from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler, _make_abort_req
from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.observability.metrics_collector import QueueCount
from sglang.srt.observability.req_time_stats import set_schedule_time_batch, set_time_batch
from sglang.srt.observability.scheduler_stage_metrics import SCHEDULER_STAGE_GET_NEXT_BATCH, scheduler_stage_method
from sglang.srt.runtime_context import get_parallel

from parallel.collectives import first_ranks
from policies.ledger import dropped, lowering
from policies.ledger.core import Ledger
from policies.ledger.flags import LedgerFlags
from policies.ledger.kv_tree import TreeKV
from policies.ledger.plan import StepPlan
from policies.ledger.request import Request, Status
from policies.step_metrics import StepMetrics
from policies.steps import Sharing, Step, StepLog, file_of_rank


class PartialSkippingStreamer(SchedulerOutputStreamer):
    """SGLang's streamer, silent for half-done prompts (SGLang's own knows of one) and for dropped results."""

    silent: frozenset[int] = frozenset()

    def stream_output(self, reqs: list[Any], return_logprob: bool, skip_req: Any = None) -> None:
        if self.silent:
            reqs = [req for req in reqs if id(req) not in self.silent]
        super().stream_output(reqs, return_logprob, skip_req)


class NoBeams(BeamCoordinator):
    """SGLang's beam search, refused a request at a time: it has no flag of its own."""

    def validate_and_init(self, req: Any, recv_req: Any) -> str:
        width = req.sampling_params.beam_width
        return f"beam_width {width}: beam search is not supported with --scheduler ledger; use --scheduler sglang"


class _Rows:
    """Stands in for a batch where SGLang only reads `.reqs`."""

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs = reqs


class _Pending:
    """Stands in for the one chunked request: the sum over all half-done prompts."""

    prefix_len = 0

    def __init__(self, tokens: int) -> None:
        self.seqlen = tokens


class LedgerScheduler(Scheduler):
    """Scheduler of the `ledger` slot."""

    glm_scheduler = "ledger"
    glm_flags: LedgerFlags  # set by install() before SGLang makes the scheduler
    glm_sharing: Sharing  # likewise
    waiting_queue: list[Any]  # SGLang's

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._entries: dict[str, Request] = {}
        self._plans: deque[tuple[StepPlan, Step]] = deque()
        self._chunked: list[Any] = []  # half-done prompts that ran in the last step
        self._aborting: list[Any] = []
        self._resting: ScheduleBatch | None = None  # decode rows that sat out the last step
        self._ended = False  # somebody ended since the running batch was last filtered
        self._lost: dict[str, int] = {}  # preempted requests: tokens that had been computed
        self._last_result = 0.0  # monotonic seconds; on a GPU steps are timed from result to result
        super().__init__(*args, **kwargs)
        flags = type(self).glm_flags
        self.kv_port = TreeKV(
            self.token_to_kv_pool_allocator,
            self.tree_cache,
            self.req_to_token_pool,
            self.max_total_num_tokens,
            self.page_size,
            flags.watermark,
            self._release,
        )
        self.pacer = flags.pacer(self.page_size)
        self.ledger = Ledger(
            flags.config(
                max_model_len=self.model_config.context_len,
                max_running_requests=self.max_running_requests,
                page_size=self.page_size,
                overlap=self.enable_overlap,
            ),
            self.kv_port,
            self.pacer,
        )
        parallel = get_parallel()
        self._clock_group = parallel.tp_group.cpu_group if parallel.tp_size > 1 else None
        path = file_of_rank(flags.step_log, parallel.tp_rank, parallel.dp_rank)
        self.steps = StepLog(path=path, more=self._state)
        self._metrics: StepMetrics | None = None
        if self.metrics_reporter.current_scheduler_metrics_enabled:
            self._metrics = self._step_metrics(self.metrics_reporter.metrics_collector.labels)
        self._strict = bool(envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get())

    def _step_metrics(self, labels: dict[str, str]) -> StepMetrics:
        budget, ranks = self.ledger.config.token_budget, self.glm_sharing.ranks
        return StepMetrics(labels, budget, self.pacer is not None, ranks=ranks)

    # Seams of SGLang ------------------------------------------------------------------------------------------------

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return PartialSkippingStreamer

    def init_beam_coordinator(self) -> None:
        super().init_beam_coordinator()
        self.beam_coordinator.__class__ = NoBeams

    def init_invariant_checker(self) -> None:
        """SGLang counts the rows of batches; a half-done prompt that sits a step out is in none."""
        super().init_invariant_checker()
        self.invariant_checker.get_running_batch = lambda: _Rows([*self.running_batch.reqs, *self._outside()])

    def init_load_inquirer(self) -> None:
        super().init_load_inquirer()
        # NOTE: a frozen dataclass; its getters are its only seam.
        object.__setattr__(self.load_inquirer, "get_chunked_req", self._pending_prefill)
        object.__setattr__(self.load_inquirer, "get_running_batch", self._running_rows)

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        return not self.ledger.running and super().is_fully_idle(for_health_check, ignore_waiting)

    def _collect_inflight_batches(self) -> list[Any]:
        """SGLang looks here for whom to abort, to time out and to tell of new weights."""
        return [*super()._collect_inflight_batches(), _Rows(self._outside())]

    def _outside(self) -> list[Any]:
        """Requests that hold KV and are in no batch: half-done prompts, and decodes that sit out."""
        ledger = getattr(self, "ledger", None)
        if ledger is None:
            return []
        reqs = [r.handle for r in ledger.roster.loose if r.is_prefill_chunk]
        if self._resting is not None:
            reqs += self._resting.reqs
        return [req for req in reqs if req.kv.holds_kv]

    def _running_rows(self) -> _Rows:
        return _Rows([request.handle for request in self.ledger.running])

    def _pending_prefill(self) -> _Pending | None:
        tokens = sum(r.to_go for r in self.ledger.roster.loose if r.is_prefill_chunk)
        return _Pending(tokens) if tokens else None

    # Requests in ----------------------------------------------------------------------------------------------------

    def init_req_max_new_tokens(self, req: Any) -> None:
        """SGLang cuts `max_new_tokens` to what the pool can hold; a request that it leaves nothing is told so."""
        asked = req.sampling_params.max_new_tokens
        super().init_req_max_new_tokens(req)
        if asked != 0 and req.sampling_params.max_new_tokens == 0 and req.to_finish is None:
            prompt, pool = len(req.origin_input_ids), self.max_total_num_tokens
            req.set_finish_with_abort(
                f"The prompt of {prompt} tokens leaves no room for output in the KV pool of {pool} tokens."
            )

    def _set_or_validate_priority(self, req: Any) -> bool:
        """A request without a priority has priority 0, as in vLLM; SGLang would put it behind all others."""
        if self.enable_priority_scheduling and req.priority is None:
            req.priority = 0
        return super()._set_or_validate_priority(req)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        super()._add_request_to_queue(req, is_retracted)
        if self.waiting_queue and self.waiting_queue[-1] is req:
            self._enter(req)

    def _enter(self, req: Any) -> None:
        """A request of SGLang's waiting queue joins the ledger's line."""
        known = self._entries.get(req.rid)
        if known is not None:  # taken out of the running batch by SGLang itself (pause with mode "retract")
            self._forget(known)
        entry = self._entry(req)
        self._entries[req.rid] = entry
        self.ledger.add(entry)

    @staticmethod
    def _entry(req: Any) -> Request:
        """A request of SGLang's as the ledger knows it: nothing computed yet, its outputs so far counted."""
        entry = Request(
            req.rid,
            len(req.origin_input_ids),
            # NOTE: SGLang samples one token even where none is asked for (scoring); 0 would mean unknown to the ledger.
            max_tokens=max(1, req.sampling_params.max_new_tokens or 0),
            priority=req.priority or 0,
            arrival_time=time.monotonic(),
            handle=req,
        )
        entry.tokens += len(req.output_ids)
        return entry

    def _forget(self, entry: Request) -> None:
        if entry.status is not Status.FINISHED:
            self.ledger.finish(entry)
        if self._entries.get(entry.id) is entry:
            del self._entries[entry.id]
            self._lost.pop(entry.id, None)

    def _follow_queue(self) -> None:
        """Requests that SGLang took from its waiting queue (abort, time-out, flush) leave the ledger's line too."""
        if len(self.waiting_queue) == len(self.ledger.waiting):
            return
        there = {id(req) for req in self.waiting_queue}
        for entry in list(self.ledger.requests.values()):
            if entry.status is not Status.RUNNING and id(entry.handle) not in there:
                self._forget(entry)

    def abort_request(self, recv_req: AbortReq) -> None:
        for entry in self.ledger.roster.loose:
            req = entry.handle
            if entry.is_prefill_chunk and (recv_req.abort_all or req.rid.startswith(recv_req.rid)):
                self._aborting.append(req)
        super().abort_request(recv_req)

    def process_pending_chunked_abort(self) -> None:
        """SGLang ends one half-done prompt; here there may be several."""
        for req in self._aborting:
            entry = self._entries.get(req.rid)
            if entry is None or entry.handle is not req or req.finished():
                continue
            if entry.status is not Status.RUNNING:  # sent back to the line meanwhile, by a pause
                super().abort_request(AbortReq(rid=req.rid))
                continue
            if not entry.is_prefill_chunk:
                req.to_finish = req.to_finish or FINISH_ABORT()  # its last chunk is in flight: ends as a decode
                continue
            self.chunked_req = self._pending_chunked_abort_req = req
            super().process_pending_chunked_abort()
            self._forget(entry)
        self._aborting.clear()
        super().process_pending_chunked_abort()

    def pause_generation(self, recv_req: Any) -> None:
        super().pause_generation(recv_req)
        if recv_req.mode != "retract":
            return
        # NOTE: SGLang retracts what is in its batches; what sits outside of them is ours.
        for req in self._outside():
            self._release(req)
            self._add_request_to_queue(req)
        self._resting = None
        self._chunked.clear()

    # One step -------------------------------------------------------------------------------------------------------

    @scheduler_stage_method(SCHEDULER_STAGE_GET_NEXT_BATCH)
    def get_next_batch_to_run(self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None) -> NextBatchPlan:
        self.process_pending_chunked_abort()
        if self.grammar_manager.has_waiting_grammars():
            for req in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(req)
        running = self._absorb(running_batch, last_batch)
        self._follow_queue()
        self.kv_port.begin_step()
        started = time.monotonic()
        plan = self.ledger.schedule()
        if plan.preempted or plan.failed:
            self._take_out(plan, running)
        if plan.admitted:
            self._leave_queue(plan)
        left_out = self._sit_out(plan, running)
        decoding = running.reqs
        batch, running = lowering.lower(self, plan, running)
        if plan:
            self._plans.append((plan, self._record(plan, batch, started, left_out)))
            self._chunked = [request.handle for request in plan.chunks]
        if batch is not None:
            if batch.forward_mode.is_extend():
                batch.prefill_stats = self._prefill_stats(plan, decoding)
            set_schedule_time_batch(batch)
        if self._strict:
            self._check()
        return NextBatchPlan(batch_to_run=batch, running_batch=running)

    def _absorb(self, running: ScheduleBatch, last: ScheduleBatch | None) -> ScheduleBatch:
        """Join what ran last to the running batch; checkpoint the half-done prompts among it."""
        half = [req for req in self._chunked if req.kv.holds_kv and not req.finished()]
        for req in half:
            checkpoint_kv_cache(req, self.tree_cache)
        if last is not None and last is not running and not last.forward_mode.is_idle():
            if self._chunked:
                out = {id(req) for req in self._chunked}
                keep = [i for i, req in enumerate(last.reqs) if id(req) not in out and not req.finished()]
                last.filter_batch(keep_indices=[i for i in keep if not last.reqs[i].is_retracted])
            running = self._merge(running, last)
        self._chunked = []
        if self._resting is not None:
            running = self._merge(running, self._resting)
            self._resting = None
        if self._ended:
            running.filter_batch()
            self._ended = False
        return running

    @staticmethod
    def _merge(running: ScheduleBatch, other: ScheduleBatch) -> ScheduleBatch:
        other.filter_batch()
        if other.is_empty():
            return running
        if running.is_empty():
            return other
        running.merge_batch(other)
        return running

    def _take_out(self, plan: StepPlan, running: ScheduleBatch) -> None:
        """Preempted and failed requests leave the running batch; their KV is free already."""
        gone = {id(request.handle) for request in plan.preempted} | {id(r.handle) for r, _ in plan.failed}
        keep = [i for i, req in enumerate(running.reqs) if id(req) not in gone]
        running.filter_batch(keep_indices=keep)
        # The last one preempted stands first in line, as in the ledger.
        for request in plan.preempted:
            self.waiting_queue.insert(0, request.handle)
            request.handle.time_stats.set_retract_time()
        self.metrics_reporter.num_retracted_reqs = len(plan.preempted)
        if self.metrics_reporter.enable_metrics and plan.preempted:
            reqs = [request.handle for request in plan.preempted]
            self.metrics_reporter.metrics_collector.increment_retracted_reqs(
                num_retracted_reqs=len(reqs),
                num_retracted_input_tokens=sum(len(r.origin_input_ids) for r in reqs),
                num_retracted_output_tokens=sum(len(r.output_ids) for r in reqs),
            )
        for request, reason in plan.failed:
            req = request.handle
            self._entries.pop(request.id, None)
            end = FINISH_ABORT(f"KV cache pool is too small: the request {reason}.", status_code=500)
            req.to_finish = end
            self.send_abort_output(_make_abort_req(req, finished_reason=end.to_json()), req)

    def _leave_queue(self, plan: StepPlan) -> None:
        admitted = {id(request.handle) for request in plan.admitted}
        self.waiting_queue = [req for req in self.waiting_queue if id(req) not in admitted]
        set_time_batch([request.handle for request in plan.admitted], "set_forward_entry_time")

    def _sit_out(self, plan: StepPlan, running: ScheduleBatch) -> int:
        """Running decodes without a row: those that the result in flight ends leave, the others rest for a step.

        Returns how many rest.
        """
        if len(plan.tokens) - len(plan.extends) == len(running.reqs):
            return 0
        entries = self._entries
        idle = [req for req in running.reqs if entries[req.rid] not in plan.tokens]
        ending = {id(req) for req in self._reqs_finishing_inflight(running)} if self.enable_overlap else set()
        rest = {id(req) for req in idle if id(req) not in ending}
        leave = {id(req) for req in idle} - rest
        if leave:
            running.filter_batch(keep_indices=[i for i, req in enumerate(running.reqs) if id(req) not in leave])
        if rest:
            _, self._resting = lowering.take_rows(running, rest)
        return len(rest)

    def _release(self, req: Any) -> None:
        """Give back the KV of a preempted request and make it ready to start over; its outputs stay."""
        self._lost[req.rid] = req.kv.kv_committed_len
        release_req(
            req=req,
            remaing_req_count=0,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            tree_cache=self.tree_cache,
            hisparse_coordinator=None,
            offload_kv=False,
        )

    def _record(self, plan: StepPlan, batch: ScheduleBatch | None, started: float, left_out: int) -> Step:
        lost = self._lost
        again = 0
        if lost:
            again = sum(max(0, lost.pop(entry.id, 0) - entry.num_cached_tokens) for entry in plan.admitted)
        step = Step(
            number=plan.number,
            at=started,
            mode=batch.forward_mode.name.lower() if batch is not None else "none",
            prefill_tokens=plan.prefill_tokens,
            decode_rows=plan.decode_rows,
            left_out=left_out,
            chunks=len(plan.chunks),
            admitted=len(plan.admitted),
            preempted=len(plan.preempted),
            failed=len(plan.failed),
            recomputed=again,
            running=len(self.ledger.running),
            waiting=len(self.ledger.waiting),
            free_tokens=self.kv_port.room(),
            planned_ms=(time.monotonic() - started) * 1e3,
            predicted_ms=plan.predicted_ms,
        )
        if batch is not None and self.glm_sharing.ranks > 1:
            if batch.forward_mode.is_decode():
                ends = batch.seq_lens_cpu.tolist()
                self.glm_sharing.note(step, [1] * len(ends), [end - 1 for end in ends])
            else:
                self.glm_sharing.note(step, batch.extend_lens, batch.prefix_lens)
        if self.steps.detailed:
            step.rows = {request.id: rows for request, rows in plan.tokens.items()}
            step.hits = {request.id: request.num_cached_tokens for request in plan.admitted}
        return step

    def _prefill_stats(self, plan: StepPlan, decoding: list[Any]) -> PrefillStats:
        """What SGLang's "Prefill batch" line and its cache-hit and throughput metrics read."""
        again_rows = again_hits = hits = 0
        admitted = set(plan.admitted)
        for request, rows in plan.extends.items():
            hit = request.num_cached_tokens if request in admitted else 0
            hits += hit
            if request in admitted and request.handle.retracted_stain:
                again_rows += rows
                again_hits += hit
        return PrefillStats(
            log_input_tokens=plan.prefill_tokens,
            log_hit_tokens=hits,
            reprocessed_log_input_tokens=again_rows,
            reprocessed_log_hit_tokens=again_hits,
            log_device_hit_tokens=hits - again_hits,
            new_token_ratio=0.0,  # the ledger sets no memory aside for tokens to come
            num_running_reqs=QueueCount.from_reqs(decoding, self.enable_priority_scheduling),
            num_new_seqs=len(plan.extends),
            num_pending_tokens=self.load_inquirer._get_num_pending_tokens(chunk_deduct=0),
        )

    def _state(self) -> dict[str, Any]:
        """Who is here, where the KV pool's tokens are, and what the step-time model knows."""
        held = sum(entry.handle.kv.holds_kv for entry in self._entries.values())
        facts: dict[str, Any] = {
            "running": len(self.ledger.running),
            "waiting": len(self.ledger.waiting),
            "requests_holding_kv": held,
            "kv_tokens": {
                "free": int(self.token_to_kv_pool_allocator.available_size()),
                "cached": int(self.tree_cache.evictable_size()),
                "total": self.max_total_num_tokens,
            },
        }
        if self.pacer is not None:
            model = self.pacer.model
            facts["step_time"] = {
                "target_ms": self.pacer.target_step_ms,
                "steps": model.steps,
                "error": model.error,
                "coefficients": list(model.coefficients),
            }
        return facts

    # Results back ---------------------------------------------------------------------------------------------------

    def run_batch(self, batch: ScheduleBatch, pp_proxy_tensors: Any = None) -> Any:
        """SGLang's; on a CPU, where the forward has ended when it returns, its wall time is the step's."""
        started = time.monotonic()
        backend = self.tp_worker.model_runner.attn_backend
        before = getattr(backend, "dense_rows", None)
        result = super().run_batch(batch, pp_proxy_tensors)
        if self._plans and self.device == "cpu":
            step = self._plans[-1][1]
            step.ms = (time.monotonic() - started) * 1e3
            step.dense_rows = None if before is None else backend.dense_rows - before
        return result

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        if not self._plans:
            self._ended = True
            super().process_batch_result(batch, result)
            return
        plan, step = self._plans.popleft()
        silent = {id(request.handle) for request in plan.chunks}
        if self._lost:  # whose result is dropped has nothing to say either
            silent |= {id(req) for req in batch.reqs if req.is_retracted}
        self.output_streamer.silent = frozenset(silent)
        dropped.cut(batch, result)
        super().process_batch_result(batch, result)
        self.output_streamer.silent = frozenset()
        self._fold(plan, batch)
        now = time.monotonic()
        if step.ms is None:
            step.ms = (now - max(step.at, self._last_result)) * 1e3
        self._last_result = now
        self.steps.add(step)
        error = None
        if self.pacer is not None and plan.load is not None:
            # NOTE: ranks plan alike only while they know alike: each clock tells another time.
            self.pacer.observe(plan.load, first_ranks(step.ms, self._clock_group))
            error = self.pacer.model.error
        if self._metrics is not None:
            self._metrics.note(step, error)

    def _fold(self, plan: StepPlan, batch: ScheduleBatch) -> None:
        """Who ended, and whose token SGLang dropped (preempted while its step ran)."""
        entries = self._entries
        ended: list[Request] = []
        unheard: dict[Request, int] = {}
        for req in batch.reqs:
            if req.finished():
                self._ended = True
                entry = entries.get(req.rid)
                if entry is not None and entry.handle is req:
                    ended.append(entry)
            elif req.is_retracted:
                entry = entries.get(req.rid)
                if entry is not None and entry in plan.singles:
                    unheard[entry] = 0
        self.ledger.update(plan, unheard or None, ended)
        for entry in ended:
            del entries[entry.id]
            self._lost.pop(entry.id, None)

    def _check(self) -> None:
        """Both books agree."""
        for request in self.ledger.running:
            committed = request.handle.kv.kv_committed_len
            if request.num_computed_tokens != committed:
                raise AssertionError(
                    f"{request.id}: the ledger has {request.num_computed_tokens} computed tokens, SGLang {committed}"
                )


def install(request: Any) -> None:
    """Put LedgerScheduler in Scheduler's place; run by the plugin in every process, before SGLang makes a scheduler."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    LedgerScheduler.glm_flags = LedgerFlags.from_knobs(request.knobs)
    LedgerScheduler.glm_sharing = Sharing.of(request)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler", LedgerScheduler, HookType.REPLACE)
