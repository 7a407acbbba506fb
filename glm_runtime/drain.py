"""SIGTERM: what is running ends, nothing new begins, and it does not take for ever.

    first SIGTERM    new requests: 503; running ones go on
                     all done, or --drain-timeout-s over and the rest aborted ──> SGLang ends its processes
    second SIGTERM   ends at once, with 143

Exit code 0 after a drain, whether or not requests had to be aborted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from glm_runtime import config

logger = logging.getLogger(__name__)

WATCHDOG = "sglang.srt.managers.tokenizer_manager.TokenizerManager.sigterm_watchdog"
DEFAULT_S = 30
LOOK_S = 0.2
ABORT_S = 5.0  # what aborted requests may take to end


async def drained(original: Callable[..., Any], manager: Any) -> None:
    """`sigterm_watchdog`: the drain, then SGLang's own way to end, which has no deadline and looks every 5 seconds."""
    while not manager.gracefully_exit:
        await asyncio.sleep(LOOK_S)
    asked = config.asked()
    limit = float(asked.knobs.get("drain_timeout_s", DEFAULT_S) if asked else DEFAULT_S)
    if not await empty(manager, limit):
        left = len(manager.rid_to_state)
        logger.warning("glm_runtime: %d request(s) outlived --drain-timeout-s %g and are aborted", left, limit)
        manager.abort_request(abort_all=True)
        if not await empty(manager, ABORT_S):
            logger.error("glm_runtime: the scheduler does not answer; its requests are dropped")
            manager.rid_to_state.clear()
    await asyncio.sleep(LOOK_S)  # the last answers leave
    await original(manager)


async def empty(manager: Any, limit_s: float) -> bool:
    """Wait until no request is left, at most `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while manager.rid_to_state and time.monotonic() < end:
        await asyncio.sleep(LOOK_S)
    return not manager.rid_to_state
