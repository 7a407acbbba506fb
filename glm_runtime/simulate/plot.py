"""The Pareto plot: one self-contained SVG, axes logarithmic, text in the reader's light or dark.

ITL p99
  |  o
  |     *---*           * on the front, joined; o beaten
  |           `---*
  +---------------------- TTFT p50
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from glm_runtime.simulate.sweep import front

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 86, 210, 56, 64
COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#475569")
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2937 } .title { font-size: 16px; font-weight: 600 }
.axis { stroke: #6b7280; stroke-width: 1 } .grid { stroke: #e5e7eb; stroke-width: 1 } .note { fill: #6b7280 }
.paper { fill: #ffffff } .small { font-size: 11.5px }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb } .grid { stroke: #374151 } .note { fill: #9ca3af } .paper { fill: #111827 }
}
"""


@dataclass(frozen=True)
class Point:
    """One run: the figures of both axes, the series that it belongs to, and what stands beside it."""

    x: float
    y: float
    series: str
    label: str


def ticks(low: float, high: float) -> list[float]:
    """Round values from at most `low` to at least `high`: 1, 2 and 5 of each power of ten."""
    found: list[float] = []
    power = math.floor(math.log10(low))
    while not found or found[-1] < high:
        found += [digit * 10.0**power for digit in (1, 2, 5)]
        power += 1
    first = max((i for i, tick in enumerate(found) if tick <= low), default=0)
    last = next(i for i, tick in enumerate(found) if tick >= high)
    return found[first : last + 1]


def number(value: float) -> str:
    """Short: 0.25, 40, 1,500."""
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def pareto(points: Sequence[Point], title: str, x_name: str, y_name: str, note: str = "") -> str:
    """The SVG's text. Points must be above 0; ValueError for none."""
    if not points:
        raise ValueError("nothing to plot")
    xs = ticks(min(p.x for p in points), max(p.x for p in points))
    ys = ticks(min(p.y for p in points), max(p.y for p in points))
    on = front([(p.x, p.y) for p in points])

    def x_at(value: float) -> float:
        return _place(value, xs, LEFT, WIDTH - RIGHT)

    def y_at(value: float) -> float:
        return _place(value, ys, HEIGHT - BOTTOM, TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text>',
        f'<text class="note small" x="{LEFT}" y="46">{escape(note)}</text>',
    ]
    for tick in xs:
        x = x_at(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{number(tick)}</text>')
    for tick in ys:
        y = y_at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts.append(f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 18}" text-anchor="middle">{escape(x_name)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text transform="translate(22 {middle}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>')
    best = sorted((x_at(p.x), y_at(p.y)) for p, good in zip(points, on, strict=True) if good)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in best)
    parts.append(f'<polyline points="{path}" fill="none" stroke="#9ca3af" stroke-dasharray="4 4"/>')
    names = list(dict.fromkeys(p.series for p in points))
    for p, good in zip(points, on, strict=True):
        colour = COLOURS[names.index(p.series) % len(COLOURS)]
        x, y = x_at(p.x), y_at(p.y)
        fill = colour if good else "none"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="{colour}" stroke-width="1.8">'
            f"<title>{escape(f'{p.series} {p.label}: {number(p.x)}, {number(p.y)}')}</title></circle>"
        )
        parts.append(f'<text class="small" x="{x + 8:.1f}" y="{y - 7:.1f}">{escape(p.label)}</text>')
    for i, name in enumerate(names):
        y = TOP + 10 + 22 * i
        parts.append(f'<circle cx="{right + 24}" cy="{y}" r="5" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(f'<text x="{right + 36}" y="{y + 4}">{escape(name)}</text>')
    y = TOP + 10 + 22 * len(names) + 8
    parts.append(f'<text class="note small" x="{right + 18}" y="{y}">filled: on the front</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _place(value: float, axis: Sequence[float], start: float, stop: float) -> float:
    low, high = math.log(axis[0]), math.log(axis[-1])
    share = (math.log(value) - low) / (high - low) if high > low else 0.5
    return start + share * (stop - start)
