"""The guard in SGLang's tokenizer manager.

    generate_request        checks before, silence after an abort behind
    _init_req_state         the ids of a visit, also those that SGLang makes for `n`
    _validate_one_request   what the token count tells
    abort_request           an abort that overtakes its request waits for it (_mark_state_dispatched)
    create_abort_task       left out: two seconds after a stream it aborts whoever has the stream's id by then

and around `generate_contract_error`, SGLang's own check of POST /generate, which names no field.

Every front passes `TokenizerManager.generate_request`: HTTP endpoints, the ZMQ gateway, `Engine`, warm-ups and health
checks. A `Refusal` is a ValueError, which SGLang's own endpoints answer with 400; `front.py` makes that answer JSON
with field, value and bound, also where the endpoint streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from glm_runtime import config
from glm_runtime.guard import compilers, grammar, prompt, request, silence
from glm_runtime.guard.limits import GuardFlags, Limits
from glm_runtime.guard.refusal import Refusal
from glm_runtime.guard.visit import Family, current, family, own_rids

logger = logging.getLogger(__name__)

GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
STATES = "sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state"
ABORT = "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request"
LATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.create_abort_task"
CONTRACT = "sglang.srt.entrypoints.api_contract.generate_contract_error"
DISPATCHED = "sglang.srt.managers.tokenizer_manager.TokenizerManager._mark_state_dispatched"

STUMBLES = (TypeError, KeyError, IndexError, AttributeError, AssertionError, OverflowError, RecursionError)
DEAD_END = "Grammar accept_token failed"  # SGLang's words where a grammar leaves no token to go on with

_known: WeakKeyDictionary[Any, Limits] = WeakKeyDictionary()
_aborted: WeakValueDictionary[str, Any] = WeakValueDictionary()  # id -> SGLang's state of a request that was aborted
_early: WeakValueDictionary[str, Any] = WeakValueDictionary()  # ... and is not at the scheduler yet
_families: dict[str, Family] = {}  # a client's id -> the engine requests made of it, where they have ids of their own


def hooks() -> dict[str, Callable[..., Any]]:
    """Target -> hook, all of them AROUND."""
    return {
        GENERATE: guarded,
        VALIDATE: tokenised,
        STATES: noted,
        ABORT: abort,
        DISPATCHED: dispatched,
        CONTRACT: contract,
        LATE: no_late_abort,
    }


def limits_of(manager: Any) -> Limits:
    """Limits of the model that a tokenizer manager serves; worked out once."""
    found = _known.get(manager)
    if found is None:
        from sglang.srt.runtime_context import get_exec, get_observability

        model, asked = manager.model_config, config.asked()
        features = get_exec().features
        found = _known[manager] = Limits(
            vocab=model.vocab_size,
            context=manager.context_len,
            hidden=model.hidden_size,
            text_only=not model.is_multimodal,
            routed_experts=bool(features.enable_return_routed_experts),
            indexer_topk=bool(features.enable_return_indexer_topk),
            labels=frozenset(get_observability().tokenizer_metrics_allowed_custom_labels or ()),
            flags=GuardFlags.from_knobs(asked.knobs if asked else {}),
        )
    return found


async def guarded(original: Callable[..., Any], manager: Any, obj: Any, http: Any = None) -> AsyncIterator[Any]:
    """`generate_request`: checks first, then SGLang's; what a request's own data made fail is refused as such."""
    visit = current.get()
    stream = bool(getattr(obj, "stream", False))
    spoken: set[str] = set()
    kin = Family(obj.rid if isinstance(obj.rid, str) else None)
    try:
        admit(manager, obj)
        await grammars(manager, obj)
        outputs = original(manager, obj, http)
        try:
            async for output in of_family(outputs, kin):
                if stream and not spoken:
                    ended_early(output, obj)
                if not silence.settle(output, _aborted, spoken, stream):
                    continue
                if visit is not None:
                    visit.admitted = True
                yield output
        finally:
            await outputs.aclose()
            if kin.name is not None and _families.get(kin.name) is kin:
                del _families[kin.name]
    except Exception as error:
        refusal = None if spoken else blamed(error, obj)
        if refusal is None:
            raise
        if visit is not None:
            visit.refusal = visit.refusal or refusal
        if refusal is error:
            raise
        raise refusal from None


async def of_family(outputs: AsyncIterator[Any], kin: Family) -> AsyncIterator[Any]:
    """`outputs`, each made in the name of `kin`; what runs between two of them is not."""
    while True:
        token = family.set(kin)
        try:
            output = await anext(outputs)
        except StopAsyncIteration:
            return
        finally:
            family.reset(token)
        yield output


def blamed(error: Exception, obj: Any) -> Refusal | None:
    """The refusal that an exception of an unanswered request comes to; None where it is not the request's fault."""
    if isinstance(error, Refusal):
        return error
    status = getattr(error, "status_code", None)
    text = str(getattr(error, "detail", error))
    if isinstance(error, ValueError):
        return None if "is disconnected" in text else Refusal.because(text, grammar.named(obj))
    if status is not None:
        return Refusal.because(text, grammar.named(obj)) if DEAD_END in text else None
    if isinstance(error, STUMBLES):
        # NOTE: not answered yet: SGLang stumbled over the request. The trace is for us, the answer for the client.
        logger.exception("glm_runtime: a request could not be read")
        return Refusal("request", f"{type(error).__name__}: {error}", "a request that SGLang can read")
    return None


