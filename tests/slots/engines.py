"""The engines of the slot tests, one alive at a time, in the order of this table.

| name          | scheduler | indexer | prefill KV | caps  | chunk | otherwise                                  |
|---------------|-----------|---------|------------|-------|-------|--------------------------------------------|
| qchunk        | sglang    | qchunk  | paged      | tiny  | 8,192 |                                            |
| workspace     | sglang    | ragged  | workspace  | tiny  | 8,192 |                                            |
| both          | sglang    | qchunk  | workspace  | given | 8,192 |                                            |
| mixed         | sglang    | qchunk  | workspace  | tiny  |   128 | --enable-mixed-chunk                       |
| ledger-plain  | ledger    | ragged  | paged      |       |   128 |                                            |
| ledger-qchunk | ledger    | qchunk  | paged      | tiny  |   128 |                                            |
| ledger-space  | ledger    | ragged  | workspace  | tiny  |   128 |                                            |
| vllm-ledger   | ledger    | qchunk  | workspace  | tiny  |   128 |                                            |
| tp2           | sglang    | qchunk  | workspace  | tiny  |   512 | two ranks, rows shared from two on         |
| fp8-stock     | sglang    | ragged  | paged      |       |   512 | bfloat16, cache in fp8                     |
| fp8           | sglang    | qchunk  | workspace  | tiny  |   512 | bfloat16, cache in fp8                     |
| fp8-pcp2      | sglang    | qchunk  | workspace  | tiny  |   512 | the same on two prefill ranks, head-tail   |

tiny: 1 MiB of index scores (43 rows over 6,000 keys), a workspace of two contexts of 8,192.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from tests import alone
from tests.equality.serving import Serving

POOL: dict[str, Any] = {"max_total_tokens": 12288, "context_length": 8192, "dtype": "float32"}
HALF = POOL | {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", "chunked_prefill_size": 512}
TINY_LOGITS = {"indexer": "qchunk", "sparse_indexer_max_logits_mb": 1}
TINY_SPACE = {"prefill_kv": "workspace", "sparse_mla_prefill_workspace_factor": 2}
STEPS = Path(tempfile.gettempdir()) / f"glm-slots-steps-{os.getpid()}.jsonl"
LEDGER = {"scheduler": "ledger", "max_num_batched_tokens": 128}

ENGINES: dict[str, dict[str, Any]] = {
    "qchunk": POOL | {"chunked_prefill_size": 8192} | TINY_LOGITS,
    "workspace": POOL | {"chunked_prefill_size": 8192} | TINY_SPACE,
    "both": POOL | {"chunked_prefill_size": 8192, "indexer": "qchunk", "prefill_kv": "workspace"},
    "mixed": POOL | {"chunked_prefill_size": 128, "enable_mixed_chunk": True} | TINY_LOGITS | TINY_SPACE,
    "ledger-plain": POOL | LEDGER,
    "ledger-qchunk": POOL | LEDGER | TINY_LOGITS,
    "ledger-space": POOL | LEDGER | TINY_SPACE,
    "vllm-ledger": POOL
    | {"policy": "vllm-ledger", "max_num_batched_tokens": 128, "sparse_indexer_max_logits_mb": 1}
    | {"sparse_mla_prefill_workspace_factor": 2, "step_log": str(STEPS)},
    "tp2": POOL
    | {"chunked_prefill_size": 512, "tp_size": 2, "indexer_tp_shard_min_rows": 2}
    | TINY_LOGITS
    | TINY_SPACE,
    "fp8-stock": HALF,
    "fp8": HALF | TINY_LOGITS | TINY_SPACE,
    "fp8-pcp2": HALF | TINY_LOGITS | TINY_SPACE | {"prefill_context_parallel_size": 2, "cp_split": "head-tail"},
}


class Engines:
    """At most one engine: the one that was asked for last."""

    def __init__(self) -> None:
        self._name = ""
        self._serving: Serving | None = None

    def get(self, name: str) -> Serving:
        """The engine of `ENGINES[name]` with an empty prefix cache."""
        if self._serving is None or self._name != name:
            self.close()
            alone.take(self.close)
            self._serving, self._name = Serving(**ENGINES[name]), name
        return self._serving.fresh()

    def close(self) -> None:
        """End the engine, if there is one."""
        if self._serving is not None:
            self._serving.close()
            self._serving = None
            STEPS.unlink(missing_ok=True)
