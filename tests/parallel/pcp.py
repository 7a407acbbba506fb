"""The engines of the serving tests with prefill ranks, the prompts that they answer, what their ranks then hold.

| engine      | ranks | split      | scheduler | indexer, prefill KV | prompts                        |
|-------------|-------|------------|-----------|---------------------|--------------------------------|
| one         | 1     |            | sglang    | ragged, paged       | 1..40, 100, 500, 1,500, 6,000  |
| two         | 2     | head-tail  | sglang    | ragged, paged       | 1..40, 100, 500, 1,500, 6,000  |
| four        | 4     | head-tail  | sglang    | qchunk, paged       | 1..40, 100, 500, 1,500         |
| ledger      | 2     | head-tail  | ledger    | qchunk, workspace   | 1..40, 100, 500, 1,500, 6,000  |
| interleave  | 2     | interleave | sglang    | ragged, workspace   | 1..40, 100, 500, 1,500         |
| zigzag      | 2     | zigzag     | ledger    | ragged, paged       | 1..40, 100, 500, 1,500         |

All in float32, chunks of 128, mixed steps. Every two implementations of scheduler, indexer and prefill KV meet in some
row of two or more ranks, and head-tail meets each. An engine runs once a process and is gone when the next one starts:

prompts alone ─> probe: pages, rows, traffic of every rank ─> 6,000 alone ─> probe
─> all again: prefix hits ─> emptied ─> eight at once ─> a long prompt joins decoding ones
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.equality.prompts import prompt
from tests.equality.serving import Ask, Serving
from tests.parallel import cp_probe

NEW = 8
CHUNK = 128
SHORT = (*range(1, 41), 100, 500, 1500)
EIGHT = (3, 10, 60, 64, 100, 129, 200, 300)
POOL: dict[str, Any] = {"max_total_tokens": 12288, "context_length": 8192, "dtype": "float32"}
CHUNKED: dict[str, Any] = POOL | {"chunked_prefill_size": CHUNK, "enable_mixed_chunk": True}
LEDGER: dict[str, Any] = POOL | {"policy": "vllm-ledger", "max_num_batched_tokens": CHUNK}

LONG = (*SHORT, 6000)
QCHUNK: dict[str, Any] = {"indexer": "qchunk", "sparse_indexer_max_logits_mb": 1}
ENGINES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one": (LONG, CHUNKED),
    "two": (LONG, CHUNKED | {"prefill_context_parallel_size": 2, "cp_split": "head-tail"}),
    "four": (SHORT, CHUNKED | QCHUNK | {"prefill_context_parallel_size": 4, "cp_split": "head-tail"}),
    "ledger": (LONG, LEDGER | {"prefill_context_parallel_size": 2}),
    "interleave": (SHORT, CHUNKED | {"prefill_kv": "workspace", "prefill_context_parallel_size": 2}),
    "zigzag": (
        SHORT,
        # Through SGLang's own forward. Steps chosen by time: the ranks must agree on one; 60 s never shorten it.
        LEDGER
        | {"prefill_context_parallel_size": 2, "cp_split": "zigzag", "indexer": "ragged", "prefill_kv": "paged"}
        | {"target_step_ms": 60_000.0, "cpu_weight_packing": False},
    ),
}


@dataclass(frozen=True)
class Rank:
    """What one rank held after the prompts of `SHORT` alone; `longer` and the rest: after that of 6,000 if asked."""

    marks: dict[str, np.ndarray]
    longer: dict[str, np.ndarray] | None
    rows: dict[str, int]
    traffic: dict[str, int] | None
    steps: list[dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """Tokens by prompt length, of each way of asking; `hits`: prefix tokens found when asked again."""

    alone: dict[int, list[int]]
    again: dict[int, list[int]]
    hits: int
    together: dict[int, list[int]]
    late: dict[int, list[int]]
    joined: list[int]
    ranks: list[Rank]
    report: dict[str, Any]


def outcome(probe: Path, folder: Path, lengths: tuple[int, ...], flags: dict[str, Any]) -> Outcome:
    """Start the engine of `flags`, ask `SHORT` and what else is in `lengths`, end it. `folder`: where ranks write."""
    after = [folder / "short"]
    with Serving(probe, **flags) as serving:
        asks = [Ask(prompt(length), NEW) for length in lengths]
        alone = {}
        for length, ask in zip(lengths, asks, strict=True):
            alone[length] = serving.alone(ask).tokens
            if length in (SHORT[-1], 6000):
                after += [folder / "long"] if length == 6000 else []
                after[-1].mkdir(parents=True)
                serving.rpc("save_sharded_model", path=str(after[-1]))
        again = serving.together(asks)
        serving.fresh()
        together = serving.together([Ask(prompt(length, "eight"), NEW) for length in EIGHT])
        early = [Ask(prompt(length, "early"), 32) for length in (5, 70, 120)]
        late = serving.together([*early, Ask(prompt(1500, "late"), NEW, after=(0, 4))])
        report = serving.report()
    ranks = []
    for file in sorted(after[-1].glob("rank*.json")):
        marks = [dict(np.load((place / file.name).with_suffix(".npz"))) for place in after]
        ranks.append(Rank(marks[0], marks[1] if len(marks) > 1 else None, **json.loads(file.read_text())))
    return Outcome(
        alone,
        dict(zip(lengths, (reply.tokens for reply in again), strict=True)),
        sum(reply.cached for reply in again),
        dict(zip(EIGHT, (reply.tokens for reply in together), strict=True)),
        {len(ask.ids): reply.tokens for ask, reply in zip([*early], late, strict=False)} | {1500: late[-1].tokens},
        [during - before for before, during in zip(late[-1].before, late[-1].during, strict=True)],
        ranks,
        report,
    )


@functools.cache
def run(name: str) -> Outcome:
    """Outcome of the engine `ENGINES[name]`."""
    place = Path(tempfile.mkdtemp(prefix="glm-pcp-"))
    try:
        lengths, flags = ENGINES[name]
        return outcome(cp_probe.install(place / "probe"), place / name, lengths, flags)
    finally:
        shutil.rmtree(place, ignore_errors=True)
