"""HTTP endpoints beside SGLang's own.

GET /policy -> {"policy", "version", "slots", "knobs", ...}   as the scheduler process reports it now
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Add our routes to SGLang's FastAPI app."""
    from sglang.srt.entrypoints.http_server import app

    if not any(getattr(route, "path", None) == "/policy" for route in app.routes):
        app.add_api_route("/policy", policy, methods=["GET"])


async def policy() -> Any:
    """Policy, slots, version and effective knobs, asked of the scheduler; one entry a data-parallel rank if several."""
    from sglang.srt.entrypoints.http_server import get_global_state

    states = await get_global_state().tokenizer_manager.get_internal_state()
    reports = [state["glm_runtime"] for state in states]
    return reports[0] if len(reports) == 1 else {"ranks": reports}
