"""The comparison on a terminal: settings that differ first, then answers, then figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from glm_runtime.ab.compare import Divergence
from glm_runtime.ab.outcome import Outcome
from glm_runtime.ab.settings import differences, shown
from glm_runtime.ab.stats import Ratio

# Name in figures -> (heading, unit, whether less is better; None: neither).
ROWS: dict[str, tuple[str, str, bool | None]] = {
    "median_ttft_ms": ("TTFT median", "ms", True),
    "mean_ttft_ms": ("TTFT mean", "ms", True),
    "p99_ttft_ms": ("TTFT p99", "ms", True),
    "median_itl_ms": ("ITL p50", "ms", True),
    "p99_itl_ms": ("ITL p99", "ms", True),
    "max_itl_ms": ("ITL max", "ms", True),
    "mean_tpot_ms": ("TPOT mean", "ms", True),
    "output_throughput": ("output throughput", "tokens/s", False),
    "total_token_throughput": ("all tokens", "tokens/s", False),
    "request_goodput": ("goodput", "requests/s", False),
    "slo_attainment": ("requests within the limits", "%", False),
    "duration": ("duration of all rounds", "s", True),
    "steps": ("steps", "", None),
    "mean_step_ms": ("step mean", "ms", None),
    "max_step_tokens": ("rows of a step, most", "", None),
    "stall_seconds": ("time in steps that leave decodes out", "s", True),
    "peak_kv_usage": ("KV pool in use, peak", "%", None),
    "preemptions": ("preemptions", "", True),
    "recomputed_tokens": ("tokens computed again", "", True),
    "cached_tokens": ("prompt tokens from the prefix cache", "", None),
    "failed": ("requests without an answer", "", True),
}
# The lines of the terminal; the page shows all.
SHORT = (
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "max_itl_ms",
    "mean_tpot_ms",
    "output_throughput",
    "request_goodput",
    "slo_attainment",
    "stall_seconds",
    "preemptions",
    "failed",
)


def number(value: object, unit: str = "") -> str:
    """Three significant digits and no fewer than the whole part; percent from a share; "-" where there is none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if not isinstance(value, int | float):
        return str(value)
    if unit == "%":
        return f"{value * 100:.3g}%"
    if isinstance(value, int):
        return f"{value:,}"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(digits, 3)}f}"


def ratio(one: Ratio | None) -> str:
    """`0.42x [0.31, 0.55]`, "" where there is none."""
    if one is None or not math.isfinite(one.value):
        return ""
    bounds = f" [{one.low:.2f}, {one.high:.2f}]" if math.isfinite(one.low) else ""
    return f"{one.value:.2f}x{bounds}"


def columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Cells under each other: the first column to the left, the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def answers(found: Outcome) -> list[str]:
    """Whether the arms answer the same."""
    lines = []
    if found.repeated:
        noise = found.noise
        lines.append(
            f"  noise of equal arms: logprobs differ by up to {noise.logprob:.2g} over {noise.tokens:,} tokens, "
            f"{noise.divergences} of {noise.pairs} answers diverge"
        )
    else:
        lines.append("  noise of equal arms: not measured (one round each; --rounds 2 or an arm twice measures it)")
    for one in found.equalities:
        verdict = f"{one.equal} of {one.asked} answers equal"
        if one.divergences:
            verdict += f", {one.explained} differ within noise, {one.real} differ for real"
        lines.append(f"  {one.b} against {one.a}: {verdict}")
        for gone in one.divergences[:5]:
            lines.append(f"    request {gone.request}: {difference(gone)}")
        if len(one.divergences) > 5:
            lines.append(f"    ... and {len(one.divergences) - 5} more, in the page and in figures.json")
    return lines


def difference(gone: Divergence) -> str:
    """A divergence in words."""
    if gone.error:
        return f"no answer: {gone.error}"

    def side(token: int | None, gap: float | None, least: bool) -> str:
        at_least = "at least " if least else ""
        own = "end" if token is None else f"token {token}"
        return own if gap is None else f"{own} (ahead by {at_least}{gap:.3g})"

    left, right = side(gone.a, gone.gap_a, gone.least_a), side(gone.b, gone.gap_b, gone.least_b)
    verdict = "within noise" if gone.explained else "real"
    return f"at output token {gone.position}: {left} / {right}, {verdict}"


def text(found: Outcome) -> str:
    """The whole table."""
    load = found.workload
    rounds = {name: len(runs) for name, runs in found.runs.items()}
    lines = [
        f"workload {load.name}: {len(load.asks)} requests, {load.prompt_tokens:,} prompt tokens, "
        f"{max(rounds.values())} round(s)"
    ]
    differing = differences(found.settings)
    lines += ["", "settings that differ" if differing else "settings: all alike"]
    if differing:
        first = [one for one in differing if one.group in ("policy", "effective")]
        lines += columns([["", *found.arms]] + [[one.name, *map(shown, one.values)] for one in first])
        if len(first) < len(differing):
            lines.append(f"  and {len(differing) - len(first)} more by the arms' own names, in the page")
    lines += ["", "answers", *answers(found)]
    lines += ["", "figures (x: over the first arm, with a 95% interval; throughput: least and most of the rounds)"]
    lines += columns(table(found, SHORT))
    kinds = kind_rows(found)
    if kinds:
        lines += ["", "by kind of request, ms", *columns(kinds)]
    return "\n".join(lines)


def table(found: Outcome, names: Sequence[str]) -> list[list[str]]:
    """Heading and one row a figure: arms, and ratios of the later ones."""
    rows = [["", found.arms[0]] + [cell for arm in found.arms[1:] for cell in (arm, "")]]
    for name in names:
        if not any(name in own for own in found.figures.values()):
            continue
        title, unit, _ = ROWS[name]
        row = [f"{title}, {unit}" if unit and unit != "%" else title]
        for place, arm in enumerate(found.arms):
            row.append(number(found.figures[arm].get(name), unit))
            if place:
                row.append(ratio(found.ratios[arm].get(name)))
        rows.append(row)
    return rows


KIND_ROWS = (
    ("median_ttft_ms", "TTFT median"),
    ("max_ttft_ms", "TTFT max"),
    ("median_itl_ms", "ITL p50"),
    ("p99_itl_ms", "ITL p99"),
    ("max_itl_ms", "ITL max"),
)


def kind_rows(found: Outcome) -> list[list[str]]:
    """Heading and one row a kind and figure; empty where the workload has no kinds."""
    kinds = found.kinds[found.arms[0]]
    if not kinds:
        return []
    rows = [["", *found.arms]]
    for kind, own in kinds.items():
        for name, title in KIND_ROWS:
            if math.isfinite(own[name]):
                rows.append([f"{kind}: {title}", *(number(found.kinds[arm][kind][name]) for arm in found.arms)])
    return rows
