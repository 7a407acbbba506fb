"""Row shard of the indexer over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

from parallel.row_shard import row_shard


def check(case: dict[str, Any]) -> str | None:
    sizes = row_shard(case["seq_lens"], case["query_lens"], case["tp_size"], case["min_rows"], case["compress_ratio"])
    return None if sizes == case["sizes"] else f"sizes: got {sizes}, wanted {case['sizes']}"
