"""A trace for another machine: faster, shorter.

arrival / speed        lengths and blocks divided by d, rounded up (512-token blocks become 16-token blocks with d = 32)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from glm_runtime.traces.request import Request


def scale(requests: Iterable[Request], speed: float = 1.0, divide_lengths: int = 1) -> list[Request]:
    """The same trace, `speed` times as fast and with lengths divided by `divide_lengths`.

    Raises ValueError for a speed that is not above 0, a divisor below 1, or one that does not divide the block size.
    """
    if not 0 < speed < 1e12:
        raise ValueError(f"--speed {speed}: a number above 0 is needed")
    if divide_lengths < 1:
        raise ValueError(f"--divide-lengths {divide_lengths}: a whole number of at least 1 is needed")
    return [_scaled(request, speed, divide_lengths) for request in requests]


def _scaled(request: Request, speed: float, by: int) -> Request:
    if request.block_size % by:
        raise ValueError(f"--divide-lengths {by} does not divide the trace's blocks of {request.block_size} tokens")
    return replace(
        request,
        arrival_s=request.arrival_s / speed,
        prompt_tokens=-(-request.prompt_tokens // by),
        output_tokens=-(-request.output_tokens // by),
        block_size=request.block_size // by,
    )
