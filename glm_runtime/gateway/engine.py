"""The gateway's way into SGLang: its TokenizerManager, its chat template, its state.

Everything goes to `TokenizerManager.generate_request`, as from POST /generate: the same checks, queues and metrics.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from glm_runtime.gateway.protocol import Bad, Generate
from glm_runtime.version import __version__

# What SGLang raises for bad input before a request reaches its scheduler.
REFUSALS = (ValueError, TypeError, OverflowError, re.error)
NEVER = 2**30  # tokens between outputs of a request that does not stream: its first and its last come
PASSED = (
    "priority",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_text_in_logprobs",
)


class SglangEngine:
    """What answers the gateway.

    Args:
        manager: SGLang's TokenizerManager. chat: its OpenAIServingChat, for the chat template.
        policy: name and slots, for `facts`.
    """

    def __init__(self, manager: Any, chat: Any, policy: Mapping[str, Any]) -> None:
        self._manager, self._chat, self._policy = manager, chat, dict(policy)
        self.cumulative = not manager.incremental_streaming_output

    @property
    def draining(self) -> bool:
        """Whether SIGTERM has come."""
        return bool(self._manager.gracefully_exit)

    def facts(self) -> dict[str, Any]:
        """Model, context and policy."""
        return {
            "runtime_version": __version__,
            "model": self._manager.served_model_name,
            "context_length": int(self._manager.context_len),
            "vocab_size": int(self._manager.model_config.vocab_size),
            **self._policy,
        }

    async def policy(self) -> Any:
        """As GET /policy."""
        from glm_runtime.endpoints import policy

        return await policy()

    async def generate(self, ask: Generate, rid: str) -> AsyncIterator[Mapping[str, Any]]:
        """SGLang's outputs of one request, always as a stream, which never lets go of the head of a stop string.

        Raises:
            Bad: what SGLang or the guard refuses.
        """
        try:
            outputs = self._manager.generate_request(self._request(ask, rid))
            async with aclosing(outputs):
                async for out in outputs:
                    yield out
        except Bad:
            raise
        except REFUSALS as refusal:
            raise refused(refusal) from None
        except Exception as problem:
            status = getattr(problem, "status_code", None)  # fastapi's HTTPException
            if status is None:
                raise
            code = "overloaded" if status in (429, 503) else "engine"
            raise Bad(code, str(getattr(problem, "detail", problem))) from None

    def _request(self, ask: Generate, rid: str) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        if ask.priority is not None and not self._manager.enable_priority_scheduling:
            text = (
                "priority: this server has none; --enable-priority-scheduling or --scheduling-policy priority gives it"
            )
            raise Bad("bad_request", text, "priority", ask.priority)
        sampling = dict(ask.sampling_params)
        if not ask.stream:
            sampling["stream_interval"] = NEVER
        prompt: dict[str, Any] = {"text": ask.text} if ask.text is not None else {"input_ids": ask.input_ids}
        if ask.messages is not None:
            prompt, stops = self._prompt(ask)
            if stops:
                own = sampling.get("stop") or []
                sampling["stop"] = [*([own] if isinstance(own, str) else own), *stops]
        more = {name: getattr(ask, name) for name in PASSED if getattr(ask, name) is not None}
        return GenerateReqInput(**prompt, **more, sampling_params=sampling, rid=rid, stream=True)

    def _prompt(self, ask: Generate) -> tuple[dict[str, Any], list[str]]:
        """Chat messages through the model's template, as POST /v1/chat/completions does; (prompt, its stop strings)."""
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        try:
            request = ChatCompletionRequest(
                model=self._manager.served_model_name,
                messages=ask.messages,
                chat_template_kwargs=ask.chat_template_kwargs,
            )
            made = self._chat._process_messages(request, False)
        except Exception as problem:  # pydantic's, jinja's, the template's own
            text = " ".join(str(problem).split())[:300]
            raise Bad("bad_request", f"messages: {text}", "messages", len(ask.messages or ())) from None
        if made.image_data or made.video_data or made.audio_data:
            raise Bad("bad_request", "messages: only text parts are possible", "messages")
        key = "input_ids" if isinstance(made.prompt_ids, list) else "text"
        stop = made.stop or []
        return {key: made.prompt_ids}, [stop] if isinstance(stop, str) else list(stop)


def refused(refusal: Exception) -> Bad:
    """A refusal of SGLang, or of the guard, which names field, value and bound."""
    text = " ".join(str(refusal).split()) or type(refusal).__name__
    field = getattr(refusal, "field", None)
    return Bad("bad_request", text, field, getattr(refusal, "value", None), getattr(refusal, "bound", None))
