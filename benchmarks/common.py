"""What every benchmark shares: command line, timing, this machine's floor, asks, the JSON file.

    options = parser("what is measured").parse_args()
    report = Report("attention", options)
    times = interleave({"ours": ours, "theirs": theirs}, rounds=20)
    report.figure("ratio", ratio(times, "theirs", "ours"))
    report.ask(Ask("attention speed-up", report.figures["ratio"], 5.0, ">=", "x"))
    return report.finish()

Times of different arms are only comparable when taken in turn in one process (``interleave``): the machine drifts.
torch is imported only by what needs it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from glm_runtime.ab.host import cpu_model

QUICK_LIMIT_S = 50.0

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": lambda figure, bound: figure <= bound,
    ">=": lambda figure, bound: figure >= bound,
    "<": lambda figure, bound: figure < bound,
    ">": lambda figure, bound: figure > bound,
    "==": lambda figure, bound: figure == bound,
}


def parser(description: str) -> argparse.ArgumentParser:
    """Command line of a benchmark: --json, --quick, --threads; add further flags to the result."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures and asks there")
    made.add_argument("--quick", action="store_true", help=f"smaller sizes, under {QUICK_LIMIT_S:.0f} s")
    made.add_argument("--threads", type=int, default=1, help="threads of one process (default 1)")
    return made


@dataclass(frozen=True)
class Ask:
    """A figure held against a bound. ``op`` is one of OPERATORS; ``unit`` is printed behind both numbers."""

    name: str
    figure: float
    bound: float
    op: str
    unit: str = ""

    def __post_init__(self) -> None:
        if self.op not in OPERATORS:
            raise ValueError(f"ask {self.name!r}: op {self.op!r} is none of {', '.join(OPERATORS)}")

    @property
    def met(self) -> bool:
        """A figure that is not finite meets nothing."""
        return math.isfinite(self.figure) and OPERATORS[self.op](self.figure, self.bound)

    def line(self) -> str:
        """``ASK <name>: <figure> (asked <bound>) met|missed``."""
        verdict = "met" if self.met else "missed"
        asked = f"{self.op} {number(self.bound)}{self.unit}"
        return f"ASK {self.name}: {number(self.figure)}{self.unit} (asked {asked}) {verdict}"


def number(value: float) -> str:
    """Four significant digits, thousands separated, no exponent for ordinary sizes."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-4 <= abs(value) < 1e9:
        digits = 0 if abs(value) >= 1000 else 3 - math.floor(math.log10(abs(value))) if value else 0
        text = f"{value:,.{max(digits, 0)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.3e}"


# ---- timing ------------------------------------------------------------------------------------------------------


def interleave(
    arms: Mapping[str, Callable[[], object]], rounds: int = 9, warmup: int = 1, limit_s: float = math.inf
) -> dict[str, list[float]]:
    """Seconds per call of every arm, taken in turn: A B C, C B A, A B C, ...

    Args:
        arms: name -> what to run.
        rounds: measured calls per arm.
        warmup: calls per arm before, not counted.
        limit_s: after this many seconds no further round begins (one is always measured).

    Returns:
        name -> one time per round; entry i of all arms belongs to the same round.
    """
    for _ in range(warmup):
        for call in arms.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    begin = time.perf_counter()
    for round_index in range(rounds):
        for name in names if round_index % 2 == 0 else reversed(names):
            start = time.perf_counter()
            arms[name]()
            times[name].append(time.perf_counter() - start)
        if time.perf_counter() - begin > limit_s:
            break
    return times


def measure(call: Callable[[], object], rounds: int = 9, warmup: int = 1, limit_s: float = math.inf) -> list[float]:
    """Seconds per call of one arm; see ``interleave``."""
    return interleave({"": call}, rounds, warmup, limit_s)[""]


def median(values: Sequence[float]) -> float:
    """Median; nan of nothing."""
    return statistics.median(values) if values else math.nan


def quantile(values: Sequence[float], q: float) -> float:
    """Linearly interpolated quantile, ``q`` in [0, 1]; nan of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ratio(times: Mapping[str, Sequence[float]], over: str, under: str) -> float:
    """Ratio of the medians of two arms: how many times longer ``over`` takes than ``under``."""
    return median(times[over]) / median(times[under])


# ---- the machine -------------------------------------------------------------------------------------------------


def version_of(distribution: str) -> str | None:
    """Installed version, None where it is absent."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def machine(threads: int) -> dict[str, Any]:
    """Facts that a figure is worth nothing without."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_model(),
        "cores": cores,
        "threads": threads,
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "sglang": version_of("sglang"),
        "transformers": version_of("transformers"),
    }


