"""What newcomers do to running streams: a long prompt and a burst of short ones arrive while 8 streams decode.

    python -m benchmarks.interference [--quick] [--preset small] [--arms "ledger 64" ...] [--json FILE]

    streams   8 |..........................................|   prompts of 100 tokens, equal lengths of output
    long          ^ arrives when each stream has 16 tokens     one prompt of --long tokens
    burst           ^ 12 prompts of 100 tokens, at the same time

Per arm, one engine of its own, one after another: time between tokens of the streams from the arrival until the last
newcomer has ended (median, p99, max), time to first token of the long prompt and of the short ones, tokens a second
over the whole load (the same tokens in every arm), and the chunks that the long prompt really got.

    stock            SGLang's default: prefill first, chunks of --chunk
    stock mixed      --enable-mixed-chunk, at --chunk and at 128
    stock interval k --prefill-decode-interval k
    ledger n         --scheduler ledger --max-num-batched-tokens n
    ledger pace x    --scheduler ledger --target-step-ms: x times the decode step that the first arm measured
Ask: p99 and max between tokens at most a third of the best stock arm's, by a ledger arm with at least 0.95 of the
tokens a second of the best stock arm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import Ask, Report, median, parser, quantile

STREAMS, BURST, PROMPT, BURST_NEW, LONG_NEW, WARM = 8, 12, 100, 8, 8, 16
PACES = (1.5, 3.0)  # of the decode step of the first arm
THIRD = 1 / 3
RATE = 0.95


@dataclass(frozen=True)
class Load:
    """What every arm serves."""

    preset: str
    long: int
    new: int  # tokens of each stream
    dtype: str

    @property
    def tokens(self) -> int:
        """Prompt and output tokens in all."""
        return STREAMS * (PROMPT + self.new) + self.long + LONG_NEW + BURST * (PROMPT + BURST_NEW)


def arms(chunk: int) -> dict[str, dict[str, Any]]:
    """Name -> keyword arguments of glm_runtime.Engine; the paced arms are added once a decode step is known."""
    stock: dict[str, Any] = {"policy": "sglang", "chunked_prefill_size": chunk}
    ledger: dict[str, Any] = {"policy": "sglang", "scheduler": "ledger", "max_num_seqs": 32}
    made = {"stock": stock, "stock mixed": stock | {"enable_mixed_chunk": True}}
    made["stock mixed 128"] = made["stock mixed"] | {"chunked_prefill_size": 128}
    made |= {f"stock interval {k}": stock | {"prefill_decode_interval": k} for k in (1, 4, 8)}
    made |= {f"ledger {n}": ledger | {"max_num_batched_tokens": n} for n in (32, 64, 128, chunk)}
    return made


def paced(ms: float, chunk: int) -> dict[str, Any]:
    """The arm that sizes its steps by time."""
    return {
        "policy": "sglang",
        "scheduler": "ledger",
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4 * chunk,
        "target_step_ms": ms,
    }


# ---- one arm, in a process of its own ----------------------------------------------------------------------------


class Run:
    """One load on one engine: when each token came."""

    def __init__(self, engine: Any, load: Load, seed: int) -> None:
        self._engine = engine
        self._load = load
        self._draw = random.Random(seed)
        self.times: dict[str, list[float]] = {}
        self._warm = asyncio.Event()

    async def _one(self, name: str, length: int, new: int) -> None:
        ids = [self._draw.randrange(20, 270) for _ in range(length)]
        times = self.times.setdefault(name, [])
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        times.append(time.perf_counter())
        stream = await self._engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True, rid=name)
        async for event in stream:
            now = time.perf_counter()
            times.extend([now] * (len(event["output_ids"]) - (len(times) - 1)))
            if all(len(self.times.get(f"stream{i}", ())) > WARM for i in range(STREAMS)):
                self._warm.set()

    async def all(self) -> dict[str, float]:
        """The figures of the run, milliseconds and tokens a second."""
        load = self._load
        begin = time.perf_counter()
        tasks = [asyncio.create_task(self._one(f"stream{i}", PROMPT, load.new)) for i in range(STREAMS)]
        await self._warm.wait()
        arrival = time.perf_counter()
        fresh = [asyncio.create_task(self._one("long", load.long, LONG_NEW))]
        fresh += [asyncio.create_task(self._one(f"short{i}", PROMPT, BURST_NEW)) for i in range(BURST)]
        await asyncio.gather(*fresh)
        settled = time.perf_counter()
        await asyncio.gather(*tasks)
        end = time.perf_counter()
        pairs = [pair for i in range(STREAMS) for pair in pairwise(self.times[f"stream{i}"][1:])]
        quiet = [b - a for a, b in pairs if b <= arrival]
        gaps = [b - a for a, b in pairs if b > arrival and a < settled]
        shorts = [times[1] - times[0] for name, times in self.times.items() if name.startswith("short")]
        return {
            "quiet_ms": median(quiet) * 1e3,
            "p50_ms": median(gaps) * 1e3,
            "p99_ms": quantile(gaps, 0.99) * 1e3,
            "max_ms": max(gaps) * 1e3,
            "long_ttft_ms": (self.times["long"][1] - self.times["long"][0]) * 1e3,
            "short_ttft_ms": median(shorts) * 1e3,
            "short_ttft_max_ms": max(shorts) * 1e3,
            "tokens_s": load.tokens / (end - begin),
            "window_s": settled - arrival,
        }


def chunks(log: Path) -> dict[str, float] | None:
    """Rows of the long prompt a step, from a step log."""
    if not log.exists():
        return None
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [step["rows"]["long"] for step in steps if step["rows"].get("long", 1) > 1]
    if not rows:
        return None
    slowest = max(step["ms"] for step in steps)
    return {"steps": len(rows), "median": median(rows), "least": min(rows), "most": max(rows), "slowest_ms": slowest}


def child(flags: dict[str, Any], load: Load, repeats: int) -> dict[str, Any]:
    """Start the engine, run the load, end the engine."""
    import glm_runtime
    from glm_runtime.model import ensure

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.jsonl"
        if flags.get("scheduler") == "ledger":
            flags = flags | {"step_log": str(log)}
        engine = glm_runtime.Engine(
            model_path=str(ensure(load.preset)),
            dtype=load.dtype,
            max_total_tokens=2 * load.tokens,
            disable_radix_cache=True,
            **flags,
        )
        try:
            warm = Load(load.preset, load.long, WARM + 8, load.dtype)
            engine.loop.run_until_complete(Run(engine, warm, 0).all())
            runs = [engine.loop.run_until_complete(Run(engine, load, 1).all()) for _ in range(repeats)]
            knobs = engine.get_server_info()["internal_states"][0]["glm_runtime"]["knobs"]
        finally:
            engine.shutdown()
        return {
            "runs": runs,
            "chunked_prefill_size": knobs["chunked_prefill_size"],
            "step_totals": knobs.get("step_totals"),
            "long_chunks": chunks(log),
        }


# ---- the comparison ----------------------------------------------------------------------------------------------


def measure(flags: Mapping[str, Any], load: Load, repeats: int, threads: int) -> dict[str, Any]:
    """Run one arm in a fresh process."""
    call = json.dumps({"flags": dict(flags), "load": asdict(load), "repeats": repeats})
    environment = dict(os.environ) | {"OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.interference", "--child", call],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    output, errors = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{dict(flags)} ended with code {process.returncode}:\n{errors[-3000:]}")
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    runs = answer.pop("runs")
    answer["figures"] = {key: median([run[key] for run in runs]) for key in runs[0]}
    answer["runs"] = len(runs)
    return answer


def judge(report: Report, found: Mapping[str, Mapping[str, Any]]) -> None:
    """The asks: a third of the best stock arm's gaps at an equal rate."""
    stock = {name: answer["figures"] for name, answer in found.items() if name.startswith("stock")}
    ledger = {name: answer["figures"] for name, answer in found.items() if name.startswith("ledger")}
    if not stock or not ledger:
        return
    rate = max(row["tokens_s"] for row in stock.values())
    able = {name: row for name, row in ledger.items() if row["tokens_s"] >= RATE * rate}
    report.figure("ledger arms at the rate", sorted(able))
    best_rate = max(row["tokens_s"] for row in ledger.values()) / rate
    report.ask(Ask("tokens/s, best ledger arm / best stock arm", best_rate, RATE, ">=", "x"))
    for key, name in (("p99_ms", "p99"), ("max_ms", "max")):
        best = min(row[key] for row in stock.values())
        ours = min((row[key] for row in able.values()), default=float("nan"))
        report.ask(Ask(f"{name} between tokens, ledger at that rate / best stock arm", ours / best, THIRD, "<=", "x"))


