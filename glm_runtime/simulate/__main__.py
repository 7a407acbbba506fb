"""python -m glm_runtime.simulate: see the package."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import attention.flags
import policies.ledger.flags
from glm_runtime.plan.devices import GPUS
from glm_runtime.plan.flags import add_launch, launch
from glm_runtime.plan.setup import Setup
from glm_runtime.plan.shapes import PlanError
from glm_runtime.plan.size import size
from glm_runtime.simulate.arms import POLICIES, Arm, Machine, simulate
from glm_runtime.simulate.cost import PlannedCost
from glm_runtime.simulate.fit import LogError, fit, read_log
from glm_runtime.simulate.fleet import ROUTERS
from glm_runtime.simulate.plot import Point, pareto
from glm_runtime.simulate.replica import OVERLAPS, StepCost
from glm_runtime.simulate.shape import Plan
from glm_runtime.simulate.stock import StockConfig
from glm_runtime.simulate.sweep import front, parse
from glm_runtime.traces import TraceError, add_arguments, load
from policies.ledger.flags import LedgerFlags, default_budgets
from policies.steps import Step

AXES = "p50_ttft_ms,max_itl_ms"
WORDS = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
COLUMNS = (
    "p50_ttft_ms",
    "p99_ttft_ms",
    "p50_itl_ms",
    "p99_itl_ms",
    "max_itl_ms",
    "output_throughput",
    "cached_share",
    "preemptions",
    "kv_use_mean",
    "steps",
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m glm_runtime.simulate",
        description="What a policy would do on a recorded trace: waits, gaps between tokens, preemptions, KV use.",
    )
    add_arguments(made)
    add = made.add_argument
    add("--policy", default="vllm-ledger", metavar="P,P", help=f"one or more of {', '.join(POLICIES)}")
    add("--fit", metavar="STEPLOG", help="fit step times to this --step-log file instead of the planner's model")
    add("--max-total-tokens", type=int, metavar="TOKENS", help="KV pool of a replica; default: what fits the devices")
    add("--overlap", choices=OVERLAPS, help="when results come (default device; blocking on CPU and with --fit)")
    add("--replicas", type=int, default=1, metavar="N")
    add("--router", choices=ROUTERS, default="round-robin")
    add("--sweep", metavar="NAME=A..B", help="one setting over several values; .. doubles, a list is taken as it is")
    add("--svg", metavar="FILE", help="Pareto plot of the runs")
    add("--axes", default=AXES, metavar="X,Y", help=f"figures of the front and the plot, less is better ({AXES})")
    add("--json", action="store_true", help="JSON instead of a table")
    stock = made.add_argument_group("SGLang's scheduler (policy sglang), under its own names")
    stock.add_argument("--chunked-prefill-size", type=int, metavar="N", help="-1: prompts are not cut")
    stock.add_argument("--max-prefill-tokens", type=int, default=16384, metavar="N")
    stock.add_argument("--max-running-requests", type=int, metavar="N")
    stock.add_argument("--enable-mixed-chunk", action="store_true")
    stock.add_argument("--prefill-decode-interval", type=int, default=0, metavar="N")
    stock.add_argument("--prefill-decode-interval-min-bs", type=int, default=0, metavar="N")
    stock.add_argument("--schedule-conservativeness", type=float, default=1.0, metavar="F")
    stock.add_argument("--no-ignore-eos", action="store_true", help="requests may end early, as far as SGLang knows")
    add_launch(made, gpus_required=False)
    return made


def machine(values: argparse.Namespace) -> tuple[Machine, Setup, list[str]]:
    """What the flags describe, and what its times rest on. PlanError or ValueError for what cannot be."""
    if values.gpus is None and values.fit is None:
        raise PlanError("--gpus or --fit is needed: step times come from one of them")
    if values.gpus is None and values.max_total_tokens is None:
        raise PlanError("--max-total-tokens is needed where --gpus does not tell the memory")
    setup = launch(values, devices=None if values.gpus else (values.tp_size, GPUS["H200"]))
    cost: StepCost
    if values.fit is not None:
        fitted = fit(read_log(values.fit, setup.model["index_topk"]))
        cost = fitted
        told = [f"step times fitted to {fitted.steps} steps of {values.fit}, median error {fitted.error:.1%}"]
        told.append("seconds a unit: " + ", ".join(f"{name} {c:.3g}" for name, c in _terms(fitted)))
    else:
        cost = PlannedCost(setup)
        told = ["step times are a model, not measured", *("assumed: " + line for line in setup.device.assumptions())]
    pool = values.max_total_tokens if values.max_total_tokens is not None else size(setup).capacity
    if pool < 2 * 64:
        raise PlanError(f"the KV pool would hold {pool} tokens; more devices, or --max-total-tokens, are needed")
    blocking = values.fit is not None or setup.device.is_cpu
    made = Machine(
        cost=cost,
        pool_tokens=pool,
        positions=setup.position_limit,
        topk=setup.model["index_topk"],
        overlap=values.overlap or ("blocking" if blocking else "device"),
        replicas=values.replicas,
        router=values.router,
    )
    return made, setup, told


def _terms(fitted: Any) -> list[tuple[str, float]]:
    return list(fitted.json()["seconds"].items())


def arms(values: argparse.Namespace, setup: Setup) -> list[Arm]:
    """The policies with their settings. PlanError for an unknown one."""
    found: list[Arm] = []
    for name in values.policy.split(","):
        if name == "vllm-ledger":
            found.append(Arm(name, setup.ledger_flags))
        elif name == "sglang":
            found.append(Arm(name, stock_config(values, setup)))
        else:
            raise PlanError(f"--policy {name}: known here are {', '.join(POLICIES)}")
    return found


def stock_config(values: argparse.Namespace, setup: Setup) -> StockConfig:
    """SGLang's settings; its chunk size by device memory where it is not given."""
    chunk = values.chunked_prefill_size
    if chunk is None:
        gb = setup.device.memory_bytes / 1e9
        chunk = next((size for least, size in ((160, 16384), (60, 8192), (20, 4096)) if gb >= least), 2048)
    running = values.max_running_requests
    if running is None:
        gib = setup.device.memory_bytes / (1 << 30)
        running = default_budgets("server", "cuda", setup.sizes.tp, gib, setup.device.name)[1]
    return StockConfig(
        chunked_prefill_size=None if chunk == -1 else chunk,
        max_prefill_tokens=values.max_prefill_tokens,
        max_running_requests=running,
        enable_mixed_chunk=values.enable_mixed_chunk,
        prefill_decode_interval=values.prefill_decode_interval,
        prefill_decode_interval_min_bs=values.prefill_decode_interval_min_bs,
        schedule_conservativeness=values.schedule_conservativeness,
        ignore_eos=not values.no_ignore_eos,
    )


