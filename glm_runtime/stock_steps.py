"""The step record of SGLang's own scheduling: what `policies/ledger/scheduler.py` records of the ledger's.

    run_batch             ─> a Step: mode, rows by kind and request, queue lengths
    process_batch_result  ─> its wall time; into the log, its file and the metrics

Scheduling itself is untouched: two AROUND hooks on SGLang's Scheduler; see `hooks.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from policies.step_metrics import StepMetrics
from policies.steps import Sharing, Step, StepLog, file_of_rank


class Recorder:
    """Steps of one scheduler process. `path`: file of --step-log. `sharing`: how prefills are shared among ranks."""

    def __init__(self, scheduler: Any, path: str | None, sharing: Sharing) -> None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        self.log = scheduler.steps = StepLog(path=file_of_rank(path, parallel.tp_rank, parallel.dp_rank))
        self._pending: deque[Step] = deque()
        self._last_result = 0.0
        self._number = 0
        self._sharing = sharing
        self._half: str | None = None  # the prompt that is half way, by its request id
        self._metrics: StepMetrics | None = None
        reporter = scheduler.metrics_reporter
        if reporter.current_scheduler_metrics_enabled:
            budget = max(1, scheduler.chunked_prefill_size or scheduler.max_prefill_tokens)
            self._metrics = StepMetrics(reporter.metrics_collector.labels, budget, paced=False, ranks=sharing.ranks)

    def begin(self, scheduler: Any, batch: Any) -> Step:
        """The step that `batch` is."""
        self._number += 1
        decode = batch.forward_mode.is_decode()
        lens = [1] * len(batch.reqs) if decode else list(batch.extend_lens)
        decoding = len(batch.reqs) if decode else len(batch.decoding_reqs or ())
        chunked = scheduler.chunked_req
        step = Step(
            number=self._number,
            at=time.monotonic(),
            mode=batch.forward_mode.name.lower(),
            prefill_tokens=sum(lens) - decoding,
            decode_rows=decoding,
            left_out=0 if decode or decoding else len(scheduler.running_batch.reqs),
            chunks=int(chunked is not None),
            running=len({id(req) for req in (*scheduler.running_batch.reqs, *batch.reqs)}),
            waiting=len(scheduler.waiting_queue),
        )
        if decode:
            self._sharing.note(step, lens, [length - 1 for length in batch.seq_lens_cpu.tolist()])
        else:
            self._sharing.note(step, lens, batch.prefix_lens)
        if self.log.detailed:
            step.rows = {req.rid: rows for req, rows in zip(batch.reqs, lens, strict=True)}
            if not decode:
                prompts = zip(batch.reqs[: len(batch.reqs) - decoding], batch.prefix_lens, strict=False)
                step.hits = {req.rid: int(prefix) for req, prefix in prompts if req.rid != self._half}
                self._half = None if chunked is None else chunked.rid
            step.free_tokens = int(
                scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
            )
        self._pending.append(step)
        return step

    def end(self) -> None:
        """The oldest step's result has been processed."""
        step = self._pending.popleft()
        now = time.monotonic()
        if step.ms is None:
            step.ms = (now - max(step.at, self._last_result)) * 1e3
        self._last_result = now
        self.log.add(step)
        if self._metrics is not None:
            self._metrics.note(step)


def hooks(path: str | None, sharing: Sharing) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """AROUND hooks for `Scheduler.run_batch` and `Scheduler.process_batch_result`."""
    recorders: dict[int, Recorder] = {}

    def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not (batch.forward_mode.is_decode() or batch.forward_mode.is_extend()):
            return original(scheduler, batch, *args, **kwargs)
        recorder = recorders.get(id(scheduler))
        if recorder is None:
            recorder = recorders[id(scheduler)] = Recorder(scheduler, path, sharing)
        step = recorder.begin(scheduler, batch)
        result = original(scheduler, batch, *args, **kwargs)
        if scheduler.device == "cpu":  # the forward has ended when run_batch returns
            step.ms = (time.monotonic() - step.at) * 1e3
        return result

    def process(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
        answer = original(scheduler, batch, result)
        recorder = recorders.get(id(scheduler))
        if recorder is not None and (batch.forward_mode.is_decode() or batch.forward_mode.is_extend()):
            recorder.end()
        return answer

    return run_batch, process
