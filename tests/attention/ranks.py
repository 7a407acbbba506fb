"""A few real ranks on gloo, each a process: ``run(ranks, function, *arguments)`` returns what each one returned."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank: int, ranks: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        torch.save(function(rank, ranks, *arguments), Path(folder) / f"{rank}.pt")
        dist.barrier()  # who leaves early closes connections that a slow rank is still making
    finally:
        dist.destroy_process_group()


def run(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call the module-level ``function(rank, ranks, *arguments)`` on each rank. Raises what a rank raises."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            mp.spawn(_rank, (ranks, folder, function, arguments), nprocs=ranks)
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
