"""An engine whose KV pools can be looked at: a SGLang plugin of the tests, and the worker process that brings it.

    Probed(folder, dtype="float32", ...)      as tests.equality.serving.Serving
    .pools()                                  flushes; each rank has written its pool to the folder just before

The worker lays a distribution with one entry point (group sglang.srt.plugins) on its path, which child processes get.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.equality.serving import Serving

FOLDER = "GLM_TEST_KV_FOLDER"
WRITTEN_LIMIT_S = 60.0


def register() -> None:
    """SGLang's plugin entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.flush_cache", write_pool, HookType.BEFORE)


def write_pool(scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Write the rank's buffers to the folder."""
    folder = os.environ.get(FOLDER)
    if folder:
        from sglang.srt.runtime_context import get_parallel

        pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        buffers = {
            "latent": [b.clone() for b in pool.kv_buffer],
            "index": [b.clone() for b in pool.index_key_cache.buffer],
        }
        path = Path(folder) / f"{get_parallel().tp_rank}.pt"
        torch.save(buffers, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


class Probed(Serving):
    """A running engine; `folder` is where its ranks write their pools."""

    module = "tests.parallel.probe"

    def __init__(self, folder: Path, **flags: Any) -> None:
        self.folder = folder
        os.environ[FOLDER] = str(folder)
        try:
            super().__init__(**flags)
        finally:
            del os.environ[FOLDER]

    def pools(self) -> list[dict[str, list[torch.Tensor]]]:
        """Buffers of each rank, "latent" and "index" by layer, as they are now; the prefix cache is empty then."""
        for path in self.folder.glob("*.pt"):
            path.unlink()
        self.fresh()
        end = time.monotonic() + WRITTEN_LIMIT_S  # the first rank answers for all
        ranks = self.flags.get("tp_size", 1) * self.flags.get("prefill_context_parallel_size", 1)
        while len(paths := sorted(self.folder.glob("*.pt"))) < ranks:
            assert time.monotonic() < end, f"{len(paths)} ranks have written their pools"
            time.sleep(0.05)
        return [torch.load(path) for path in paths]


def serve_with(entry: str) -> None:
    """Be the worker process of an engine that has one plugin more, `module:function`."""
    from tests.equality import worker

    with tempfile.TemporaryDirectory(prefix="test-plugin-") as place:
        about = Path(place) / "test_plugin-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: test-plugin\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\ntest_plugin = {entry}\n")
        sys.path.insert(0, place)
        worker.main()


if __name__ == "__main__":
    serve_with("tests.parallel.probe:register")
