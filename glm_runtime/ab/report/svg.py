"""Parts of the drawings: scales, ticks, colours, elements. Pure.

Colours are CSS variables, so that one drawing is right on a light and on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# name -> (light, dark). `arm0`... are the arms, in order.
COLOURS = {
    "paper": ("#ffffff", "#14171c"),
    "panel": ("#f5f6f8", "#1c2027"),
    "ink": ("#1b1f24", "#e7eaee"),
    "soft": ("#5a6472", "#9aa5b3"),
    "line": ("#d5dae1", "#343b45"),
    "decode": ("#3f74ad", "#6aa2de"),
    "prefill": ("#e07b16", "#f0983f"),
    "stall": ("#c4273f", "#ff6178"),
    "good": ("#1d7f4f", "#4cc38a"),
    "kv": ("#8a93a0", "#76808d"),
    "mark": ("#fff3d6", "#3a3120"),
    "arm0": ("#5b4bb7", "#a79bf2"),
    "arm1": ("#0b8074", "#3fc4b4"),
    "arm2": ("#b0427f", "#ec86bd"),
    "arm3": ("#7a5c12", "#d8b04a"),
    "arm4": ("#3d4a5c", "#b3c0d1"),
    "arm5": ("#a33c1c", "#f29072"),
}
ARMS = 6
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def variables() -> str:
    """CSS that sets the colours by the reader's preference."""
    light = "".join(f"--{name}:{pair[0]};" for name, pair in COLOURS.items())
    dark = "".join(f"--{name}:{pair[1]};" for name, pair in COLOURS.items())
    return f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def drawing_rules() -> str:
    """CSS of everything that is drawn."""
    fills = "".join(f".{name}{{fill:var(--{name})}}" for name in ("decode", "prefill", "stall", "kv", "soft", "ink"))
    arms = "".join(f".arm{i}{{stroke:var(--arm{i})}}.fill{i}{{fill:var(--arm{i})}}" for i in range(ARMS))
    return (
        f"svg text{{font:12px {FONT};fill:var(--ink);font-variant-numeric:tabular-nums}}"
        "svg text.s{fill:var(--soft);font-size:11px}svg text.b{font-weight:600;font-size:13px}"
        ".grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}"
        ".curve{fill:none;stroke-width:2}.kvline{fill:none;stroke:var(--kv);stroke-width:1.5}" + fills + arms
    )


def text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(said)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A filled rectangle; `title` shows when pointed at."""
    inner = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" class="{kind}"{inner}'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def path(points: Sequence[tuple[float, float]], kind: str, dash: str = "") -> str:
    """A line through points."""
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{steps}" class="{kind}"{dashed}/>'


def picture(width: float, height: float, parts: Sequence[str], label: str, alone: bool = False) -> str:
    """The whole drawing. `alone`: with its own colours and paper, as a file by itself."""
    size = f'width="{width:.0f}" height="{height:.0f}"'
    style = f"<style>{variables()}{drawing_rules()}</style>" if alone else ""
    paper = f'<rect {size} fill="var(--paper)"/>' if alone else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {size if alone else ""} '
        f'role="img" aria-label="{escape(label)}">\n{style}{paper}\n' + "\n".join(parts) + "\n</svg>\n"
    )


@dataclass(frozen=True)
class Scale:
    """Values to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def ticks(high: float, about: int = 8) -> list[float]:
    """Round values from 0 to `high`, about that many."""
    if high <= 0:
        return [0.0]
    raw = high / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    return [i * step for i in range(int(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 of each power of ten within bounds; powers alone where that is too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 5 else (1,)
    found = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in found if low * 0.999 <= value <= high * 1.001]


def short(value: float) -> str:
    """A number in little room."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 10000:
        return f"{value / 1000:g}k"
    return f"{value:,.10g}"
