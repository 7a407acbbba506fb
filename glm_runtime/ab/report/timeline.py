"""What the steps of each arm were, on one time axis. Pure.

    arrivals   v          v
    arm A      ||||||||||||########################||||||||     bar: a step; wide as it took, high as its rows (log)
    waiting                ========================             decoding requests that got no row in that step
    KV         ___________/                        \\_____      share of the pool in use

Blue rows decode, orange rows are prompts; a step with both has both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

from glm_runtime.ab.report import svg

WIDTH, LEFT, RIGHT = 1040.0, 52.0, 12.0
HEAD, BARS, STRIP, KV, GAP, FOOT = 30.0, 72.0, 7.0, 26.0, 20.0, 62.0
LEAST_PX = 0.7  # narrower steps are drawn together


@dataclass(frozen=True)
class Lane:
    """One arm.

    Attributes:
        name, note: heading, and what is written behind it.
        steps: its step record. start: of the run, on the steps' clock.
        pool: KV tokens of its server; 0 leaves the KV line out.
    """

    name: str
    note: str
    steps: Sequence[Mapping[str, Any]]
    start: float
    pool: int = 0


@dataclass
class Bar:
    """Steps drawn as one. Times in seconds after the start."""

    at: float
    seconds: float
    prefill: int
    decode: int
    waiting: int
    first: int
    steps: int = 1

    def joins(self, other: Bar, least: float) -> bool:
        """Whether both are too narrow to be seen apart, and of the same kind."""
        alike = bool(self.prefill) == bool(other.prefill) and bool(self.waiting) == bool(other.waiting)
        return alike and other.at + other.seconds - self.at < least

    @property
    def title(self) -> str:
        """What pointing at it shows."""
        which = f"step {self.first}" if self.steps == 1 else f"{self.steps} steps from {self.first}"
        waits = f", {self.waiting} decoding requests wait" if self.waiting else ""
        rows = f"{self.prefill} prompt + {self.decode} decode rows"
        return f"{which}: {rows}, {self.seconds * 1e3:.1f} ms at {self.at:.3f} s{waits}"


def bars(lane: Lane, least: float) -> list[Bar]:
    """The lane's steps; those that together take less than `least` seconds become one."""
    found: list[Bar] = []
    for step in lane.steps:
        bar = Bar(
            step["at"] - lane.start,
            (step["ms"] or 0.0) / 1e3,
            step["prefill_tokens"],
            step["decode_rows"],
            step["left_out"],
            step["number"],
        )
        if found and found[-1].joins(bar, least):
            last = found[-1]
            last.seconds = bar.at + bar.seconds - last.at
            last.prefill, last.decode = max(last.prefill, bar.prefill), max(last.decode, bar.decode)
            last.waiting = max(last.waiting, bar.waiting)
            last.steps += 1
        else:
            found.append(bar)
    return found


def kv_line(lane: Lane, least: float) -> list[tuple[float, float]]:
    """(seconds, share of the pool in use), at most one value each `least` seconds: the largest."""
    found: list[tuple[float, float]] = []
    for step in lane.steps:
        if not step.get("rows") or not lane.pool:
            continue
        at, share = step["at"] - lane.start, (lane.pool - step["free_tokens"]) / lane.pool
        if found and at - found[-1][0] < least:
            found[-1] = (found[-1][0], max(found[-1][1], share))
        else:
            found.append((at, share))
    return found


def draw(lanes: Sequence[Lane], arrivals: Sequence[float], title: str = "", alone: bool = False) -> str:
    """The lanes under each other as an SVG.

    Args:
        arrivals: seconds after the start.
        title: first line, "" for none.
        alone: as a file by itself.
    """
    span = max([*(_end(lane) for lane in lanes), *arrivals, 0.001])
    most = max((step["prefill_tokens"] + step["decode_rows"] for lane in lanes for step in lane.steps), default=1)
    x = svg.Scale(0.0, span, LEFT, WIDTH - RIGHT)
    top = 30.0 if title else 8.0
    kv = KV if any(lane.pool for lane in lanes) else 0.0
    each = HEAD + BARS + STRIP + kv + GAP
    height = top + each * len(lanes) + FOOT
    out = [svg.text(10, 20, title, "b")] if title else []
    bottom = top + each * len(lanes) - GAP + 4
    for value in svg.ticks(span, 10):
        for place in range(len(lanes)):
            base = top + place * each + HEAD + BARS + STRIP + kv
            out.append(svg.line(x(value), base - kv - STRIP - BARS, x(value), base, "grid"))
        out.append(svg.text(x(value), bottom + 15, f"{value:g}", "s", "middle"))
    out.append(svg.text(WIDTH - RIGHT, bottom + 31, "seconds after the first request", "s", "end"))
    for place, lane in enumerate(lanes):
        out += _lane(lane, top + place * each, x, most, kv, arrivals, pointed=not alone)
    out += _legend(height - 10, bool(kv))
    return svg.picture(WIDTH, height, out, title or "steps of the arms on one time axis", alone)


