"""The guard in SGLang's tokenizer manager.

    generate_request        checks before, silence after an abort behind
    _init_req_state         the ids of a visit, also those that SGLang makes for `n`
    _validate_one_request   what the token count tells
    abort_request           an abort that overtakes its request waits for it (_mark_state_dispatched)

Every front passes `TokenizerManager.generate_request`: HTTP endpoints, the ZMQ gateway, `Engine`, warm-ups and health
checks. A `Refusal` is a ValueError, which SGLang's own endpoints answer with 400; `front.py` makes that answer JSON
with field, value and bound, also where the endpoint streams.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from glm_runtime import config
from glm_runtime.guard import prompt, request, silence
from glm_runtime.guard.limits import GuardFlags, Limits
from glm_runtime.guard.refusal import Refusal
from glm_runtime.guard.visit import current

logger = logging.getLogger(__name__)

GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
STATES = "sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state"
ABORT = "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request"
DISPATCHED = "sglang.srt.managers.tokenizer_manager.TokenizerManager._mark_state_dispatched"

_known: WeakKeyDictionary[Any, Limits] = WeakKeyDictionary()
_aborted: WeakValueDictionary[str, Any] = WeakValueDictionary()  # id -> SGLang's state of a request that was aborted
_early: WeakValueDictionary[str, Any] = WeakValueDictionary()  # ... and is not at the scheduler yet


def hooks() -> dict[str, Callable[..., Any]]:
    """Target -> hook, all of them AROUND."""
    return {
        GENERATE: guarded,
        VALIDATE: tokenised,
        STATES: noted,
        ABORT: abort,
        DISPATCHED: dispatched,
    }


def limits_of(manager: Any) -> Limits:
    """Limits of the model that a tokenizer manager serves; worked out once."""
    found = _known.get(manager)
    if found is None:
        from sglang.srt.runtime_context import get_exec

        model, asked = manager.model_config, config.asked()
        features = get_exec().features
        found = _known[manager] = Limits(
            vocab=model.vocab_size,
            context=manager.context_len,
            hidden=model.hidden_size,
            text_only=not model.is_multimodal,
            routed_experts=bool(features.enable_return_routed_experts),
            indexer_topk=bool(features.enable_return_indexer_topk),
            flags=GuardFlags.from_knobs(asked.knobs if asked else {}),
        )
    return found


async def guarded(original: Callable[..., Any], manager: Any, obj: Any, http: Any = None) -> AsyncIterator[Any]:
    """`generate_request`: checks first, then SGLang's; what a request's own data made fail is refused as such."""
    visit = current.get()
    answered = False
    spoken: set[str] = set()
    try:
        admit(manager, obj)
        outputs = original(manager, obj, http)
        try:
            async for output in outputs:
                answered = True
                if visit is not None:
                    visit.admitted = True
                if _aborted and not silence.settle(output, _aborted, spoken, bool(getattr(obj, "stream", False))):
                    continue
                yield output
        finally:
            await outputs.aclose()
    except Refusal as refusal:
        if visit is not None:
            visit.refusal = visit.refusal or refusal
        raise
    except (TypeError, KeyError, IndexError, AttributeError, AssertionError, OverflowError) as error:
        if answered:
            raise
        # NOTE: not answered yet: SGLang stumbled over the request. The trace is for us, the answer for the client.
        logger.exception("glm_runtime: a request could not be read")
        stumble = Refusal("request", f"{type(error).__name__}: {error}", "a request that SGLang can read")
        if visit is not None:
            visit.refusal = stumble
        raise stumble from None


def admit(manager: Any, obj: Any) -> None:
    """Raise Refusal where a request cannot be served; nothing has been computed for it yet."""
    limits = limits_of(manager)
    embedding = not hasattr(obj, "top_logprobs_num")
    if not embedding:
        request.check(obj, limits)
    elif manager.is_generation:
        raise Refusal("model", manager.served_model_name, "a model started with --is-embedding")
    else:
        request.check_embedding(obj, limits)


def tokenised(original: Callable[..., Any], manager: Any, obj: Any, input_ids: Any, *more: Any, **named: Any) -> Any:
    """`_validate_one_request`: what the token count tells, then SGLang's own checks."""
    prompt.tokenised(obj, input_ids, limits_of(manager), truncate=manager.allow_auto_truncate)
    return original(manager, obj, input_ids, *more, **named)


def noted(original: Callable[..., Any], manager: Any, obj: Any, *more: Any, **named: Any) -> Any:
    """`_init_req_state`: ids of running requests are refused; a visit knows its own, also those made for `n`."""
    rids = [obj.rid] if isinstance(obj.rid, str) else obj.rid
    for rid in rids:
        if rid in manager.rid_to_state:
            raise Refusal("rid", rid, "an id that no running request has")
    result = original(manager, obj, *more, **named)
    visit = current.get()
    if visit is not None and not getattr(obj, "background", False):
        for rid in rids:
            visit.note(rid, partial(_abort_own, manager, rid, manager.rid_to_state[rid]))
    return result


def _abort_own(manager: Any, rid: str, state: Any) -> None:
    """Abort the request that has this state; another one may use its id by now."""
    if manager.rid_to_state.get(rid) is state:
        manager.abort_request(rid)


def abort(original: Callable[..., Any], manager: Any, rid: str = "", abort_all: bool = False) -> Any:
    """`abort_request`: one that is not at the scheduler yet is aborted as soon as it is there.

    SGLang would send the abort ahead of the request, where it meets nothing, and take any later one for a repetition.
    """
    known = manager.rid_to_state
    for name in list(known) if abort_all else [rid] if rid in known else []:
        state = known[name]
        _aborted[name] = state
        if not state.dispatched:
            _early[name] = state
            if not abort_all:
                return None
    return original(manager, rid, abort_all)


def dispatched(original: Callable[..., Any], manager: Any, rid: str) -> Any:
    """`_mark_state_dispatched`: the request is on its way; an abort that came before follows it."""
    result = original(manager, rid)
    state = _early.pop(rid, None)
    if state is not None and manager.rid_to_state.get(rid) is state:
        manager.abort_request(rid)
    return result
