"""Figures of an arm, by SGLang's own metrics, and the arms' ratios with intervals.

replies ─> serving.calculate_metrics ─> the names that SGLang's and vLLM's benchmarks write: mean_ttft_ms, ...
        ─> stats.paired ─────────────> each arm over the first, with 95% bounds
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from sglang.benchmark.datasets import DatasetRow
from sglang.benchmark.serving import RequestFuncOutput, calculate_metrics

from glm_runtime.ab.asks import Ask
from glm_runtime.ab.runs import Reply, Run
from glm_runtime.ab.slo import Slo
from glm_runtime.ab.stats import Ratio, Sample, Statistic, paired


def figures(runs: Sequence[Run], asks: Sequence[Ask], tokenizer: Any, slo: Slo | None = None) -> dict[str, Any]:
    """Figures over all rounds of one arm.

    Returns:
        SGLang's metrics by its names, with vLLM's `total_token_throughput` and `num_prompts` beside them; with an SLO
        also `request_goodput` (requests/s), `slo_attainment` and `slo_attainment_by_metric`; and what the step records
        say. Latencies that do not exist (no gap, no answer) are nan.
    """
    replies = [reply for run in runs for reply in run.replies]
    seconds = sum(run.seconds for run in runs)
    # One round after the other on one clock: SGLang's peaks count what is there at the same time.
    begins = accumulate((run.seconds for run in runs[:-1]), initial=0.0)
    sent = [begin + reply.sent for begin, run in zip(begins, runs, strict=True) for reply in run.replies]
    found = _sglang(replies, sent, list(asks) * len(runs), seconds, tokenizer)
    if slo:
        met = [slo.met(reply) for reply in replies]
        good = sum(all(one.values()) for one in met)
        found |= {
            "goodput_slos_ms": {name: value for name, value in asdict(slo).items() if value is not None},
            "request_goodput": good / seconds,
            "slo_attainment": good / len(met),
            "slo_attainment_by_metric": {name: sum(one[name] for one in met) / len(met) for name in met[0]},
        }
    return found | _steps(runs) | {"cached_tokens": sum(reply.cached for reply in replies)}


def _sglang(
    replies: Sequence[Reply], sent: Sequence[float], asks: Sequence[Ask], seconds: float, tokenizer: Any
) -> dict[str, Any]:
    rows = [DatasetRow(prompt="", prompt_len=ask.prompt_tokens, output_len=ask.new) for ask in asks]
    outputs = [
        RequestFuncOutput(
            generated_text=reply.text,
            success=not reply.error,
            latency=reply.latency,
            ttft=reply.ttft,
            itl=reply.itl,
            prompt_len=reply.prompt_tokens,
            output_len=len(reply.tokens),
            start_time=at,
            error=reply.error,
        )
        for reply, at in zip(replies, sent, strict=True)
    ]
    answered = [reply for reply in replies if not reply.error]
    failed = {"completed": len(answered), "failed": len(replies) - len(answered), "num_prompts": len(replies)}
    if not answered:
        return {"duration": seconds} | failed
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics, _ = calculate_metrics(rows, outputs, seconds, tokenizer, "sglang")
    found: dict[str, Any] = {"duration": seconds, **failed}
    renamed = {"total_input": "total_input_tokens", "total_output": "total_output_tokens"}
    for name, value in asdict(metrics).items():
        if "retokenized" in name or "vision" in name or name in ("total_input_text", "completed"):
            continue
        found[renamed.get(name, name)] = value if isinstance(value, int) else float(value)
    found["total_token_throughput"] = found["total_throughput"]
    absent = [name for name in found if "_itl_" in name] if not any(reply.itl for reply in answered) else []
    return found | dict.fromkeys(absent, math.nan)


def _steps(runs: Sequence[Run]) -> dict[str, Any]:
    """Sums over the step records."""
    steps = [step for run in runs for step in run.steps]
    waited = [step for step in steps if step["left_out"]]
    pool = [run.policy["knobs"].get("max_total_num_tokens") for run in runs]
    used = [
        (total - step["free_tokens"]) / total
        for run, total in zip(runs, pool, strict=True)
        if total
        for step in run.steps
        if step.get("rows")
    ]
    return {
        "steps": len(steps),
        "mean_step_ms": sum(step["ms"] or 0.0 for step in steps) / len(steps) if steps else math.nan,
        "max_step_tokens": max((step["prefill_tokens"] + step["decode_rows"] for step in steps), default=0),
        "stall_seconds": sum(step["ms"] or 0.0 for step in waited) / 1e3,
        "preemptions": sum(reply.retractions for run in runs for reply in run.replies),
        "recomputed_tokens": sum(step["recomputed"] for step in steps),
        "peak_kv_usage": max(used, default=math.nan),
    }


def samples(runs: Sequence[Run], what: str, kept: Sequence[bool]) -> Sample:
    """Values of an arm by request and round, in ms: "ttft", "itl" or "tpot"; requests that are not `kept` are empty."""
    groups: list[list[float]] = []
    replies = [reply for run in runs for reply in run.replies]
    for reply, use in zip(replies, kept, strict=True):
        if not use or reply.error:
            groups.append([])
        elif what == "ttft":
            groups.append([reply.ttft * 1e3])
        elif what == "itl":
            groups.append([gap * 1e3 for gap in reply.itl])
        else:
            many = len(reply.tokens) > 1
            groups.append([(reply.latency - reply.ttft) / (len(reply.tokens) - 1) * 1e3] if many else [])
    return Sample(groups)


STATISTICS: Mapping[str, tuple[str, Statistic]] = {
    "mean_ttft_ms": ("ttft", lambda sample, counts: sample.mean(counts)),
    "median_ttft_ms": ("ttft", lambda sample, counts: sample.quantile(0.5, counts)),
    "p99_ttft_ms": ("ttft", lambda sample, counts: sample.quantile(0.99, counts)),
    "median_itl_ms": ("itl", lambda sample, counts: sample.quantile(0.5, counts)),
    "p99_itl_ms": ("itl", lambda sample, counts: sample.quantile(0.99, counts)),
    "max_itl_ms": ("itl", lambda sample, counts: sample.quantile(1.0, counts)),
    "mean_tpot_ms": ("tpot", lambda sample, counts: sample.mean(counts)),
}


def ratios(base: Sequence[Run], other: Sequence[Run], seed: int = 0) -> dict[str, Ratio]:
    """An arm over the first arm, statistic by statistic, over the requests that both answered in the same round."""
    rounds = min(len(base), len(other))
    a, b = list(base)[:rounds], list(other)[:rounds]
    kept = [
        not x.error and not y.error
        for run_a, run_b in zip(a, b, strict=True)
        for x, y in zip(run_a.replies, run_b.replies, strict=True)
    ]
    found = {}
    made: dict[str, tuple[Sample, Sample]] = {}
    for name, (what, statistic) in STATISTICS.items():
        if what not in made:
            made[what] = samples(a, what, kept), samples(b, what, kept)
        if len(made[what][0].values) and len(made[what][1].values):
            found[name] = paired(*made[what], statistic, seed)
    found["output_throughput"] = _over_rounds([_throughput(run) for run in a], [_throughput(run) for run in b])
    return found


def _throughput(run: Run) -> float:
    return sum(len(reply.tokens) for reply in run.replies) / run.seconds


def _over_rounds(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """A rate exists once a round: the ratio of the means, and the least and the largest of the rounds as bounds."""
    each = [y / x for x, y in zip(a, b, strict=True) if x]
    if not each:
        return Ratio(math.nan, math.nan, math.nan)
    if len(each) == 1:
        return Ratio(each[0], math.nan, math.nan)
    return Ratio(sum(b) / sum(a), min(each), max(each))


def by_kind(runs: Sequence[Run], asks: Sequence[Ask]) -> dict[str, dict[str, float]]:
    """Kind of request -> median and worst TTFT, median, p99 and worst gap, in ms. Empty where the workload has none."""
    found = {}
    for kind in dict.fromkeys(ask.kind for ask in asks if ask.kind):
        kept = [ask.kind == kind for ask in asks] * len(runs)
        first, gaps = samples(runs, "ttft", kept), samples(runs, "itl", kept)
        found[kind] = {
            "requests": float(sum(kept) // len(runs)),
            "median_ttft_ms": first.quantile(0.5),
            "max_ttft_ms": first.quantile(1.0),
            "median_itl_ms": gaps.quantile(0.5),
            "p99_itl_ms": gaps.quantile(0.99),
            "max_itl_ms": gaps.quantile(1.0),
        }
    return found