def _end(lane: Lane) -> float:
    if not lane.steps:
        return 0.0
    last = lane.steps[-1]
    return float(last["at"] - lane.start + (last["ms"] or 0.0) / 1e3)


def _lane(
    lane: Lane, top: float, x: svg.Scale, most: int, kv: float, arrivals: Sequence[float], pointed: bool
) -> list[str]:
    """One arm's part; `pointed`: bars tell what they are when pointed at, which a picture in a page cannot."""
    base = top + HEAD + BARS
    least = LEAST_PX * x.high / (x.end - x.start)

    def tall(rows: int) -> float:
        return BARS * log2(1 + rows) / log2(1 + most)

    out = [svg.text(LEFT, top + 13, lane.name, "b"), svg.text(WIDTH - RIGHT, top + 13, lane.note, "s", "end")]
    for rows in [value for value in (1, 10, 100, 1000, 10000, 100000) if value <= most]:
        y = base - tall(rows)
        out.append(svg.line(LEFT, y, WIDTH - RIGHT, y, "grid"))
        out.append(svg.text(LEFT - 6, y + 4, svg.short(rows), "s", "end"))
    drawn = -10.0
    for at in sorted(arrivals):
        if x(at) - drawn < 1.5:
            continue
        drawn = x(at)
        out.append(f'<path d="M{drawn - 3.5:.1f} {top + HEAD - 8:.1f}h7l-3.5 6z" class="soft"/>')
    for bar in bars(lane, least):
        left, wide = x(bar.at), max(0.5, x(bar.at + bar.seconds) - x(bar.at) - 0.25)
        low, title = tall(bar.decode), bar.title if pointed else ""
        if bar.prefill:
            high = tall(bar.prefill + bar.decode)
            out.append(svg.rect(left, base - high, wide, high - low, "prefill", title))
        if bar.decode:
            out.append(svg.rect(left, base - low, wide, low, "decode", title))
        if bar.waiting:
            out.append(svg.rect(left, base + 1.5, wide + 0.25, STRIP - 2, "stall", title))
    out.append(svg.line(LEFT, base, WIDTH - RIGHT, base, "axis"))
    if kv and lane.pool:
        y_of = svg.Scale(0.0, 1.0, base + STRIP + kv, base + STRIP + 3)
        out.append(svg.text(LEFT - 6, y_of(0.5) + 4, "KV", "s", "end"))
        out.append(svg.line(LEFT, y_of(0.0), WIDTH - RIGHT, y_of(0.0), "grid"))
        shares = kv_line(lane, least * 2)
        if shares:
            out.append(svg.path([(x(at), y_of(share)) for at, share in shares], "kvline"))
    return out


def _legend(y: float, kv: bool) -> list[str]:
    out, left = [], LEFT
    for kind, said in (
        ("prefill", "prompt rows"),
        ("decode", "decode rows"),
        ("stall", "decoding requests wait"),
        ("soft", "arrival"),
    ):
        if kind == "soft":
            out.append(f'<path d="M{left + 2:.1f} {y - 8:.1f}h7l-3.5 6z" class="soft"/>')
        else:
            out.append(svg.rect(left, y - 10, 11, 11, kind))
        out.append(svg.text(left + 17, y, said, "s"))
        left += 34 + 5.6 * len(said)
    said = "height: rows of a step, log scale" + ("; grey line: share of the KV pool in use" if kv else "")
    return [*out, svg.text(WIDTH - RIGHT, y, said, "s", "end")]