@dataclass(frozen=True)
class Floor:
    """What this machine reaches, best of several runs.

    Attributes:
        threads: torch threads it was measured with.
        copy_gb_s: copying a buffer beyond the caches, bytes read and written over time, 1e9 B/s.
        gemm_f32_gflop_s, gemm_bf16_gflop_s: the better of ``torch.mm`` and oneDNN's linear, 1e9 FLOP/s.
    """

    threads: int
    copy_gb_s: float
    gemm_f32_gflop_s: float
    gemm_bf16_gflop_s: float

    def seconds(self, flop: float = 0.0, moved_bytes: float = 0.0, bf16: bool = False) -> float:
        """Least time for that work: the longer of arithmetic and traffic."""
        gemm = self.gemm_bf16_gflop_s if bf16 else self.gemm_f32_gflop_s
        return max(flop / (gemm * 1e9), moved_bytes / (self.copy_gb_s * 1e9))


def measure_floor(threads: int = 1, side: int = 1024, copy_mb: int = 256, rounds: int = 7) -> Floor:
    """Measures ``Floor`` in this process, about 2 s; torch's thread count is put back afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return Floor(
            threads=threads,
            copy_gb_s=copy_gb_s(copy_mb, rounds),
            gemm_f32_gflop_s=gemm_gflop_s(torch.float32, side, rounds),
            gemm_bf16_gflop_s=gemm_gflop_s(torch.bfloat16, side, rounds),
        )
    finally:
        torch.set_num_threads(before)


def copy_gb_s(size_mb: int = 256, rounds: int = 7) -> float:
    """Best rate of copying ``size_mb`` MiB, bytes read and bytes written counted, 1e9 B/s."""
    import torch

    source = torch.ones(size_mb * 1024 * 1024 // 4, dtype=torch.float32)
    target = torch.empty_like(source)
    best = min(measure(lambda: target.copy_(source), rounds))
    return 2 * source.numel() * source.element_size() / best / 1e9


def gemm_gflop_s(dtype: Any, side: int = 1024, rounds: int = 7) -> float:
    """Best rate of a square product in ``dtype`` over ``torch.mm`` and oneDNN's linear, 1e9 FLOP/s."""
    import torch

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(side, side, generator=generator).to(dtype)
    weight = torch.randn(side, side, generator=generator).to(dtype)
    arms: dict[str, Callable[[], object]] = {"mm": lambda: torch.mm(rows, weight.t())}
    if torch.backends.mkldnn.is_available():
        linear = torch.ops.mkldnn._linear_pointwise
        arms["onednn"] = lambda: linear(rows, weight, None, "none", [], "")
    with torch.inference_mode():
        times = interleave(arms, rounds)
    return 2 * side**3 / min(min(series) for series in times.values()) / 1e9


# ---- the report --------------------------------------------------------------------------------------------------


class Report:
    """Collects figures and asks; ``finish`` writes the JSON file and prints the ASK lines last."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        if options.threads < 1:
            raise SystemExit(f"--threads {options.threads}: at least 1 is needed")
        self.name = name
        self.options = options
        self.figures: dict[str, Any] = {}
        self.asks: list[Ask] = []
        self.machine = machine(options.threads)
        self.begin = time.perf_counter()

    def figure(self, name: str, value: Any) -> None:
        """Keeps one figure (any JSON value; dataclasses too). A name given twice is an error."""
        if name in self.figures:
            raise ValueError(f"figure {name!r} is given twice")
        self.figures[name] = asdict(value) if hasattr(value, "__dataclass_fields__") else value

    def ask(self, ask: Ask) -> None:
        """Keeps one ask."""
        self.asks.append(ask)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as written to --json."""
        return {
            "benchmark": self.name,
            "quick": self.options.quick,
            "wall_s": time.perf_counter() - self.begin,
            "machine": self.machine,
            "figures": self.figures,
            "asks": [{**asdict(ask), "met": ask.met} for ask in self.asks],
        }

    def finish(self) -> int:
        """Writes --json where given, prints one line per ask. Returns 0: a missed ask is a figure, not an error."""
        if self.options.json is not None:
            path: Path = self.options.json
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(finite(self.as_dict()), indent=1) + "\n")
        sys.stdout.flush()
        for ask in self.asks:
            print(ask.line())
        sys.stdout.flush()
        return 0


def finite(value: Any) -> Any:
    """``value`` with every float that JSON has no word for (nan, inf) turned into None."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
