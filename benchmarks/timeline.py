"""Two policies on one workload, their steps drawn above each other: the picture of the README.

    python -m benchmarks.timeline [--quick] [--json FILE] [--svg FILE]

Four requests decode; 40 tokens in, a prompt of 3,000 tokens comes. Each arm is an engine of its own, in turn; what is
drawn is the arm's own step record (`--step-log`). No arm is tuned: stock's defaults but for the chunk, which is the
ledger's budget, so that both cut the prompt alike.

Asks: equal tokens in both arms; the streams' longest pause under the ledger at most half of stock's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Ask, Report, parser

ARMS: dict[str, dict[str, Any]] = {
    "sglang": {"policy": "sglang", "chunked_prefill_size": 256},
    "vllm-ledger": {"policy": "vllm-ledger", "max_num_batched_tokens": 256, "max_num_seqs": 16},
}
STREAMS, AHEAD, NEW = 4, 40, 160
PROMPT = 3000
COLOURS = {"decode": "#4c78a8", "extend": "#f58518", "mixed": "#e45756"}
WIDTH, BAR, LEFT = 960, 46, 110


def prompt(length: int, salt: int) -> list[int]:
    """Token ids, the same in every arm."""
    return [5 + (salt * 31 + 7 * i) % 200 for i in range(length)]


def serve(flags: dict[str, Any], folder: str, length: int, answer: Any) -> None:
    """One arm, in a process of its own: sends its tokens, its streams' token times and its steps."""
    import glm_runtime

    log = Path(folder) / "steps.jsonl"
    engine = glm_runtime.Engine(dtype="float32", max_total_tokens=16384, step_log=str(log), **flags)
    loop = engine.loop  # SGLang answers on the loop that it was started with
    try:
        # Every shape once, so that nothing is compiled or allocated while the clock runs.
        loop.run_until_complete(_play(engine, length, salt=50))
        skip = len(log.read_text().splitlines())
        tokens, times = loop.run_until_complete(_play(engine, length, salt=1))
        steps = [json.loads(line) for line in log.read_text().splitlines()[skip:]]
        answer.put({"tokens": tokens, "times": times, "steps": steps})
    finally:
        engine.shutdown()


async def _play(engine: Any, length: int, salt: int) -> tuple[list[list[int]], list[list[float]]]:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()

    async def ask(ids: list[int], new: int, first: bool) -> tuple[list[int], list[float]]:
        params = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
        times: list[float] = []
        out: list[int] = []
        stream = await engine.async_generate(input_ids=ids, sampling_params=params, stream=True)
        async for piece in stream:
            out = list(piece["output_ids"])
            times.append(loop.time())
            if first and len(times) >= AHEAD:
                ready.set()
        return out, times

    async def late() -> tuple[list[int], list[float]]:
        await ready.wait()
        return await ask(prompt(length, salt + 9), 8, False)

    jobs = [ask(prompt(20, salt + i), NEW, i == 0) for i in range(STREAMS)]
    results = await asyncio.gather(*jobs, late())
    return [tokens for tokens, _ in results], [times for _, times in results]


def longest_pause(times: list[list[float]]) -> float:
    """Milliseconds between two tokens of a stream, at worst."""
    return max(b - a for stream in times[:STREAMS] for a, b in itertools.pairwise(stream)) * 1e3


def draw(arms: dict[str, dict[str, Any]], length: int) -> str:
    """The arms' steps as an SVG: a bar a step, as wide as it took, as high as its rows (logarithmic)."""
    from math import log2

    span = max(arm["steps"][-1]["at"] - arm["steps"][0]["at"] + arm["steps"][-1]["ms"] / 1e3 for arm in arms.values())
    scale = (WIDTH - LEFT - 10) / span
    most = max(step["prefill_tokens"] + step["decode_rows"] for arm in arms.values() for step in arm["steps"])
    height = 30 + (BAR + 40) * len(arms) + 24
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="10" y="18">steps of one workload: width is time, height is rows (log scale); '
        f"{STREAMS} streams decode, then a prompt of {length:,} tokens comes</text>",
    ]
    for place, (name, arm) in enumerate(arms.items()):
        base = 30 + place * (BAR + 40) + BAR
        first = arm["steps"][0]["at"]
        out.append(f'<text x="10" y="{base - BAR / 2:.0f}">{name}</text>')
        for step in arm["steps"]:
            rows = step["prefill_tokens"] + step["decode_rows"]
            tall = BAR * (0.15 + 0.85 * log2(1 + rows) / log2(1 + most))
            left = LEFT + (step["at"] - first) * scale
            wide = max(0.6, step["ms"] / 1e3 * scale - 0.3)
            out.append(
                f'<rect x="{left:.1f}" y="{base - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}" '
                f'fill="{COLOURS.get(step["mode"], "grey")}"/>'
            )
        out.append(
            f'<text x="{LEFT}" y="{base + 16}">longest pause of a stream {arm["pause_ms"]:.0f} ms, '
            f"first token of the prompt after {arm['ttft_ms']:.0f} ms</text>"
        )
    for place, (kind, colour) in enumerate(COLOURS.items()):
        x = LEFT + 130 * place
        out.append(f'<rect x="{x}" y="{height - 18}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 18}" y="{height - 8}">{kind} steps</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--svg", metavar="FILE", help="write the picture here")
    options = options_parser.parse_args()
    report = Report("timeline", options)
    context = multiprocessing.get_context("spawn")
    length = 1000 if options.quick else PROMPT
    arms: dict[str, dict[str, Any]] = {}
    for name, flags in ARMS.items():
        with tempfile.TemporaryDirectory() as folder:
            queue = context.Queue()
            process = context.Process(target=serve, args=(flags, folder, length, queue))
            process.start()
            arm = queue.get(timeout=600)
            process.join(120)
        late = arm["times"][-1]
        arm["pause_ms"] = longest_pause(arm["times"])
        arm["ttft_ms"] = (late[0] - arm["times"][0][AHEAD - 1]) * 1e3
        arms[name] = arm
        print(f"{name}: pause {arm['pause_ms']:.0f} ms, first token {arm['ttft_ms']:.0f} ms, {len(arm['steps'])} steps")
        report.figure(f"{name}, longest pause of a stream", round(arm["pause_ms"], 1))
        report.figure(f"{name}, first token of the prompt after", round(arm["ttft_ms"], 1))
        report.figure(f"{name}, steps", len(arm["steps"]))
    if options.svg:
        Path(options.svg).write_text(draw(arms, length))
    equal = sum(a == b for a, b in zip(arms["sglang"]["tokens"], arms["vllm-ledger"]["tokens"], strict=True))
    report.ask(Ask("answers equal in both arms", equal, STREAMS + 1, ">="))
    ratio = arms["vllm-ledger"]["pause_ms"] / arms["sglang"]["pause_ms"]
    report.ask(Ask("longest pause, ledger over stock", ratio, 0.5, "<=", "x"))
    report.finish()


if __name__ == "__main__":
    main()
