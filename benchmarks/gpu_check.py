"""Every Triton kernel on a GPU: checked against the plain torch expression, timed, set beside the machine's ceilings.

    python -m benchmarks.gpu_check                 needs torch and triton only; says so and ends with 0 without a GPU

    ceilings    copy, bf16 product, fp8 product: measured first
    per kernel  1. correct?   ids and gathered rows exactly, scores and attention within the error of their types
                2. time       median, caches flushed between calls
                3. best library call here (DeepGEMM, FlashMLA, FlashInfer), else torch
                4. floor      the longer of its traffic over the copy rate and its products over the product rate

The last two checks run the slots of the GPU backend, `qchunk` and `workspace`, around these kernels.
One table at the end; the exit status is 1 when a kernel is wrong or does not run. It is made to end within 8 minutes.
Not yet run on a GPU: the numbers are still to come. ``--device cpu`` runs the same checks, small and untimed, in
Triton's interpreter.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import traceback

import torch
import triton

from benchmarks.gpu.bench import FULL, TINY, Bench, Ceilings, Line, measure_ceilings
from benchmarks.gpu.chunks import chunk_loop, workspace_loop
from benchmarks.gpu.index import scores_of_gathered_keys, selection, top_k
from benchmarks.gpu.latent import gathers, remaps, sparse_mla

LIMIT_S = 8 * 60
CHECKS = (scores_of_gathered_keys, selection, top_k, gathers, remaps, sparse_mla, chunk_loop, workspace_loop)


def cell(value: float, scale: float = 1.0) -> str:
    """A number, or a dash where there is none."""
    return "-" if math.isnan(value) else f"{value * scale:.2f}"


def show(lines: list[Line], ceilings: Ceilings) -> None:
    """Print the table, then what was wrong and what the libraries refused."""
    columns = "{:<58} {:<6} {:>11} {:<14} {:>11} {:>9} {:>11} {:>10}"
    print()
    print(columns.format("kernel", "right", "us", "library", "us", "ours/lib", "floor us", "ours/floor"))
    for line in lines:
        rate = ceilings.fp8 if line.fp8 and not math.isnan(ceilings.fp8) else ceilings.bf16
        floor = max(line.moved / ceilings.copy, line.flop / rate)
        figures = cell(line.theirs, 1e6), cell(line.ours / line.theirs), cell(floor, 1e6), cell(line.ours / floor)
        right = "yes" if line.wrong is None else "NO"
        print(columns.format(line.name, right, cell(line.ours, 1e6), line.library, *figures))
    for line in lines:
        for note in [*([line.wrong] if line.wrong else []), *line.notes]:
            print(f"  {line.name}: {note}")


def main(arguments: list[str] | None = None) -> int:
    """Run all checks. Returns 0, or 1 when one failed."""
    parser = argparse.ArgumentParser(description="Triton kernels on a GPU: correctness, time, ceilings")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small, untimed, interpreted")
    device = torch.device(parser.parse_args(arguments).device)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--device cpu needs TRITON_INTERPRET=1: the kernels run in Triton's interpreter")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no GPU here")
        return 0
    bench = Bench(device, FULL if device.type == "cuda" else TINY, device.type == "cuda")
    begin = time.monotonic()
    ceilings = measure_ceilings(bench) if bench.timed else Ceilings(math.nan, math.nan, math.nan)
    if bench.timed:
        facts = torch.cuda.get_device_properties(device)
        print(f"{facts.name}, capability {facts.major}.{facts.minor}")
        print(f"torch {torch.__version__}, triton {triton.__version__}")
        print(f"copy {ceilings.copy / 1e9:.0f} GB/s")
        print(f"products: bf16 {ceilings.bf16 / 1e12:.1f} TFLOP/s, fp8 {ceilings.fp8 / 1e12:.1f} TFLOP/s")
    lines: list[Line] = []
    for check in CHECKS:
        left = LIMIT_S - (time.monotonic() - begin)
        if left < 0:
            lines.append(Line(check.__name__, wrong=f"not run: {LIMIT_S} s are over"))
            continue
        try:
            for line in check(bench):
                lines.append(line)
                print(f"{line.name}: {line.wrong or 'right'}", flush=True)
        except Exception as error:
            traceback.print_exc()
            lines.append(Line(check.__name__, wrong=f"{type(error).__name__}: {error}"))
    show(lines, ceilings)
    print(f"{time.monotonic() - begin:.0f} s")
    return int(any(line.wrong for line in lines))


if __name__ == "__main__":
    sys.exit(main())
