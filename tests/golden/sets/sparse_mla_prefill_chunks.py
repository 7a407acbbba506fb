"""Groups of requests in the sparse-MLA prefill workspace."""

from __future__ import annotations

from typing import Any

from attention.workspace import plan_groups, workspace_starts


def check(case: dict[str, Any]) -> str | None:
    try:
        groups = plan_groups(case["seq_lens"], case["workspace_size"], case["request_offset"])
    except ValueError as error:
        return None if case["error"] else f"refused: {error}"
    if case["error"]:
        return "a context longer than the workspace was not refused"
    bounds = [[group.request_start, group.request_stop] for group in groups]
    if bounds != case["bounds"]:
        return f"bounds: got {bounds}, wanted {case['bounds']}"
    starts = workspace_starts(groups)
    return None if starts == case["workspace_starts"] else f"starts: got {starts}, wanted {case['workspace_starts']}"
