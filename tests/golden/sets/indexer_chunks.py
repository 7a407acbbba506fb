"""Chunks of the indexer under the workspace cap and the logits cap."""

from __future__ import annotations

from typing import Any

from attention.indexer.split import split_chunks


def check(case: dict[str, Any]) -> str | None:
    chunks = split_chunks(
        case["seq_lens"],
        case["query_lens"],
        case["workspace_size"],
        case["max_logits_bytes"],
        case["request_offset"],
    )
    got = [[c.request_start, c.request_stop, c.query_start, c.query_stop] for c in chunks]
    return None if got == case["chunks"] else f"chunks: got {got}, wanted {case['chunks']}"
