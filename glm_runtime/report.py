"""What a scheduler process really runs, and the check that it is what was asked for.

scheduler process: of(scheduler) ──handshake──> launcher: require(report)     any difference ends the launch
                   of(scheduler) ──state─────> GET /policy, /server_info      the same facts, live
"""

from __future__ import annotations

import dataclasses
from typing import Any

from glm_runtime import config
from glm_runtime.ending import first_reason
from glm_runtime.version import __version__

STEPS_KEPT = 128  # steps that the state report carries


class PolicyNotActive(RuntimeError):
    """A scheduler process does not run what the launcher asked for."""


def of(scheduler: Any) -> dict[str, Any]:
    """Policy, slots, version and effective knobs of this scheduler process, as plain JSON values."""
    from policies.registry import resolve

    request = config.asked()
    if request is None:
        raise PolicyNotActive("the scheduler process was started without a glm_runtime request")
    backend = getattr(scheduler.tp_worker.model_runner, "attn_backend", None)
    live = _live_slots(scheduler, backend)
    switch = getattr(scheduler, "switch_facts", None)
    # NOTE: where the scheduler has changed since the launch, its implementation is the one that plans now.
    slots = request.slots if switch is None else request.slots | {"scheduler": live["scheduler"]}
    facts = resolve(request.policy, slots).describe(effective=_effective(scheduler, backend, request))
    facts["slots"] = dict(facts["slots"]) | live
    facts["switch"] = {"allowed": False} if switch is None else switch()
    facts["runtime_version"] = __version__
    facts["device"] = request.device
    return facts


def _live_slots(scheduler: Any, backend: Any) -> dict[str, str]:
    """Slots read off the live objects, so that a part that failed to install cannot pass for installed."""
    live = {"scheduler": getattr(scheduler, "glm_scheduler", "sglang")}
    slots = getattr(backend, "slots", None)
    if slots is not None:
        live |= {"indexer": slots.indexer_name, "prefill_kv": slots.prefill_name}
    split = cp_strategy()
    return live if split is None else live | {"context_parallel": split.name}


def cp_strategy() -> Any:
    """SGLang's context-parallel strategy in this process, None with one prefill rank."""
    from sglang.srt.layers.cp.base import get_cp_strategy

    return get_cp_strategy()


def _effective(scheduler: Any, backend: Any, request: config.RuntimeConfig) -> dict[str, Any]:
    """Settings in force, under SGLang's own names where they are SGLang's."""
    import torch
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    knobs: dict[str, Any] = {
        "chunked_prefill_size": schedule.chunked_prefill_size,
        "max_prefill_tokens": schedule.max_prefill_tokens,
        "enable_mixed_chunk": schedule.enable_mixed_chunk,
        "schedule_policy": schedule.schedule_policy,
        "page_size": schedule.page_size,
        "max_total_num_tokens": scheduler.max_total_num_tokens,
        "max_running_requests": scheduler.max_running_requests,
        "disable_overlap_schedule": not scheduler.enable_overlap,
    }
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    knobs["kv_cache_dtype"] = getattr(pool, "row_kind", str(getattr(pool, "dtype", "")).removeprefix("torch."))
    knobs |= request.knobs
    steps = getattr(scheduler, "steps", None)
    if steps is not None:
        knobs["step_totals"] = steps.totals()
    if request.device == "cpu":
        knobs["omp_threads"] = torch.get_num_threads()
        knobs["pack_weights"] = request.pack_weights
    if backend is not None and hasattr(backend, "scratch"):
        knobs["indexer_scratch_mb"] = backend.scratch.nbytes >> 20
    if backend is not None and hasattr(backend, "facts"):
        knobs["attention"] = backend.facts()
    traffic = getattr(cp_strategy(), "traffic", None)
    if traffic is not None:
        knobs["context_parallel"] = dataclasses.asdict(traffic)
    return knobs


def last_steps(scheduler: Any) -> list[dict[str, Any]]:
    """The last steps of this scheduler process, oldest first, as plain JSON values."""
    log = getattr(scheduler, "steps", None)
    return [] if log is None else [dataclasses.asdict(step) for step in log.last(STEPS_KEPT)]


def require(reported: dict[str, Any] | None, rank: int) -> None:
    """Raise PolicyNotActive, naming the first difference, unless `reported` is what this launcher asked for."""
    request = config.asked()
    if request is None:
        return
    if reported is None:
        reason = first_reason(request.failures) if request.failures else None
        raise PolicyNotActive(
            f"scheduler rank {rank} did not report a policy: glm_runtime's plugin is not active there "
            f"({reason or 'is the package installed in the environment of the scheduler?'})"
        )
    wanted = {"policy": request.policy, "runtime_version": __version__, "device": request.device}
    for name, value in wanted.items():
        if reported.get(name) != value:
            raise PolicyNotActive(f"scheduler rank {rank} reports {name} {reported.get(name)!r}, asked was {value!r}")
    for slot, value in request.slots.items():
        if reported["slots"].get(slot) != value:
            raise PolicyNotActive(
                f"scheduler rank {rank} runs {slot} {reported['slots'].get(slot)!r}, asked was {value!r}"
            )


def summary(reported: dict[str, Any]) -> str:
    """One line for the launcher's log."""
    slots = "  ".join(f"{slot}={name}" for slot, name in reported["slots"].items())
    return f"policy {reported['policy']} {reported['version']} active: {slots}"
