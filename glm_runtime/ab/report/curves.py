"""Share of values that are at most so large, one curve an arm, time on a logarithmic axis. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from glm_runtime.ab.report import svg

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 510.0, 250.0, 44.0, 34.0, 40.0, 14.0
DASHES = ("", "7 3", "2 3", "10 3 2 3", "4 2", "1 2")
MOST = 400  # points of a curve


def points(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of values at most so large), thinned; the tail stays complete."""
    ordered = sorted(value for value in values if value > 0)
    count = len(ordered)
    step = max(1, count // MOST)
    places = {*range(0, count, step), *range(max(0, count - MOST // 4), count)}
    return [(ordered[place], (place + 1) / count) for place in sorted(places)]


def draw(title: str, arms: Mapping[str, Sequence[float]], limit: float | None = None) -> str:
    """Curves of the arms as an SVG, "" where there is nothing to draw.

    Args:
        arms: name -> values in ms.
        limit: a bound to mark, in ms.
    """
    everything = [value for values in arms.values() for value in values if value > 0]
    if not everything:
        return ""
    low, high = min(everything) * 0.9, max(everything) * 1.1
    x = svg.Scale(low, high, LEFT, WIDTH - RIGHT, log=True)
    y = svg.Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    out = [svg.text(LEFT, 18, title, "b")]
    for share in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
        out.append(svg.line(LEFT, y(share), WIDTH - RIGHT, y(share), "grid"))
        out.append(svg.text(LEFT - 6, y(share) + 4, f"{share:.0%}", "s", "end"))
    room = -40.0
    for value in svg.log_ticks(low, high):
        out.append(svg.line(x(value), TOP, x(value), HEIGHT - BOTTOM, "grid"))
        if x(value) - room > 34:
            out.append(svg.text(x(value), HEIGHT - BOTTOM + 15, svg.short(value), "s", "middle"))
            room = x(value)
    out.append(svg.text(WIDTH - RIGHT, HEIGHT - BOTTOM + 30, "ms, log scale", "s", "end"))
    if limit is not None and low <= limit <= high:
        out.append(f'<g stroke-dasharray="3 3">{svg.line(x(limit), TOP, x(limit), HEIGHT - BOTTOM, "axis")}</g>')
        out.append(svg.text(x(limit) + 4, HEIGHT - BOTTOM - 6, f"limit {svg.short(limit)}", "s"))
    for place, values in enumerate(arms.values()):
        curve = points(values)
        if not curve:
            continue
        stairs, before = [], 0.0
        for value, share in curve:
            stairs += [(x(value), y(before)), (x(value), y(share))]
            before = share
        out.append(svg.path(stairs, f"curve arm{place % svg.ARMS}", DASHES[place % len(DASHES)]))
    return svg.picture(WIDTH, HEIGHT, out, title)


def swatch(place: int) -> str:
    """The line of the arm at `place`, for a legend."""
    dash = DASHES[place % len(DASHES)]
    stroke = svg.path([(0, 6), (26, 6)], f"curve arm{place % svg.ARMS}", dash)
    return f'<svg class="swatch" width="26" height="12" viewBox="0 0 26 12" aria-hidden="true">{stroke}</svg>'
