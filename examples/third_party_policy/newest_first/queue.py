"""The scheduler slot: SGLang orders its waiting queue as ever, then the newest request goes to the front.

    arrival  1 2 3 4   ->   prefill  4 3 2 1

NOTE: under steady overload the oldest request waits for ever. It is here because the change is easy to see.
"""

from __future__ import annotations

from typing import Any

NAME = "newest-first"


def install(request: Any) -> None:
    """Registers two hooks; SGLang applies them when all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    managers = "sglang.srt.managers"
    HookRegistry.register(f"{managers}.schedule_policy.SchedulePolicy.calc_priority", newest_first, HookType.AFTER)
    HookRegistry.register(f"{managers}.scheduler.Scheduler.init_schedule_policy", sign, HookType.AFTER)


def newest_first(result: None, schedule_policy: Any, waiting_queue: list[Any], *args: Any, **kwargs: Any) -> None:
    """Runs after SGLang's own ordering, once a step that has somebody waiting."""
    waiting_queue.sort(key=lambda req: req.time_stats.wait_queue_entry_time, reverse=True)


def sign(result: None, scheduler: Any) -> None:
    """Names this scheduler in the running process; the launcher refuses to serve when the name is not there."""
    scheduler.glm_scheduler = NAME
