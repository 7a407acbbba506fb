"""HTTP endpoints beside SGLang's own.

GET /policy          {"policy", "version", "slots", "knobs", ...}     as the scheduler process reports it now
GET /steps?last=N    {"steps": [...]}, oldest first, N <= 128        what its last steps did (policies/steps.py)
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Add our routes to SGLang's FastAPI app, and the guard's layer around it."""
    from sglang.srt.entrypoints.http_server import app

    from glm_runtime.guard.front import Front
    from glm_runtime.health import Health

    for layer in (Health, Front):  # the guard's outside
        if not any(known.cls is layer for known in app.user_middleware):
            app.add_middleware(layer)
    _say_fields(app)
    known = {getattr(route, "path", None) for route in app.routes}
    for path, endpoint in (("/policy", policy), ("/steps", steps)):
        if path not in known:
            app.add_api_route(path, endpoint, methods=["GET"])


def _say_fields(app: Any) -> None:
    """A request that does not fit an endpoint's schema is answered as the guard does: field, value, bound."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse

    from glm_runtime.guard.front import envelope, from_validation

    stock = app.exception_handlers[RequestValidationError]

    async def invalid(request: Any, error: RequestValidationError) -> Any:
        path = request.url.path
        if path.endswith("/v1/systemone"):  # its API prescribes another form
            return await stock(request, error)
        return JSONResponse(envelope(from_validation(list(error.errors())), path), status_code=400)

    app.add_exception_handler(RequestValidationError, invalid)


async def policy() -> Any:
    """Policy, slots, version and effective knobs, asked of the scheduler; one entry a data-parallel rank if several."""
    from sglang.srt.entrypoints.http_server import get_global_state

    states = await get_global_state().tokenizer_manager.get_internal_state()
    reports = [state["glm_runtime"] for state in states]
    return reports[0] if len(reports) == 1 else {"ranks": reports}


async def steps(last: str = "32") -> Any:
    """The last steps of the scheduler process; 400 naming `last` where it is no whole number from 0 to 128."""
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import get_global_state

    from glm_runtime.report import STEPS_KEPT

    if not last.isdecimal() or int(last) > STEPS_KEPT:
        text = f"last: a whole number from 0 to {STEPS_KEPT} is needed, not {last!r}"
        return JSONResponse({"error": {"message": text, "type": "BadRequestError", "code": 400}}, status_code=400)
    states = await get_global_state().tokenizer_manager.get_internal_state()
    kept = [state["glm_runtime_steps"] for state in states]
    count = int(last)
    cut = [ranks[len(ranks) - count :] if count < len(ranks) else ranks for ranks in kept]
    return {"steps": cut[0]} if len(cut) == 1 else {"ranks": cut}
