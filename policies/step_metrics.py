"""Prometheus metrics of the steps, beside SGLang's own on GET /metrics (with --enable-metrics).

    glm_runtime:step_tokens_total{kind="prefill"|"decode"}      rows run
    glm_runtime:steps_total{mode="decode"|"extend"|"mixed"}     steps run
    glm_runtime:decode_rows_left_out_total                      running decodes that got no row in a step
    glm_runtime:step_budget_used                                share of the token budget that the last step used
    glm_runtime:partial_prefills                                prompts half way after the last step
    glm_runtime:preemptions_total{reason="kv_room"}             running requests sent back to the line
    glm_runtime:recomputed_tokens_total                         rows computed a second time after a preemption
    glm_runtime:step_time_error                                 mean |forecast / real - 1|, with --target-step-ms
    glm_runtime:rank_rows_total{prefill_rank="0"|...}           rows run by each prefill rank, with prefill ranks
    glm_runtime:rank_key_visits_total{prefill_rank="0"|...}     keys that those rows see
    glm_runtime:rank_imbalance                                  largest visits over their mean in the last shared step

Labels are SGLang's (model, rank, ...) and those above; where the scheduler can change while the server runs,
`scheduler` beside them, and glm_runtime:policy_switches_total{scheduler=...} counts the changes to each. No `sglang`
import; `prometheus_client` is imported when the metrics are made, because SGLang sets its multi-process folder before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.steps import Step

PREFIX = "glm_runtime:"


class Families:
    """The metrics by name; made once a process.

    Args:
        names: label names of every metric.
        paced: whether steps are sized by time.
        ranks: prefill ranks.
        registry: where to register; None: prometheus_client's own.
    """

    def __init__(self, names: list[str], paced: bool, ranks: int, registry: Any = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = REGISTRY if registry is None else registry

        def counter(name: str, text: str, *more: str) -> Any:
            return Counter(PREFIX + name, text, [*names, *more], registry=registry)

        def gauge(name: str, text: str) -> Any:
            return Gauge(PREFIX + name, text, names, registry=registry, multiprocess_mode="mostrecent")

        self.tokens = counter("step_tokens_total", "Rows run, by kind.", "kind")
        self.steps = counter("steps_total", "Steps run, by the mode of their batch.", "mode")
        self.left_out = counter("decode_rows_left_out_total", "Running decodes that got no row in a step.")
        self.used = gauge("step_budget_used", "Share of the token budget that the last step used.")
        self.partial = gauge("partial_prefills", "Prompts half way after the last step.")
        self.preempted = counter("preemptions_total", "Running requests sent back to the line, by reason.", "reason")
        self.recomputed = counter("recomputed_tokens_total", "Rows computed a second time after a preemption.")
        self.error = gauge("step_time_error", "Mean of |forecast / real - 1| of a step's time.") if paced else None
        if ranks > 1:
            self.rank_rows = counter("rank_rows_total", "Rows run by each prefill rank.", "prefill_rank")
            self.rank_visits = counter(
                "rank_key_visits_total", "Keys seen by the rows of each prefill rank.", "prefill_rank"
            )
            self.imbalance = gauge("rank_imbalance", "Largest key visits of a prefill rank over their mean.")


class StepMetrics:
    """Counters and gauges of one scheduler process, under one set of label values.

    Args:
        labels: SGLang's label values of this process.
        budget: tokens that a step may schedule.
        paced: whether steps are sized by time.
        ranks: prefill ranks.
        registry: where to register; None: prometheus_client's own.
        families: metrics made before, for a second set of label values; None: make them.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        budget: int,
        paced: bool,
        registry: Any = None,
        ranks: int = 1,
        families: Families | None = None,
    ) -> None:
        found = self.families = families or Families(list(labels), paced, ranks, registry)
        self._budget = budget
        self._prefill = found.tokens.labels(**labels, kind="prefill")
        self._decode = found.tokens.labels(**labels, kind="decode")
        self._steps = {mode: found.steps.labels(**labels, mode=mode) for mode in ("decode", "extend", "mixed")}
        self._left_out = found.left_out.labels(**labels)
        self._used = found.used.labels(**labels)
        self._partial = found.partial.labels(**labels)
        self._preempted = found.preempted.labels(**labels, reason="kv_room")
        self._recomputed = found.recomputed.labels(**labels)
        self._error = None if found.error is None else found.error.labels(**labels)
        self._ranks: list[tuple[Any, Any]] = []
        if ranks > 1:
            of_rank = [dict(labels) | {"prefill_rank": str(rank)} for rank in range(ranks)]
            self._ranks = [(found.rank_rows.labels(**mine), found.rank_visits.labels(**mine)) for mine in of_rank]
            self._imbalance = found.imbalance.labels(**labels)

    def note(self, step: Step, error: float | None = None) -> None:
        """A step whose result has been processed; `error`: the step-time model's mean error by now."""
        self._prefill.inc(step.prefill_tokens)
        self._decode.inc(step.decode_rows)
        self._left_out.inc(step.left_out)
        self._preempted.inc(step.preempted)
        self._recomputed.inc(step.recomputed)
        self._used.set(step.tokens / self._budget)
        self._partial.set(step.chunks)
        if step.mode in self._steps:
            self._steps[step.mode].inc()
        if step.rank_imbalance is not None and self._ranks:
            for (rows, visits), run, seen in zip(self._ranks, step.rank_rows, step.rank_visits, strict=True):
                rows.inc(run)
                visits.inc(seen)
            if step.mode != "decode":
                self._imbalance.set(step.rank_imbalance)
        if self._error is not None and error is not None:
            self._error.set(error)
