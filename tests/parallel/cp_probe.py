"""A plugin of SGLang for tests: what every rank's scheduler process holds, written to a folder.

    engine.collective_rpc("save_sharded_model", path=FOLDER)   runs `export` in every rank, in place of SGLang's method

FOLDER/rank<r>.npz     one int64 fingerprint a slot (latent rows) or a page (index keys) of each layer
FOLDER/rank<r>.json    attention's row counters, the split's traffic, the step record
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

ENTRY_POINTS = "[sglang.srt.plugins]\ncp_probe = tests.parallel.cp_probe:register\n"


def install(folder: Path) -> Path:
    """Make `folder`, put on PYTHONPATH, offer the plugin; returns it."""
    info = folder / "cp_probe-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cp-probe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def register() -> None:
    """SGLang's plugin entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.save_sharded_model", export, HookType.REPLACE)


def fingerprints(rows: torch.Tensor) -> np.ndarray:
    """Int64 [n]: one number a row of `rows` [n, ...], a weighted sum of its bytes taken four at a time."""
    numbers = rows.reshape(rows.shape[0], -1).contiguous().view(torch.int32).numpy()
    weights = np.random.default_rng(7).integers(-(2**62), 2**62, numbers.shape[1], dtype=np.int64) | 1
    marks: np.ndarray = np.concatenate([part.astype(np.int64) @ weights for part in np.array_split(numbers, 16)])
    return marks


def export(self: Any, path: str) -> None:
    """Runs in a scheduler process: `self` is SGLang's Scheduler."""
    from sglang.srt.layers.cp.base import get_cp_strategy
    from sglang.srt.runtime_context import get_parallel

    pool = self.token_to_kv_pool_allocator.get_kvcache()
    backend = self.tp_worker.model_runner.attn_backend
    rank = get_parallel().tp_rank
    page = pool.page_size
    marks = {f"latent{i}": fingerprints(rows)[page:] for i, rows in enumerate(pool.kv_buffer)}
    marks |= {
        f"index{i}": fingerprints(keys)[1:] for i, keys in enumerate(pool.index_key_cache.buffer) if keys.shape[0]
    }
    np.savez(Path(path) / f"rank{rank}.npz", **marks)
    traffic = getattr(get_cp_strategy(), "traffic", None)
    facts = {
        "rows": backend.facts()["rows"],
        "traffic": None if traffic is None else dataclasses.asdict(traffic),
        "steps": [dataclasses.asdict(step) for step in self.steps],
    }
    (Path(path) / f"rank{rank}.json").write_text(json.dumps(facts))
