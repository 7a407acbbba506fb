"""HTTP endpoints beside SGLang's own.

GET /policy          {"policy", "version", "slots", "knobs", ...}     as the scheduler process reports it now
POST /policy         {"scheduler": "sglang"}                           changes it in place (live_switch.py)
GET /steps?last=N    {"steps": [...]}, oldest first, N <= 128        what its last steps did (policies/steps.py)
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Add our routes to SGLang's FastAPI app, and the guard's layer around it."""
    from fastapi import Request
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel, auth_level

    from glm_runtime.guard.front import Front
    from glm_runtime.health import Health

    for layer in (Health, Front):  # the guard's outside
        if not any(known.cls is layer for known in app.user_middleware):
            app.add_middleware(layer)
    _say_fields(app)
    # NOTE: FastAPI reads the annotation when the route is added, and then looks it up here.
    set_policy.__annotations__["request"] = Request
    known = {(getattr(route, "path", None), method) for route in app.routes for method in getattr(route, "methods", ())}
    for method, path, endpoint in (
        ("GET", "/policy", policy),
        ("GET", "/steps", steps),
        ("POST", "/policy", set_policy),
    ):
        if (path, method) not in known:
            # As SGLang's own endpoints that change a running server: --admin-api-key, or else --api-key.
            made = auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint) if method == "POST" else endpoint
            app.add_api_route(path, made, methods=[method])


def _refusal(text: str, status: int = 400) -> Any:
    from fastapi.responses import JSONResponse

    kind = "BadRequestError" if status == 400 else "ConflictError"
    return JSONResponse({"error": {"message": text, "type": kind, "code": status}}, status_code=status)


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


async def set_policy(request: Any) -> Any:
    """Change the scheduler of the running server. 400 and 409 with the reason, see live_switch.py."""
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import get_global_state

    from glm_runtime import live_switch

    try:
        try:
            body = await request.json()
        except ValueError:
            raise live_switch.Refused("the body is no JSON") from None
        order = live_switch.order_of(body)
        answer = await live_switch.change(get_global_state().tokenizer_manager, order)
    except live_switch.Refused as refused:
        return _refusal(str(refused), refused.status)
    under_way = answer["switch"]["state"] == "draining"
    return JSONResponse(answer, status_code=202 if under_way and not order.wait else 200)


async def steps(last: str = "32") -> Any:
    """The last steps of the scheduler process; 400 naming `last` where it is no whole number from 0 to 128."""
    from sglang.srt.entrypoints.http_server import get_global_state

    from glm_runtime.report import STEPS_KEPT

    if not last.isdecimal() or int(last) > STEPS_KEPT:
        return _refusal(f"last: a whole number from 0 to {STEPS_KEPT} is needed, not {last!r}")
    states = await get_global_state().tokenizer_manager.get_internal_state()
    kept = [state["glm_runtime_steps"] for state in states]
    count = int(last)
    cut = [ranks[len(ranks) - count :] if count < len(ranks) else ranks for ranks in kept]
    return {"steps": cut[0]} if len(cut) == 1 else {"ranks": cut}