def ended_early(output: Any, obj: Any) -> None:
    """Raise Refusal where a stream's first part is its end, because the scheduler could not take the request."""
    meta = output.get("meta_info", {}) if isinstance(output, dict) else {}
    finish = meta.get("finish_reason")
    if isinstance(finish, dict) and finish.get("type") == "abort":
        text = finish.get("message") or ""
        if finish.get("status_code") == 400 or DEAD_END in text:
            raise Refusal.because(text, grammar.named(obj))


async def grammars(manager: Any, obj: Any) -> None:
    """Raise Refusal where a grammar of the request does not compile."""
    found = grammar.of(obj)
    if not found:
        return
    from sglang.srt.runtime_context import get_exec

    backend = get_exec().kernel.grammar_backend
    limits = limits_of(manager)
    for name, text in found:
        if backend == "none":
            raise Refusal(name, text, "no value (the server was started with --grammar-backend none)")
        if backend != "xgrammar":
            continue  # its own errors come back from the scheduler
        seen, reason = compilers.known(name, text)
        if not seen:
            limit = limits.flags.guard_grammar_timeout_s
            reason = await asyncio.get_running_loop().run_in_executor(None, compilers.check, name, text, limit)
        if reason is not None:
            raise Refusal(name, text, f"a grammar that compiles ({reason})")


def contract(original: Callable[..., Any], body: Any) -> Any:
    """`generate_contract_error`: where it finds something, the guard says which field."""
    found = original(body)
    visit = current.get()
    if found is not None and visit is not None:
        visit.refusal = Refusal.because(str(found))
        try:
            request.check(SimpleNamespace(**body), _limits_here())
        except Refusal as refusal:
            visit.refusal = refusal
        except TypeError:  # no object at all
            pass
    return found


def _limits_here() -> Limits:
    from sglang.srt.entrypoints.http_server import get_global_state

    return limits_of(get_global_state().tokenizer_manager)


def admit(manager: Any, obj: Any) -> None:
    """Raise Refusal where a request cannot be served; nothing has been computed for it yet."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    if manager.gracefully_exit:
        raise Refusal.because("the server is shutting down", status_code=503)
    limits = limits_of(manager)
    for rid in [obj.rid] if isinstance(obj.rid, str) else obj.rid or []:
        if isinstance(rid, str) and rid.startswith(HEALTH_CHECK_RID_PREFIX) and rid not in own_rids:
            raise Refusal("rid", rid, f"an id that does not begin with {HEALTH_CHECK_RID_PREFIX}")
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
    kin = family.get()
    if kin is not None and kin.name is not None and kin.name not in rids:
        if _families.setdefault(kin.name, kin) is not kin:
            raise Refusal("rid", kin.name, "an id that no running request has")
        kin.members += rids
    result = original(manager, obj, *more, **named)
    if kin is not None and kin.aborted:
        for rid in rids:
            manager.abort_request(rid)
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
    if rid in _families and rid not in known and not abort_all:
        _families[rid].aborted = True
        for member in list(_families[rid].members):
            manager.abort_request(member)
        return None
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


def no_late_abort(original: Callable[..., Any], manager: Any, obj: Any) -> Any:
    """`create_abort_task`: nothing to do after a stream; `front.py` has aborted what a hang-up left, by its state."""
    from fastapi import BackgroundTasks

    return BackgroundTasks()
