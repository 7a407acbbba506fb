"""Top-k ids to workspace rows and paged rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from attention.topk_remap import PagedRows, Placement, WorkspaceRows, remap


def check(case: dict[str, Any]) -> str | None:
    rows, counts = remap(
        np.array(case["topk"], dtype=np.int32),
        np.array(case["req_id"], dtype=np.int32),
        None if case["prefill_request_id"] is None else np.array(case["prefill_request_id"], dtype=np.int32),
        PagedRows(np.array(case["block_table"], dtype=np.int32), case["block_size"], case["block_stride_rows"]),
        WorkspaceRows(np.array(case["workspace_starts"] or [], dtype=np.int32), case["workspace_rank_stride"] or 0),
        Placement(case["dcp_size"], case["dcp_rank"], case["interleave"]),
        case["compact_to_front"],
    )
    if rows.tolist() != case["out"]:
        return f"out: got {rows.tolist()}, wanted {case['out']}"
    if counts.tolist() != case["valid_counts"]:
        return f"valid_counts: got {counts.tolist()}, wanted {case['valid_counts']}"
    return None
