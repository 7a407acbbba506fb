"""The guard of what is no generation: profiles, recordings, weights, sessions, and the like.

    endpoint ─> FanOutCommunicator ─> scheduler's dispatcher ─> handler: raises
       400 <── answer of the handler's type, its rid says why <──────┘     the server goes on, and nobody waits

Each kind of request has its type of answer (`XReqInput` -> `XReqOutput`), and a caller waits until one has come.
Many of these types have no field for a failure; all have `rid`, which such answers do not use.

NOTE: requests that generate are not touched here (`scheduler.py`), nor is the end of the server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from glm_runtime.ending import describe
from glm_runtime.guard.refusal import Refusal

logger = logging.getLogger(__name__)

DISPATCHER = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"
CALL = "sglang.srt.managers.communicator.FanOutCommunicator.queueing_call"
PROFILE = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin._execute_profile"
FAILED = "\0glm_runtime failed: "
GENERATING = ("Tokenized", "BatchTokenized", "Shutdown")
# What an answer says of a failure, where it has such a field.
EMPTY: dict[str, Any] = {
    "success": False,
    "updated": False,
    "parameter": None,
    "internal_state": {},
    "layout": {},
    "response": [],
    "session_id": None,
}


def hooks() -> dict[str, Callable[..., Any]]:
    """Target -> hook, all of them AROUND."""
    return {DISPATCHER: contained, CALL: answered, PROFILE: profiled}


def failure(request: Any, reason: str) -> Any:
    """The answer that a caller of `request` waits for, saying that it failed; None where nobody waits.

    Args:
        request: one of SGLang's io_struct types.
        reason: one line.
    """
    import msgspec
    from sglang.srt.managers import io_struct

    name = type(request).__name__.removesuffix("Input").removesuffix("Output") + "Output"
    kind = getattr(io_struct, name, None)
    if kind is None:
        return None
    names = {field.name for field in msgspec.structs.fields(kind)}
    values = {key: value for key, value in EMPTY.items() if key in names}
    values |= {key: reason for key in ("message", "error_message", "error") if key in names}
    if "session_id" in names:
        values["session_id"] = request.session_id
    return kind(rid=FAILED + reason, http_worker_ipc=request.http_worker_ipc, **values)


def apart(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`handler`, whose exceptions become the answer."""

    def handled(request: Any) -> Any:
        try:
            return handler(request)
        except Exception as error:
            name = type(request).__name__
            logger.warning("glm_runtime: %s failed, the server goes on: %s", name, describe(error))
            logger.debug("glm_runtime: where it failed", exc_info=True)
            return failure(request, describe(error).encode("utf-8", "replace").decode())

    return handled


def contained(original: Callable[..., Any], scheduler: Any) -> Any:
    """`init_request_dispatcher`: the same table of handlers, each apart from the loop that runs everybody's steps."""
    from sglang.utils import TypeBasedDispatcher

    result = original(scheduler)
    stock = scheduler._request_dispatcher
    pairs = stock._mapping.items()
    scheduler._request_dispatcher = TypeBasedDispatcher(
        [(kind, handler if kind.__name__.startswith(GENERATING) else apart(handler)) for kind, handler in pairs]
    )
    return result


async def answered(original: Callable[..., Any], communicator: Any, obj: Any) -> Any:
    """`FanOutCommunicator.queueing_call`: Refusal where a scheduler process said that it failed."""
    results = await original(communicator, obj)
    for result in results:
        said = getattr(result, "rid", None)
        if isinstance(said, str) and said.startswith(FAILED):
            raise Refusal.because(said.removeprefix(FAILED))
    return results


def writable(folder: str | None) -> None:
    """Raise Refusal where a profile could not be written: the scheduler would find out in the midst of its steps."""
    if folder is None:
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except (OSError, ValueError) as error:
        raise Refusal("output_dir", folder, f"a folder that can be made ({describe(error)})") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Refusal("output_dir", folder, "a folder that can be written to")


async def profiled(original: Callable[..., Any], manager: Any, req: Any) -> Any:
    """`_execute_profile`: a profile that cannot be started or stopped is the caller's to mend, no failure of ours."""
    writable(req.output_dir)
    try:
        return await original(manager, req)
    except RuntimeError as error:
        raise Refusal.because(str(error)) from None
