"""Time of one decision of the token ledger: schedule() and update(), no model, pages counted by a plain pool.

    python -m benchmarks.ledger_core [--quick] [--json FILE]

Arms at (running, waiting): every running request decodes and its KV page ends at its own time; with long prefills, the
oldest running request and the youngest are prompts of a million tokens. Waiting requests find no seat, or no KV room
("kv full"). `plain` visits every request every step. Times are microseconds a step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.common import Ask, Report, median, parser, quantile
from policies.ledger import Ledger, LedgerConfig, PagePool, Request, StepPlan
from policies.ledger.step_time import StepPacer

PAGE = 64
CONTEXT = 1000
LONG = 1_000_000
SIZES = ((1, 0), (64, 0), (256, 0), (256, 1024), (1024, 4096))
ASKS = {(256, 0): 60.0, (256, 1024): 60.0, (1024, 4096): 250.0}
# vLLM 0.33 schedule() + update, decode only, on this kind of machine; its own KV manager and output objects included.
VLLM_US = {(1, 0): 24, (64, 0): 512, (256, 0): 2019, (256, 1024): 2006, (1024, 4096): 8797}


@dataclass(frozen=True)
class Arm:
    """One load. `fast`: the ledger's clock for steady decodes is on."""

    running: int
    waiting: int
    prefills: bool = False
    kv_full: bool = False
    decode_first: bool = False
    fast: bool = True
    paced: bool = False

    @property
    def name(self) -> str:
        """Key of the figures."""
        marks = {
            "paced": self.paced,
            "kv full": self.kv_full,
            "decode first": self.decode_first,
            "plain": not self.fast,
        }
        parts = [f"{self.running},{self.waiting}", "long prefills" if self.prefills else "decode only"]
        parts += [mark for mark, is_set in marks.items() if is_set]
        return " / ".join(parts)


def build(arm: Arm) -> Ledger:
    """A ledger in full swing: everyone admitted, all but the long prompts decoding."""
    longs = 2 if arm.prefills else 0
    decodes = max(arm.running - longs, 1)
    seats = decodes + longs
    pages = 4 * (longs * LONG + seats * 2 * CONTEXT) // PAGE
    config = LedgerConfig(
        max_num_batched_tokens=8192,
        max_num_seqs=seats + arm.kv_full * arm.waiting,
        max_model_len=2 * LONG,
        long_prefill_token_threshold=512 if arm.prefills else 0,
        decode_first=arm.decode_first,
    )
    ledger = Ledger(config, PagePool(pages, PAGE), StepPacer(50.0) if arm.paced else None, fast=arm.fast)
    if arm.prefills:
        ledger.add(Request("old", LONG))
        step(ledger)
    for i in range(decodes):
        ledger.add(Request(f"d{i}", CONTEXT + i % PAGE))
    while ledger.waiting or any(request.is_prefill_chunk for request in ledger.running if request.id != "old"):
        step(ledger)
    if arm.prefills:
        ledger.add(Request("young", LONG))
        step(ledger)
    for i in range(arm.waiting):
        ledger.add(Request(f"w{i}", pages * PAGE if arm.kv_full else CONTEXT))
    return ledger


def step(ledger: Ledger) -> StepPlan:
    """One step, every sampling row brings one token."""
    plan = ledger.schedule()
    ledger.update(plan)
    return plan


def measure(arm: Arm, steps: int) -> dict[str, float]:
    """Microseconds a step; medians and the 99th percentile of schedule() and update() together."""
    ledger = build(arm)
    for _ in range(2 * PAGE):
        step(ledger)
    clock = time.perf_counter
    decide, fold = [], []
    for _ in range(steps):
        start = clock()
        plan = ledger.schedule()
        middle = clock()
        ledger.update(plan)
        end = clock()
        decide.append((middle - start) * 1e6)
        fold.append((end - middle) * 1e6)
    both = [first + second for first, second in zip(decide, fold, strict=True)]
    assert len(plan.tokens) >= arm.running, "the load does not keep running"
    return {
        "schedule_us": median(decide),
        "update_us": median(fold),
        "step_us": median(both),
        "mean_us": sum(both) / len(both),
        "p99_us": quantile(both, 0.99),
    }


def main() -> int:
    """Run all arms."""
    options = parser("decision time of the ledger's core").parse_args()
    steps = 4 * PAGE if options.quick else 16 * PAGE
    report = Report("ledger_core", options)
    print(f"{'(running, waiting) load':48} {'schedule':>9} {'update':>8} {'step':>8} {'mean':>8} {'p99':>8}  us")
    arms = [Arm(*size) for size in SIZES]
    arms += [Arm(*size, prefills=True) for size in SIZES[1:]]
    arms += [Arm(*size, prefills=True, decode_first=True) for size in SIZES[1:]]
    arms += [Arm(*size, prefills=True, decode_first=True, paced=True) for size in SIZES[2:]]
    arms += [Arm(*size, kv_full=True) for size in SIZES[3:]]
    arms += [Arm(*size, fast=False) for size in SIZES]
    for arm in arms:
        figures = measure(arm, steps)
        report.figure(arm.name, figures)
        columns = " ".join(
            f"{figures[key]:8.1f}" for key in ("schedule_us", "update_us", "step_us", "mean_us", "p99_us")
        )
        print(f"{arm.name:48}  {columns}")
    for size, bound in ASKS.items():
        for kind in (Arm(*size), Arm(*size, prefills=True)):
            report.ask(Ask(f"ledger step at {kind.name}", report.figures[kind.name]["step_us"], bound, "<=", " us"))
    report.figure("vllm_0.33_step_us", {f"{r},{w}": value for (r, w), value in VLLM_US.items()})
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
