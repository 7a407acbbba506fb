"""One shared server at a time in a test process, whoever keeps it.

    take(end) ─> whoever held the machine before ends what it keeps;  end() will be called when another one takes it

Stages, halls and keepers live as long as the test run, so that no test starts again what an earlier one left running.
"""

from __future__ import annotations

from collections.abc import Callable

_holder: Callable[[], None] | None = None


def take(end: Callable[[], None]) -> None:
    """Make `end` the way to stop what is about to start; a bound method counts as its object's."""
    global _holder
    if _holder is not None and _holder != end:
        _holder()
    _holder = end
