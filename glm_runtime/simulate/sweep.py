"""One setting over several values, and which of the results are not beaten.

    --sweep max_num_batched_tokens=512..16384     doubling from the first to the last
    --sweep chunked_prefill_size=1024,2048,6000   these values

A point is on the front where no other one is at least as good in both figures and better in one (smaller is better).
"""

from __future__ import annotations

from collections.abc import Sequence


def parse(text: str) -> tuple[str, list[int]]:
    """(setting, values). ValueError naming what is wrong."""
    name, equals, given = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    try:
        if not equals or not name:
            raise ValueError
        if ".." in given:
            first, _, last = given.partition("..")
            low, high = int(first), int(last)
            if not 0 < low <= high:
                raise ValueError
            values = [low]
            while values[-1] * 2 <= high:
                values.append(values[-1] * 2)
            if values[-1] != high:
                values.append(high)
        else:
            values = [int(part) for part in given.split(",")]
    except ValueError:
        raise ValueError(f"--sweep {text}: NAME=FIRST..LAST (doubling) or NAME=N,N,... is needed") from None
    return name, values


def front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each point whether it is on the Pareto front."""

    def beaten(x: float, y: float) -> bool:
        return any(a <= x and b <= y and (a < x or b < y) for a, b in points)

    return [not beaten(x, y) for x, y in points]
