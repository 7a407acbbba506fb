"""Measures what an indexer slot takes while it works: growth of the process's resident memory at its peak, in bytes.

    python -m tests.reports.scratch_peak '{"slot": "qchunk", "rows": 512, "keys": 4096, "heads": 4, "budget": 1048576}'

Prints one JSON object. A process of its own, with every larger block mapped and given back at once
(MALLOC_MMAP_THRESHOLD_), so that memory freed before cannot hide what is taken. The kernel's own high-water mark is
read (VmHWM), reset just before the call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
TOPK = 64


def measure(**asked: Any) -> dict[str, Any]:
    """Run this file in a process of its own and return what it prints."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "tests.reports.scratch_peak", json.dumps(asked)]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) << 10


def _run(slot: str, rows: int, keys: int, heads: int, budget: int, check: bool = True) -> dict[str, Any]:
    import torch

    from attention.indexer import ragged
    from attention.indexer.qchunk import QChunk
    from attention.scratch import Scratch
    from tests.attention.cases import make
    from tests.attention.test_qchunk import geometry

    torch.set_num_threads(1)
    case = make([(rows, keys)], index_heads=heads)
    out = torch.zeros((rows, TOPK), dtype=torch.int32)
    tail = torch.zeros((4, TOPK), dtype=torch.int32)

    def select(slot_: Any, scratch: Scratch, at: slice, into: torch.Tensor) -> None:
        batch = case.batch.part(at.start, at.stop)
        slot_.select(batch, case.q[at], case.head_weights[at], case.index, TOPK, scratch, into)

    if slot == "qchunk":
        made: Any = QChunk(geometry(case, TOPK), max_logits_bytes=budget)
        made.keys.fill_(0)  # the workspace is counted by its own cap
        scratch = Scratch(1 << 16)
        scratch._bytes.fill_(0)
    else:
        made, scratch = ragged, Scratch(budget)
    select(made, Scratch(1 << 22), slice(rows - 4, rows), tail)  # everything compiled and imported
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    select(made, scratch, slice(0, rows), out)
    peak = _status("VmHWM") - before
    equal = None
    if check:
        want = ragged.select(case.batch, case.q, case.head_weights, case.index, TOPK, Scratch(1 << 26))
        equal = torch.equal(out, want)
    return {"peak": peak, "scratch_peak": scratch.peak, "equal": equal}


if __name__ == "__main__":
    print(json.dumps(_run(**json.loads(sys.argv[1]))))
