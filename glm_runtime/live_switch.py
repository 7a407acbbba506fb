"""POST /policy and `engine.switch_scheduler()`: change the scheduler of a running server.

    {"scheduler": "sglang" | "ledger", "deadline_s": 30, "wait": true}

    200  done: {"scheduler", "changed", "switch": {...}}      202  {"wait": false}: under way, GET /policy tells
    400  the body says something that cannot be               409  not now: a switch is under way, the server alternates
                                                                   by itself, or it was started without the flag

Admission pauses while half-done prompts are in the way. Those that are not done after `deadline_s` seconds go back to
the line; what they have computed stays in the prefix tree. 0 sends them back at once.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

from policies.base import FLAGS, SLOTS
from policies.switch.flags import KNOWN
from policies.switch.state import DEADLINE_S
from policies.switch.wire import Message

POLL_S = 0.01


class Refused(ValueError):
    """A switch that is not made; one line for the caller. `status`: of the HTTP answer."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Order:
    """What is asked for."""

    scheduler: str
    deadline_s: float = DEADLINE_S
    wait: bool = True


def order_of(body: Any) -> Order:
    """From the JSON body. Raises Refused naming the field."""
    if not isinstance(body, dict):
        raise Refused('a JSON object is needed, such as {"scheduler": "sglang"}')
    for name in body:
        if name in ("scheduler", "deadline_s", "wait"):
            continue
        if name in SLOTS:
            raise Refused(
                f"{name}: cannot be changed while the server runs, its buffers and kernels are made at start; "
                f"restart with {FLAGS[name]} {body[name]}"
            )
        if name == "policy":
            raise Refused(
                'policy: only its scheduler can be changed while the server runs: {"scheduler": "sglang" or "ledger"}'
            )
        raise Refused(f"{name}: unknown; known are scheduler, deadline_s, wait")
    scheduler = body.get("scheduler")
    if scheduler not in KNOWN:
        raise Refused(f"scheduler: {scheduler!r} is unknown; known are {', '.join(KNOWN)}")
    deadline = body.get("deadline_s", DEADLINE_S)
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 <= deadline < math.inf:
        raise Refused(f"deadline_s: {deadline!r} is no number of seconds")
    wait = body.get("wait", True)
    if not isinstance(wait, bool):
        raise Refused(f"wait: {wait!r} is neither true nor false")
    return Order(scheduler, float(deadline), wait)


async def _say(manager: Any, message: Message) -> bool:
    from sglang.srt.managers.io_struct import SetInternalStateReq

    return all(await manager.set_internal_state(SetInternalStateReq(server_args=message.values())))


async def _switch_facts(manager: Any) -> dict[str, Any]:
    states = await manager.get_internal_state()
    return dict(states[0]["glm_runtime"]["switch"])


async def change(manager: Any, order: Order) -> dict[str, Any]:
    """Ask all scheduler processes for the switch, and wait for it if told so. Raises Refused.

    Args:
        manager: SGLang's TokenizerManager.
    """
    # NOTE: where there are several data-parallel ranks, none may begin while another cannot.
    free = manager.server_args.dp_size == 1 or await _say(manager, Message("done"))
    if not free or not await _say(manager, Message("to", order.scheduler, order.deadline_s)):
        raise _reason(await _switch_facts(manager))
    if order.wait:
        while not await _say(manager, Message("done")):
            await asyncio.sleep(POLL_S)
    facts = await _switch_facts(manager)
    return {"scheduler": order.scheduler, "changed": facts["asked"]["changed"], "switch": facts}


def _reason(facts: dict[str, Any]) -> Refused:
    """Why the scheduler processes said no."""
    if not facts["allowed"]:
        return Refused("scheduler: this server cannot switch; start it with --allow-policy-switch", 409)
    if facts["alternate_s"] is not None:
        return Refused(f"scheduler: this server alternates by itself every {facts['alternate_s']:g} s", 409)
    return Refused("scheduler: a switch is under way already; GET /policy tells when it is done", 409)
