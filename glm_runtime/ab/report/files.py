"""Files for other tools. Pure.

figures.json   everything found                 figures.csv   one row a figure, one column an arm
bench.jsonl    one line a run, in the field names of SGLang's and vLLM's serving benchmarks
trace.json     steps and requests for Perfetto (ui.perfetto.dev) and chrome://tracing
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glm_runtime.ab.outcome import Outcome
from glm_runtime.ab.report.table import ROWS
from glm_runtime.ab.runs import Run


def plain(value: Any) -> Any:
    """JSON has no nan: null instead."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def figures_json(found: Outcome) -> dict[str, Any]:
    """Everything found, as JSON values."""
    return plain(
        {
            "format": "glm_runtime-ab",
            "version": 1,
            "command": found.command,
            "machine": found.machine,
            "workload": {
                "name": found.workload.name,
                "fingerprint": found.workload.fingerprint,
                "requests": len(found.workload.asks),
                "prompt_tokens": found.workload.prompt_tokens,
                "prefix_reuse": found.workload.reuse,
            },
            "arms": {name: {"flags": runs[0].flags, "rounds": len(runs)} for name, runs in found.runs.items()},
            "settings": [asdict(one) | {"differs": one.differs} for one in found.settings],
            "noise": asdict(found.noise) | {"measured": found.repeated, "explains": found.noise.explains},
            "equality": [one.as_dict() for one in found.equalities],
            "figures": found.figures,
            "by_kind": found.kinds,
            "ratios": {arm: {name: asdict(one) for name, one in own.items()} for arm, own in found.ratios.items()},
        }
    )


def bench_lines(found: Outcome) -> list[dict[str, Any]]:
    """One dictionary a run, as SGLang's and vLLM's benchmarks write them with details."""
    lines = []
    for arm, runs in found.runs.items():
        for run, own in zip(runs, found.each[arm], strict=True):
            lines.append(
                plain(
                    {
                        "tag": f"{arm}-{run.round}",
                        "round": run.round,
                        "backend": "sglang",
                        "dataset_name": found.workload.name,
                        "request_rate": "trace",
                        "max_concurrency": None,
                        **own,
                        "input_lens": [reply.prompt_tokens for reply in run.replies],
                        "output_lens": [len(reply.tokens) for reply in run.replies],
                        "ttfts": [reply.ttft for reply in run.replies],
                        "itls": [reply.itl for reply in run.replies],
                        "start_times": [reply.sent for reply in run.replies],
                        "errors": [reply.error for reply in run.replies],
                    }
                )
            )
    return lines


def trace_events(runs: Sequence[Run]) -> dict[str, Any]:
    """The runs as Chrome trace events: a process an arm, its steps in one row, its requests below, counters."""
    events: list[dict[str, Any]] = []
    for pid, run in enumerate(runs, 1):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": run.name}})
        events.append({"ph": "M", "pid": pid, "tid": 1, "name": "thread_name", "args": {"name": "steps"}})
        pool = run.policy["knobs"].get("max_total_num_tokens") or 0
        for step in run.steps:
            at = round((step["at"] - run.start) * 1e6, 3)
            rows = {"prefill": step["prefill_tokens"], "decode": step["decode_rows"]}
            events.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": 1,
                    "ts": at,
                    "dur": round((step["ms"] or 0.0) * 1e3, 3),
                    "name": step["mode"],
                    "cat": "step",
                    "args": {
                        "step": step["number"],
                        **rows,
                        "left_out": step["left_out"],
                        "running": step["running"],
                        "waiting": step["waiting"],
                    },
                }
            )
            events.append({"ph": "C", "pid": pid, "ts": at, "name": "rows", "args": rows})
            queue = {"running": step["running"], "waiting": step["waiting"]}
            events.append({"ph": "C", "pid": pid, "ts": at, "name": "requests", "args": queue})
            if pool and step.get("rows"):
                used = {"used": pool - step["free_tokens"]}
                events.append({"ph": "C", "pid": pid, "ts": at, "name": "KV tokens", "args": used})
        for place, reply in enumerate(run.replies):
            at, first, end = reply.sent * 1e6, (reply.sent + reply.ttft) * 1e6, (reply.sent + reply.latency) * 1e6
            spans = [("no answer", at, at)] if reply.error else [("to first token", at, first), ("decode", first, end)]
            for name, begin, stop in spans:
                events.append(
                    {
                        "ph": "X",
                        "pid": pid,
                        "tid": place + 2,
                        "ts": round(begin, 3),
                        "dur": round(stop - begin, 3),
                        "name": name,
                        "cat": "request",
                        "args": {"request": place, "prompt_tokens": reply.prompt_tokens, "cached": reply.cached},
                    }
                )
            thread = {"name": f"request {place}"}
            events.append({"ph": "M", "pid": pid, "tid": place + 2, "name": "thread_name", "args": thread})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(found: Outcome, folder: Path) -> list[Path]:
    """All files into `folder`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.json").write_text(json.dumps(figures_json(found), indent=1) + "\n")
    (folder / "bench.jsonl").write_text("".join(json.dumps(line) + "\n" for line in bench_lines(found)))
    last = [runs[-1] for runs in found.runs.values()]
    (folder / "trace.json").write_text(json.dumps(trace_events(last)) + "\n")
    with open(folder / "figures.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["figure", "unit", *found.arms])
        for name in dict.fromkeys(name for own in found.figures.values() for name in own):
            values = [plain(found.figures[arm].get(name)) for arm in found.arms]
            if all(isinstance(value, int | float) or value is None for value in values):
                writer.writerow([name, ROWS[name][1] if name in ROWS else "", *values])
    return [folder / name for name in ("figures.json", "figures.csv", "bench.jsonl", "trace.json")]
