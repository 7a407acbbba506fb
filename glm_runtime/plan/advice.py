"""What binds, and what turning one knob would do: the same plan made again with one setting changed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from glm_runtime.plan.chunks import step_chunks
from glm_runtime.plan.cost import Forecast, forecast
from glm_runtime.plan.ranks import shard_least_rows
from glm_runtime.plan.setup import PAGE, Setup
from glm_runtime.plan.shapes import PlanError
from glm_runtime.plan.size import size
from glm_runtime.plan.timeline import Timeline, timeline
from parallel.row_shard import VLLM_MIN_ROWS

MATTERS = 0.02
"""A change below this share of a time is none."""
MOST_STEPS = 20_000
"""A variant with more steps than this is left out."""


@dataclass(frozen=True)
class Turn:
    """One knob turned: its flag and value, the times and the pool that follow."""

    flag: str
    ttft: float
    stall: float
    capacity: int


def binding(setup: Setup, steps: Timeline, times: Forecast) -> list[str]:
    """What limits this plan, most important first; one line each."""
    term, seconds = max(times.terms.items(), key=lambda item: item[1])
    found = [f"time: {term}, {seconds / times.ttft:.0%} of the predicted time to first token"]
    by_cap: dict[str, int] = {}
    for step in steps.prefill:
        cap = step_chunks(setup, step).binds
        if cap:
            by_cap[cap] = by_cap.get(cap, 0) + 1
    names = {"logits": "the logits cap E", "workspace": "the workspace cap W"}
    for cap, count in sorted(by_cap.items()):
        found.append(f"indexer: {names[cap]} cuts {count} of {len(steps.prefill)} steps")
    if not by_cap:
        found.append("indexer: no cap cuts a step")
    fits = size(setup).capacity
    need = setup.context + setup.output + setup.decodes * setup.decode_context
    if need > fits:
        found.insert(0, f"memory: {need:,} tokens of KV are asked for, {fits:,} fit")
    least, why = shard_least_rows(setup, steps.prefill[0])
    if setup.sizes.tp > 1:
        largest = max(step.rows for step in steps.prefill)
        state = "never" if least is None else f"from {least:,} rows"
        on = least is not None and largest >= max(least, setup.sizes.tp)
        default = "" if why != "cost rule" else f"; vLLM's default of {VLLM_MIN_ROWS:,} would have it off"
        default = default if largest < VLLM_MIN_ROWS else ""
        found.append(f"row shard: {'on' if on else 'off'}, {state} ({why}); largest chunk {largest:,} rows{default}")
    return found


def variants(setup: Setup) -> list[tuple[str, Setup]]:
    """The knobs within reach, each turned one notch both ways."""
    flags = setup.ledger_flags
    budget, seqs = flags.max_num_batched_tokens, flags.max_num_seqs
    assert budget is not None and seqs is not None
    found: list[tuple[str, Setup]] = []

    def add(flag: str, **change: object) -> None:
        try:
            found.append((flag, replace(setup, **change)))  # type: ignore[arg-type]
        except PlanError:
            return

    for tokens in (budget // 4, budget // 2, budget * 2, budget * 4):
        least = max(PAGE, setup.decodes + PAGE)
        if least <= tokens <= max(budget, setup.context):
            ledger = replace(flags, max_num_batched_tokens=tokens, max_num_seqs=min(seqs, tokens))
            add(f"--max-num-batched-tokens {tokens}", ledger=ledger)
    if setup.qchunk:
        mib = setup.logits_bytes >> 20
        for cap in (mib // 2, mib * 2):
            if cap:
                add(
                    f"--sparse-indexer-max-logits-mb {cap}",
                    attention=replace(setup.attention, sparse_indexer_max_logits_mb=cap),
                )
        if setup.sizes.tp > 1 and setup.sizes.pcp == setup.sizes.dcp == 1:
            for rows in (1, 1 << 30):
                text = "1" if rows == 1 else "1073741824 (off)"
                add(
                    f"--indexer-tp-shard-min-rows {text}",
                    attention=replace(setup.attention, indexer_tp_shard_min_rows=rows),
                )
    if setup.device.is_cpu and setup.sizes.tp == 2 and setup.sizes.pcp == 1 and setup.sizes.dcp == 1:
        half = replace(setup.sizes, tp=1, pcp=2)  # on a GPU, and beside other ranks, a server refuses it
        attention = replace(setup.attention, indexer_tp_shard_min_rows=None)
        add(f"--tp-size {half.tp} --prefill-context-parallel-size 2", sizes=half, attention=attention)
    if setup.device.is_cpu is False and setup.kv == "bfloat16":
        add("--kv-cache-dtype fp8_e4m3", kv="fp8_e4m3")
    return found


def turns(setup: Setup) -> list[Turn]:
    """Every variant's times."""
    found = []
    for flag, other in variants(setup):
        budget = other.ledger_config().token_budget
        if (other.context - other.cached) / budget > MOST_STEPS:
            continue
        times = forecast(other, timeline(other))
        found.append(Turn(flag, times.ttft, times.stall, size(other).capacity))
    return found


def best(turned: list[Turn], times: Forecast) -> tuple[Turn | None, Turn | None]:
    """(the turn with the shortest time to first token, the one with the shortest stall); None where nothing helps."""

    def pick(name: str, now: float) -> Turn | None:
        top = min(turned, key=lambda turn: getattr(turn, name), default=None)
        return top if top is not None and getattr(top, name) < now * (1 - MATTERS) else None

    return pick("ttft", times.ttft), pick("stall", times.stall)


def trade(setup: Setup, budgets: list[int]) -> list[tuple[int, int, float, float]]:
    """(budget, steps, ttft, stall) for each token budget: what a smaller step costs and what it saves."""
    found = []
    for tokens in budgets:
        flags = setup.ledger_flags
        seqs = flags.max_num_seqs
        assert seqs is not None
        ledger = replace(flags, max_num_batched_tokens=tokens, max_num_seqs=min(seqs, tokens))
        other = replace(setup, ledger=ledger)
        steps = timeline(other)
        times = forecast(other, steps)
        found.append((tokens, len(steps.prefill), times.ttft, times.stall))
    return found
