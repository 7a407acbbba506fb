"""Runs that were never played: figures and drawings are tested on them."""

from __future__ import annotations

from typing import Any

from glm_runtime.ab.asks import Ask, Workload
from glm_runtime.ab.runs import Reply, Run

LOAD = Workload(
    "made",
    "four streams, then a long prompt",
    (*(Ask(0.0, (5, 6, 7), 20, "stream") for _ in range(4)), Ask(0.3, tuple(range(5, 205)), 4, "long prompt")),
)


def policy(scheduler: str, **knobs: Any) -> dict[str, Any]:
    """As GET /policy tells it."""
    own = {"chunked_prefill_size": 64, "max_total_num_tokens": 4096, "max_running_requests": 8, "page_size": 64}
    if scheduler == "ledger":
        own |= {"max_num_batched_tokens": 64, "max_num_seqs": 8, "prefill_schedule_interval": 1}
    return {
        "policy": "vllm-ledger" if scheduler == "ledger" else "sglang",
        "slots": {"scheduler": scheduler, "indexer": "ragged", "prefill_kv": "paged", "context_parallel": "interleave"},
        "knobs": own | knobs,
        "device": "cpu",
    }


def step(number: int, at: float, ms: float, prefill: int, decode: int, left_out: int = 0) -> dict[str, Any]:
    """As a step log tells it."""
    return {
        "number": number,
        "at": at,
        "ms": ms,
        "mode": "mixed" if prefill and decode else "extend" if prefill else "decode",
        "prefill_tokens": prefill,
        "decode_rows": decode,
        "left_out": left_out,
        "running": decode + left_out,
        "waiting": 0,
        "recomputed": 0,
        "preempted": 0,
        "free_tokens": 4096 - 64 * number,
        "rows": {"ab1-0": 1},
    }


def reply(sent: float, gap: float, tokens: list[int], ttft: float = 0.05) -> Reply:
    """An answer with even gaps; every token's logprob is -0.5, the runner-up's -0.75."""
    gaps = [gap] * (len(tokens) - 1)
    return Reply(
        sent,
        ttft,
        ttft + sum(gaps),
        gaps,
        tokens,
        [-0.5] * len(tokens),
        [[(-0.5, token), (-0.75, token + 1)] for token in tokens],
        prompt_tokens=3,
        text="x",
    )


def run(arm: str, number: int, gap: float = 0.02, scheduler: str = "sglang", first: int = 7) -> Run:
    """One round: four streams of 20 tokens and a long prompt's 4; `first`: the first stream's last token."""
    answers = [list(range(30, 50)) for _ in range(4)]
    answers[0][-1] = first
    replies = [reply(0.0, gap, tokens) for tokens in answers] + [reply(0.3, gap, [9, 9, 9, 9], ttft=0.4)]
    start = 1000.0 * number
    stalls = scheduler == "sglang"
    steps = [step(i, start + 0.02 * i, 18.0, 0, 4) for i in range(1, 15)]
    steps += [step(i, start + 0.02 * i, 19.0, 64, 0 if stalls else 4, 4 if stalls else 0) for i in range(15, 19)]
    server = {"dtype": "float32", "tp_size": 1, "disable_radix_cache": False, "port": 1000 + number}
    flags = ["--policy", "x", "--arm", arm]
    return Run(arm, flags, number, LOAD.fingerprint, start, 1.0, replies, steps, policy(scheduler), server)
