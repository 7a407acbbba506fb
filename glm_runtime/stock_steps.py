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
from policies.stock_step import StockSteps


class Recorder:
    """Steps of one scheduler process. `path`: file of --step-log. `sharing`: how prefills are shared among ranks."""

    def __init__(self, scheduler: Any, path: str | None, sharing: Sharing) -> None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        self.log = scheduler.steps = StepLog(path=file_of_rank(path, parallel.tp_rank, parallel.dp_rank))
        self._pending: deque[Step] = deque()
        self._last_result = 0.0
        self._number = 0
        self._reader = StockSteps(sharing)
        self._metrics: StepMetrics | None = None
        reporter = scheduler.metrics_reporter
        if reporter.current_scheduler_metrics_enabled:
            budget = max(1, scheduler.chunked_prefill_size or scheduler.max_prefill_tokens)
            self._metrics = StepMetrics(reporter.metrics_collector.labels, budget, paced=False, ranks=sharing.ranks)

    def begin(self, scheduler: Any, batch: Any) -> Step:
        """The step that `batch` is."""
        self._number += 1
        step = self._reader.read(scheduler, batch, self._number, self.log.detailed)
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