def swept(base: Sequence[Arm], sweep: str | None) -> list[tuple[Arm, str, str]]:
    """(arm, its series, its label) for every run. ValueError where no policy has the setting."""
    if sweep is None:
        return [(arm, arm.name, arm.name) for arm in base]
    name, values = parse(sweep)
    found: list[tuple[Arm, str, str]] = []
    for arm in base:
        if hasattr(arm.settings, name):
            found += [(arm.with_setting(name, value), arm.name, f"{value:,}") for value in values]
        else:
            found.append((arm, arm.name, arm.name))
    if len(found) == len(base) and not any(hasattr(arm.settings, name) for arm in base):
        raise ValueError(f"--sweep {name}: not a setting of {', '.join(arm.name for arm in base)}")
    return found


def axes_of(text: str, figures: dict[str, Any]) -> tuple[str, str]:
    """The two figures of --axes. PlanError where they are none."""
    names = text.split(",")
    if len(names) != 2 or any(name not in figures for name in names):
        raise PlanError(f"--axes {text}: two of {', '.join(figures)} are needed")
    return names[0], names[1]


def axis_title(name: str) -> str:
    """p50_ttft_ms -> TTFT p50, ms"""
    parts = name.split("_")
    if len(parts) >= 3 and parts[-1] == "ms":
        return f"{WORDS.get(parts[1], parts[1])} {parts[0]}, ms"
    return name.replace("_", " ")


