"""Puts the gateway into SGLang's server process.

    launcher: settings ─ bind ─> listeners ... model loads ... ─ lifespan of SGLang's HTTP app ─> Gateway on its loop

The seam is FastAPI's: an included router brings its own lifespan, which starts after SGLang's and ends before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from glm_runtime.config import ConfigError, RuntimeConfig
from glm_runtime.gateway.flags import Settings
from glm_runtime.gateway.listen import Listener

# ServerArgs field, the values with which SGLang's HTTP app runs in the launcher's process, flag
NEEDS = (
    ("tokenizer_worker_num", (1, None), "--tokenizer-worker-num"),
    ("grpc_mode", (False, None), "--grpc-mode"),
    ("smg_grpc_mode", (False, None), "--smg-grpc-mode"),
    ("encoder_only", (False, None), "--encoder-only"),
    ("use_ray", (False, None), "--use-ray"),
)


def check(server_args: Any) -> None:
    """Raise ConfigError for a flag of SGLang under which the gateway would never start."""
    for field, fine, flag in NEEDS:
        value = getattr(server_args, field, None)
        if value not in fine:
            said = flag if value is True else f"{flag} {value}"
            raise ConfigError(f"--zmq-endpoint needs the HTTP server in one process; drop it, or {said}")


def mount(settings: Settings, listeners: Sequence[Listener], request: RuntimeConfig) -> None:
    """Let SGLang's HTTP app start the gateway, on endpoints that are bound already."""
    from fastapi import APIRouter
    from sglang.srt.entrypoints.http_server import app

    policy = {"policy": request.policy, "slots": dict(request.slots)}

    @asynccontextmanager
    async def lifespan(running: Any) -> AsyncIterator[None]:
        from sglang.srt.entrypoints.http_server import get_global_state
        from sglang.srt.runtime_context import get_observability

        from glm_runtime.gateway.engine import SglangEngine
        from glm_runtime.gateway.server import Gateway

        engine = SglangEngine(get_global_state().tokenizer_manager, running.state.openai_serving_chat, policy)
        gateway = Gateway(engine, settings, listeners, metrics=bool(get_observability().enable_metrics))
        await gateway.start()
        try:
            yield
        finally:
            await gateway.close()

    app.include_router(APIRouter(lifespan=lifespan))
