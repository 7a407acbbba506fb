"""Chunk plan of prefill and decode context parallel together."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallel.dcp import global_chunk_plan


def check(case: dict[str, Any]) -> str | None:
    plan = global_chunk_plan(case["row_req_idx"], case["row_shard_rows"], case["dcp_world"], case["interleave"])
    for field in (
        "row_bounds",
        "row_start_cu",
        "global_cu",
        "padded_local_cu",
        "padded_local_total",
        "total",
        "deinterleave_idx",
    ):
        value = np.asarray(getattr(plan, field)).tolist()
        if value != case[field]:
            return f"{field}: got {value}, wanted {case[field]}"
    return None
