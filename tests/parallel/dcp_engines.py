"""What engines under decode context parallel answer, and the engine without it: each started once, asked all at once.

| engine    | ranks | runs of | schedule | prefill KV | cache   |
|-----------|-------|---------|----------|------------|---------|
| one       |   1   |    -    | stock    | paged      | float32 |
| paged     |   2   |    1    | stock    | paged      | float32 |
| workspace |   2   |   64    | ledger   | workspace  | float32 |
| both      |   2   |    1    | ledger   | workspace  | float32 |  prefill ranks that share rows (head-tail) and cache
| fp8 one   |   1   |    -    | stock    | paged      | fp8     |
| fp8       |   2   |    4    | stock    | workspace  | fp8     |

Chunks of 128 tokens, mixed with decodes. `answers(name)` ends its engine before it returns.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.equality.prompts import crowd, prompt
from tests.equality.serving import Ask, Reply
from tests.parallel.probe import Probed

COMMON = {"max_total_tokens": 12288, "dtype": "float32", "chunked_prefill_size": 128, "enable_mixed_chunk": True}
SHARED = {"tp_size": 2, "decode_context_parallel_size": 2}
LEDGER = {"policy": "vllm-ledger", "max_num_batched_tokens": 128, "max_num_seqs": 16}
ENGINES: dict[str, dict[str, Any]] = {
    "one": COMMON,
    "paged": COMMON | SHARED,
    "workspace": {n: v for n, v in COMMON.items() if "chunk" not in n}
    | SHARED
    | LEDGER
    | {"cp_kv_cache_interleave_size": 64},
    "both": {n: v for n, v in COMMON.items() if "chunk" not in n}
    | {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}
    | LEDGER,
    "fp8 one": COMMON | {"kv_cache_dtype": "fp8_e4m3"},
    "fp8": COMMON
    | SHARED
    | {"kv_cache_dtype": "fp8_e4m3", "cp_kv_cache_interleave_size": 4, "prefill_kv": "workspace"},
}
PAGES = (100, 205, 500)  # asked one by one, then the pools are looked at
SHORT = tuple(range(1, 41))
LONG = (100, 500, 1500)
SWEEP = (*range(8, 400, 11), 118, 205, 400)
SCORED = (100, 300, 500)
NEW = 8


@dataclass
class Answers:
    """Of one engine: replies by what was asked, buffers of each rank, and what the scheduler says of itself."""

    pages: list[Reply] = field(default_factory=list)
    pools: list[dict[str, Any]] = field(default_factory=list)
    short: list[Reply] = field(default_factory=list)
    long: list[Reply] = field(default_factory=list)
    again: list[Reply] = field(default_factory=list)
    crowd: list[Reply] = field(default_factory=list)
    sweep: list[Reply] = field(default_factory=list)
    scored: list[Reply] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)


def tail(length: int) -> list[int]:
    """The first 300 tokens of the prompt of `length`, then others."""
    return prompt(length)[:300] + prompt(60, f"tail/{length}")


@functools.cache
def answers(name: str) -> Answers:
    """Everything that the tests want to know of an engine."""
    found = Answers()
    with tempfile.TemporaryDirectory(prefix="kv-pools-") as folder, Probed(Path(folder), **ENGINES[name]) as engine:
        found.pages = [engine.alone(Ask(prompt(n, "pages"), 4)) for n in PAGES]
        found.pools = engine.pools()
        if name.startswith("fp8"):
            found.scored = [engine.alone(Ask(prompt(n, "score"), NEW, start=0)) for n in SCORED]
        else:
            found.short = engine.together([Ask(prompt(n), NEW) for n in SHORT])
            found.long = engine.fresh().together([Ask(prompt(n), 16) for n in LONG])
            found.again = engine.together([Ask(prompt(n), 16) for n in LONG] + [Ask(tail(n), 16) for n in (500, 1500)])
            late = [Ask(prompt(n, "late"), NEW, after=(0, 6)) for n in (700, 450)]
            found.crowd = engine.fresh().together([Ask(ids, 32) for ids in crowd()] + late)
            found.sweep = engine.fresh().together([Ask(prompt(n, "sweep"), NEW) for n in SWEEP])
        found.report = engine.report()["knobs"]
    return found
