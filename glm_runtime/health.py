"""GET /health that is quick and true.

    something came from the scheduler within FRESH_S     200 at once
    else one token is asked for, by all callers together 200 as soon as anything comes back
    nothing within --health-timeout-s                    503; and from then on 503 at once, until something comes back
    starting, or draining                                503 at once

SGLang's own sleeps for a second at least, and for each caller anew. Its check request is used here, too: one token of
token 0, which a busy scheduler answers without running it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from glm_runtime import config
from glm_runtime.guard.visit import own_rids

FRESH_S = 1.0
LOOK_S = 0.01
PATHS = ("/health", "/health_generate")
DEFAULT_S = 20  # SGLang's

Message = MutableMapping[str, Any]


class Health:
    """ASGI middleware that answers `PATHS` itself."""

    def __init__(self, app: Any) -> None:
        self.app = app
        asked = config.asked()
        self.limit_s = float(asked.knobs.get("health_timeout_s", DEFAULT_S) if asked else DEFAULT_S)
        self._probe: asyncio.Task[bool] | None = None

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http" or scope.get("path") not in PATHS or scope.get("method") not in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        status = 200 if await self.well() else 503
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def well(self) -> bool:
        """Whether the scheduler answers."""
        from sglang.srt.entrypoints.http_server import get_global_state
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        state = get_global_state()
        if state is None:
            return False
        manager = state.tokenizer_manager
        if manager.gracefully_exit or manager.server_status == ServerStatus.Starting:
            return False
        if time.time() - manager.last_receive_tstamp < FRESH_S:
            manager.server_status = ServerStatus.Up
            return True
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._ask(manager, ServerStatus))
        if manager.server_status == ServerStatus.UnHealthy:
            return False  # the new probe says when it is over
        return await asyncio.shield(self._probe)

    async def _ask(self, manager: Any, status: Any) -> bool:
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
        from sglang.srt.managers.io_struct import GenerateReqInput

        started = time.time()
        rid = f"{HEALTH_CHECK_RID_PREFIX}_{uuid.uuid4().hex}"
        request = GenerateReqInput(
            rid=rid, input_ids=[0], sampling_params={"max_new_tokens": 1, "temperature": 0.0}, log_metrics=False
        )

        async def generate() -> None:
            async for _ in manager.generate_request(request, None):
                break

        own_rids.add(rid)
        asking = asyncio.create_task(generate())
        try:
            while time.time() - started < self.limit_s:
                await asyncio.sleep(LOOK_S)
                if manager.last_receive_tstamp > started:
                    manager.server_status = status.Up
                    return True
            manager.server_status = status.UnHealthy
            return False
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            manager.rid_to_state.pop(rid, None)
            own_rids.discard(rid)