def tell(name: str, answer: Mapping[str, Any]) -> None:
    """One line of the table."""
    row, cut = answer["figures"], answer["long_chunks"]
    got = f"at most {answer['chunked_prefill_size']}"
    if cut:
        got = f"{cut['median']:.0f} ({cut['least']:.0f}-{cut['most']:.0f})"
    print(
        f"{name:18} {row['p50_ms']:8.0f} {row['p99_ms']:8.0f} {row['max_ms']:8.0f}   {row['long_ttft_ms']:8.0f} "
        f"{row['short_ttft_ms']:9.0f}   {row['tokens_s']:8.0f}   {got}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """All arms, or one of them as a child."""
    options = parser("newcomers against running streams")
    options.add_argument("--preset", default="small", help="embedded model (default small)")
    options.add_argument("--long", type=int, default=3000, help="tokens of the long prompt (default 3000)")
    options.add_argument("--new", type=int, default=200, help="tokens of each stream (default 200)")
    options.add_argument("--chunk", type=int, default=256, help="stock's chunk, and the largest budget (default 256)")
    options.add_argument("--repeats", type=int, default=3, help="runs of each arm, medians are told (default 3)")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--arms", nargs="+", metavar="NAME", help="only these")
    options.add_argument("--child", help=argparse.SUPPRESS)
    chosen = options.parse_args(argv)
    if chosen.child:
        call = json.loads(chosen.child)
        print(json.dumps(child(call["flags"], Load(**call["load"]), call["repeats"])))
        return 0
    report = Report("interference", chosen)
    table = arms(chosen.chunk)
    if chosen.quick:
        load, repeats, wanted = Load("tiny", 1000, 60, chosen.dtype), 1, chosen.arms or ["stock mixed", "ledger 64"]
    else:
        load, repeats = Load(chosen.preset, chosen.long, chosen.new, chosen.dtype), chosen.repeats
        wanted = chosen.arms or [*table, *(f"ledger pace {pace:g}" for pace in PACES)]
    report.figure("load", load)
    heads = f"{'p50':>8} {'p99':>8} {'max':>8}   {'long 1st':>8} {'short 1st':>9}   {'tokens/s':>8}"
    print(f"{'ms between tokens':18} {heads}   rows of the long prompt a step")
    found: dict[str, dict[str, Any]] = {}
    for name in wanted:
        flags = table.get(name)
        if flags is None and name.startswith("ledger pace "):
            if not found:
                raise SystemExit(f"--arms {name}: another arm must come first, its decode step is the measure")
            step = next(iter(found.values()))["figures"]["quiet_ms"]
            flags = paced(float(name.split()[-1]) * step, chosen.chunk)
        if flags is None:
            raise SystemExit(f"--arms {name}: known are {', '.join(table)}, ledger pace X")
        found[name] = measure(flags, load, repeats, chosen.threads) | {"flags": flags}
        tell(name, found[name])
    report.figure("arms", found)
    judge(report, found)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
