"""Head-tail layouts and gather tables."""

from __future__ import annotations

from typing import Any

from parallel.head_tail import head_tail


def check(case: dict[str, Any]) -> str | None:
    layout = head_tail(
        case["num_scheduled"],
        case["num_computed"],
        case["is_prefilling"],
        case["pcp"],
        case["dcp"],
        case["shard_decode_requests"],
    )
    tables = layout.tables(case["padded_num_tokens"])
    segments = [
        [
            {
                "req": s.request,
                "g": [s.start, s.stop],
                "l": [s.local_start, s.local_stop],
                "start_pos": s.start_pos,
            }
            for s in layout.segments(rank)
        ]
        for rank in range(case["pcp"])
    ]
    got = {
        "replicated": layout.replicated.tolist(),
        "num_tokens_for_dispatch": layout.dispatch_rows,
        "per_rank_num_tokens": layout.rank_rows.tolist(),
        "segments": segments,
        "hidden_restore_idx": tables.hidden_restore_idx.tolist(),
        "padded_gather_idx": tables.padded_gather_idx.tolist(),
        "gathered_kv_write_mask": tables.gathered_kv_write_mask.astype(int).tolist(),
    }
    for field, value in got.items():
        if value != case[field]:
            return f"{field}: got {value}, wanted {case[field]}"
    return None
