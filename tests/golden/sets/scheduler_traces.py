"""Replay of vLLM's scheduler traces on the ledger, step by step."""

from __future__ import annotations

from typing import Any

from policies.ledger import Ledger, LedgerConfig, Request
from policies.ledger.blocks import BlockPool, TokenKeys

_SAME = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "max_num_scheduled_tokens",
    "max_num_active_seqs",
    "long_prefill_token_threshold",
    "prefill_schedule_interval",
    "enable_chunked_prefill",
    "watermark",
    "num_spec_tokens",
    "draft_slots",
    "num_prefill_lookahead",
)
_RENAMED = {
    "adaptive": "long_prefill_token_threshold_adaptive",
    "policy": "scheduling_policy",
    "reserve_full_isl": "scheduler_reserve_full_isl",
}


class Replay:
    """One trace: its ledger, its pool and its requests."""

    def __init__(self, case: dict[str, Any], fast: bool = True) -> None:
        config = case["config"]
        fields = {name: config[name] for name in _SAME if name in config}
        fields |= {ours: config[theirs] for theirs, ours in _RENAMED.items() if theirs in config}
        self.config = LedgerConfig(**fields)
        key = TokenKeys(config["block_size"], self._ids) if config.get("prefix_caching") else None
        self.pool = BlockPool(
            config["num_blocks"] - 1, config["block_size"], key, self.config.watermark, self.config.max_model_len
        )
        self.ledger = Ledger(self.config, self.pool, fast=fast)
        self.arrivals = sorted(case["requests"], key=lambda spec: (spec["arrival_step"], spec["idx"]))
        self.steps = case["steps"]
        self.stalled = case["stalled"]

    def _ids(self, request: Request, start: int, end: int) -> list[int]:
        spec: Any = request.handle
        ids = []
        for i in range(start, end):
            if i >= spec["prompt_len"]:
                ids.append(500 + spec["idx"])
            elif i < spec["shared_len"]:
                ids.append(7_000_000 + spec["group"] * 100_000 + i)
            else:
                ids.append(1_000_000 * (spec["idx"] + 1) + i)
        return ids

    def arrive(self, step: int) -> None:
        """Add the requests of this step."""
        while self.arrivals and self.arrivals[0]["arrival_step"] <= step:
            spec = self.arrivals.pop(0)
            self.ledger.add(
                Request(
                    spec["id"],
                    spec["prompt_len"],
                    max_tokens=spec["max_tokens"],
                    priority=spec["priority"],
                    arrival_time=spec["arrival_time"],
                    handle=spec,
                )
            )

    def step(self, expected: dict[str, Any]) -> dict[str, Any]:
        """Schedule one step, fold in the trace's sampled counts, and tell what happened in the trace's words."""
        ledger = self.ledger
        self.arrive(expected["step"])
        plan = ledger.schedule()
        seen: dict[str, Any] = {
            "scheduled": [[request.id, rows] for request, rows in plan.tokens.items()],
            "computed_before": {
                request.id: request.num_computed_tokens - rows for request, rows in plan.tokens.items()
            },
            "preempted": [request.id for request in plan.preempted],
            "spec": {request.id: count for request, count in plan.drafts.items()},
        }
        sampling = {request.id: request for request in plan.tokens if request not in set(plan.chunks)}
        if set(sampling) != set(expected["generated"]):
            return seen | {"generated": {id: 0 for id in sampling}}
        counts, finished = {}, []
        for id, request in sampling.items():
            longest = min(request.num_prompt_tokens + request.max_tokens, self.config.max_model_len)
            room = max(1, longest - request.num_tokens)
            counts[request] = min(expected["generated"][id], room)
            if counts[request] == room:
                finished.append(request)
        odd = {request: count for request, count in counts.items() if count != 1}
        ledger.update(plan, odd or None, finished)
        if sampling and self.config.num_spec_tokens:
            for request in ledger.requests.values():
                ledger.set_drafts(request, self.config.num_spec_tokens)
        return seen | {
            "generated": expected["generated"],
            "finished": sorted(request.id for request in finished),
            "running": [request.id for request in ledger.running],
            "waiting": [request.id for request in ledger.waiting],
            "free_blocks": self.pool.free_blocks,
        }


def check(case: dict[str, Any]) -> str | None:
    """None if every step agrees, else the first difference. Both ways of visiting the running requests are replayed."""
    for fast in (True, False):
        differs = _replay(Replay(case, fast))
        if differs is not None:
            return differs
    return None


def _replay(replay: Replay) -> str | None:
    for expected in replay.steps:
        seen = replay.step(expected)
        for name, value in seen.items():
            wanted = sorted(expected[name]) if name == "finished" else expected[name]
            if value != wanted:
                return f"step {expected['step']}: {name} is {value}, should be {wanted}"
    if replay.stalled:
        plan = replay.ledger.schedule()
        if plan:
            return f"should be stalled after step {len(replay.steps) - 1}, but schedules {plan.total_tokens} tokens"
    elif replay.ledger.requests or replay.arrivals:
        return f"{len(replay.ledger.requests)} requests left at the end"
    return None
