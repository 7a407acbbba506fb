"""The simulator: seconds for a trace of 12,000 requests, and how far its latencies are from a running server's.

    python -m benchmarks.simulator [--quick] [--json FILE] [--trace FILE]

Without --trace a Mooncake-like one is made: 12,000 requests, some 12,000 tokens of prompt and 340 of output on average,
half of them in conversations that share a growing prefix. --quick: 2,000 requests. The server part fits
step costs to one load of the embedded model and predicts the latencies of another; it is left out with --quick.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.common import Ask, Report, parser
from glm_runtime.plan.devices import GPUS
from glm_runtime.plan.setup import Setup
from glm_runtime.plan.shapes import model
from glm_runtime.plan.size import size
from glm_runtime.simulate.arms import PAGE, Arm, Machine, simulate
from glm_runtime.simulate.cost import PlannedCost
from glm_runtime.simulate.fit import fit, read_log
from glm_runtime.simulate.fleet import requests_of
from glm_runtime.simulate.metrics import Metrics
from glm_runtime.simulate.replica import Replica
from glm_runtime.simulate.stock import StockConfig
from glm_runtime.simulate.tree import PrefixTree
from glm_runtime.traces import Request, read
from parallel.limits import Sizes
from policies.ledger.flags import LedgerFlags

ARMS = (
    Arm("vllm-ledger", LedgerFlags(max_num_batched_tokens=16384, max_num_seqs=1024)),
    Arm("sglang", StockConfig(chunked_prefill_size=16384)),
)
POOL, POSITIONS, TOPK = 16384, 32768, 64  # of the embedded model and its server


def made_trace(count: int, seed: int = 7) -> list[Request]:
    """Requests at 3.4 a second; every second one continues a conversation of up to eight rounds."""
    chance = random.Random(seed)
    now, fresh = 0.0, 0
    talks: list[list[int]] = []
    found = []
    for _ in range(count):
        now += chance.expovariate(3.4)
        if talks and chance.random() < 0.5:
            blocks = talks[chance.randrange(len(talks))]
        else:
            blocks = []
            talks.append(blocks)
            talks = talks[-200:]
        more = min(max(1, int(chance.lognormvariate(2.4, 0.9))), 200)
        blocks += range(fresh, fresh + more)
        fresh += more
        if len(blocks) > 240:
            del blocks[240:]
        tokens = len(blocks) * 512 - chance.randrange(512)
        found.append(Request(now, tokens, min(max(1, int(chance.lognormvariate(5.5, 0.8))), 2000), tuple(blocks), 512))
    return found


def speed(report: Report, trace: list[Request]) -> None:
    """Seconds for each policy, and for 64 replicas."""
    setup = Setup(
        model("glm-5.3"),
        GPUS["B200"],
        8,
        Sizes(tp=8),
        kv="fp8_e4m3",
        weights="fp4",
        ledger=ARMS[0].settings,  # type: ignore[arg-type]
    )
    pool = size(setup).capacity
    for replicas, router in ((1, "round-robin"), (64, "round-robin"), (64, "prefix")):
        machine = Machine(
            PlannedCost(setup), pool, setup.position_limit, setup.model["index_topk"], "device", replicas, router
        )
        for arm in ARMS:
            started = time.perf_counter()
            figures = simulate(arm, machine, trace)
            seconds = time.perf_counter() - started
            name = f"{arm.name}, {replicas} x {router}"
            report.figure(name, {"seconds": seconds, "steps": figures["steps"], "completed": figures["completed"]})
            print(f"{name:36} {len(trace):,} requests, {figures['steps']:,} steps in {seconds:.1f} s")
            if replicas == 1:
                report.ask(Ask(f"{len(trace):,} requests, {arm.name}", seconds, 60.0, "<=", " s"))


def accuracy(report: Report) -> None:
    """Latencies of one load on a running server against those predicted from the step log of another."""
    from tests.servers import Server
    from tests.simulate.live import send
    from tests.simulate.worlds import trace

    with tempfile.TemporaryDirectory() as folder:
        for arm, flags in (
            (Arm("vllm-ledger", LedgerFlags(128, 32)), ("--max-num-batched-tokens", "128", "--max-num-seqs", "32")),
            (
                Arm("sglang", StockConfig(chunked_prefill_size=128, max_running_requests=32)),
                ("--chunked-prefill-size", "128", "--max-running-requests", "32"),
            ),
        ):
            log = Path(folder) / f"{arm.name}.jsonl"
            common = ("--dtype", "float32", "--max-total-tokens", str(POOL), "--step-log", str(log))
            with Server("--policy", arm.name, *flags, *common, small=False) as server:
                send(server, trace(21, 24, 700, 40), 1, "fitted", {})
                time.sleep(1)
                cost = fit(read_log(log, TOPK))
                lines = [
                    Request(0.0, r.prompt_tokens, r.output_tokens, r.block_ids, r.block_size)
                    for r in trace(22, 24, 700, 40)
                ]
                server.raw("/flush_cache", {})
                batch = send(server, lines, 2, "predicted", {})
            requests, _ = requests_of(lines, POSITIONS, POOL, PAGE)
            metrics = Metrics()
            side = arm.side(PrefixTree(POOL // PAGE, PAGE), POSITIONS, TOPK, "blocking", False)
            replica = Replica(side, cost, "blocking", metrics)
            for req in requests:
                replica.send(req)
            replica.run()
            errors = {"ttft": [], "e2e": []}  # type: dict[str, list[float]]
            for entry in metrics.ended:
                name = batch.names[entry.index]
                errors["ttft"].append(entry.first / (batch.first[name] - batch.sent) - 1)
                errors["e2e"].append(entry.last / (batch.last[name] - batch.sent) - 1)
            for what, values in errors.items():
                middle = statistics.median(abs(value) for value in values)
                report.figure(f"{arm.name} {what} median error", middle)
                report.ask(Ask(f"{arm.name}: {what} off by (median)", middle, 0.15, "<="))


def main() -> int:
    """Both parts."""
    made = parser("speed and accuracy of the simulator")
    made.add_argument("--trace", type=Path, metavar="FILE", help="a trace in place of the made one")
    options = made.parse_args()
    report = Report("simulator", options)
    trace = read(options.trace) if options.trace else made_trace(2_000 if options.quick else 12_000)
    speed(report, trace)
    if not options.quick:
        accuracy(report)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