def table(rows: Sequence[tuple[str, dict[str, Any]]], axes: tuple[str, str]) -> str:
    """One line a run; the front of the two figures of `axes` is marked with a star."""
    x, y = axes
    marks = front([(figures[x], figures[y]) for _, figures in rows])
    width = max(len(name) for name, _ in rows) + 2
    lines = [" " * width + " ".join(f"{name:>17}" for name in COLUMNS)]
    for (name, figures), good in zip(rows, marks, strict=True):
        cells = " ".join(f"{_cell(figures[column]):>17}" for column in COLUMNS)
        lines.append(f"{('* ' if good and len(rows) > 1 else '  ') + name:{width}}" + cells)
    if len(rows) > 1:
        lines.append(f"* not beaten in {x} and {y}")
    return "\n".join(lines)


def _cell(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if value >= 10 else f"{value:.3f}"


def recorder(path: str) -> tuple[Callable[[Plan, float, float], None], Callable[[], None]]:
    """(what each step is given to, what closes the file): step records as a server writes them."""
    out = open(path, "w", encoding="utf-8")  # noqa: SIM115

    def write(made: Plan, start: float, end: float) -> None:
        shape = made.shape
        step = Step(made.number, start, made.mode, shape.prefill_rows, shape.decode_rows, preempted=made.preempted)
        step.ms = (end - start) * 1e3
        step.rows = {str(index): count for index, count in made.rows.items()}
        out.write(json.dumps(asdict(step)) + "\n")

    return write, out.close


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate and print; 2 for what cannot be."""
    values = parser().parse_args(arguments)
    try:
        trace = load(values)
        made, setup, told = machine(values)
        chosen = swept(arms(values, setup), values.sweep)
        if values.step_log is not None and (len(chosen) > 1 or values.replicas > 1):
            raise PlanError(f"--step-log {values.step_log}: one policy, one replica and no sweep, please")
        found: list[dict[str, Any]] = []
        for arm, series, label in chosen:
            if isinstance(arm.settings, LedgerFlags):
                arm = Arm(arm.name, replace(arm.settings, step_log=None))
            write, close = recorder(values.step_log) if values.step_log else (None, lambda: None)
            started = time.perf_counter()
            try:
                figures = simulate(arm, made, trace, write)
            finally:
                close()
            figures["simulated_in_s"] = time.perf_counter() - started
            found.append({"name": arm.name, "series": series, "label": label, "figures": figures})
        x, y = axes = axes_of(values.axes, found[0]["figures"])
        if values.svg:
            points = [Point(run["figures"][x], run["figures"][y], run["series"], run["label"]) for run in found]
            if any(point.x <= 0 or point.y <= 0 for point in points):
                raise PlanError("--svg: a run without tokens has no place in the plot")
            title = f"{setup.model.name}: {Path(values.trace).name}"
            note = f"{len(trace):,} requests, {values.replicas} replica(s); simulated, " + told[0]
            Path(values.svg).write_text(pareto(points, title, axis_title(x), axis_title(y), note))
    except (PlanError, TraceError, LogError, attention.flags.FlagError, policies.ledger.flags.FlagError) as error:
        return _refuse(str(error))
    except (ValueError, RuntimeError, OSError) as error:
        return _refuse(" ".join(str(error).split()))
    if values.json:
        print(json.dumps({"pool_tokens": made.pool_tokens, "times": told, "runs": found}, indent=1))
        return 0
    print(f"{len(trace):,} requests; KV pool {made.pool_tokens:,} tokens a replica; overlap {made.overlap}")
    print("\n".join(told))
    print(table([(run["name"], run["figures"]) for run in found], axes))
    for run in found:
        figures = run["figures"]
        print(
            f"{run['name']}: {figures['completed']:,} completed, {figures['refused']} refused, {figures['failed']} "
            f"failed in {figures['duration_s']:,.1f} simulated seconds ({figures['simulated_in_s']:.1f} real ones)"
        )
    return 0


def _refuse(text: str) -> int:
    print(f"glm_runtime.simulate: error: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
