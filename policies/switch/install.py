"""Installs the switchable scheduler; importing it imports nothing of SGLang."""

from __future__ import annotations

from typing import Any


def install(request: Any) -> None:
    """Put the scheduler with both ways in SGLang's place; run by the plugin in every process of a launch."""
    from policies.switch.scheduler import install as put

    put(request)
