"""The `ledger` scheduler slot's target; importing it imports nothing of SGLang."""

from __future__ import annotations

from typing import Any


def install(request: Any) -> None:
    """Put the ledger's scheduler in SGLang's place; run by the plugin in every process of a launch."""
    from policies.ledger.scheduler import install as put

    put(request)
