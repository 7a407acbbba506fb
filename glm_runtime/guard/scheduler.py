"""The guard in the scheduler process: what one request does stays that request's.

    handle_generate_request, handle_embedding_request   an exception ends this request with 500 and its reason
    abort_request                                       aborts exactly one id; SGLang's own takes it for a prefix

An exception in the forward of a batch belongs to nobody in particular: it ends the server, with a code and its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from glm_runtime.ending import describe

logger = logging.getLogger(__name__)

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
HIDDEN = "\0"  # in front of an id while another one's abort runs; no client's id has it


def hooks() -> dict[str, Callable[..., Any]]:
    """Target -> hook, all of them AROUND."""
    return {
        SCHEDULER + "handle_generate_request": contained,
        SCHEDULER + "handle_embedding_request": contained,
        SCHEDULER + "abort_request": exact,
    }


def contained(original: Callable[..., Any], scheduler: Any, recv_req: Any, *more: Any, **named: Any) -> Any:
    """One request's way into the queues; what it raises is its own end."""
    try:
        return original(scheduler, recv_req, *more, **named)
    except Exception as error:
        logger.exception("glm_runtime: request %s could not be queued", recv_req.rid)
        scheduler.waiting_queue = [req for req in scheduler.waiting_queue if req.rid != recv_req.rid]
        end = {"type": "abort", "status_code": 500, "message": f"the request could not be queued: {describe(error)}"}
        from sglang.srt.managers.io_struct import AbortReq

        scheduler.send_abort_output(AbortReq(rid=recv_req.rid, finished_reason=end), recv_req)
        return None


def held(scheduler: Any) -> Iterator[Any]:
    """Every request that the scheduler knows; some come twice."""
    yield from scheduler.waiting_queue
    yield from scheduler.grammar_manager.grammar_queue
    yield from scheduler.collect_inflight_reqs()
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req


def exact(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Abort one id; requests whose ids only begin with it are out of sight meanwhile."""
    rid = recv_req.rid
    if recv_req.abort_all or not rid:
        return original(scheduler, recv_req)
    others = {id(req): req for req in held(scheduler) if req.rid != rid and req.rid.startswith(rid)}
    names = [(req, req.rid) for req in others.values()]
    for req, name in names:
        req.rid = HIDDEN + name
    try:
        return original(scheduler, recv_req)
    finally:
        for req, name in names:
            req.rid = name
