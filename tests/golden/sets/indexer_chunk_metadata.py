"""Metadata of one indexer chunk."""

from __future__ import annotations

from typing import Any

from attention.indexer.metadata import Sharding, chunk_metadata
from attention.indexer.split import Chunk


def check(case: dict[str, Any]) -> str | None:
    chunk = Chunk(0, len(case["seq_lens"]), *case["query_slice"])
    sharding = Sharding(case["dcp_world"], case["dcp_rank"], case["interleave"])
    (built,) = chunk_metadata([chunk], case["seq_lens"], case["query_lens"], case["compress_ratio"], sharding)
    if built is None or case["skipped"]:
        return None if (built is None) == case["skipped"] else f"skipped: wanted {case['skipped']}"
    got = {
        "token_to_seq": built.group.token_to_seq.tolist(),
        "cu_seqlen_ks": built.cu_seqlen_ks.tolist(),
        "cu_seqlen_ke": built.cu_seqlen_ke.tolist(),
        "cu_seq_lens": built.group.cu_seq_lens.tolist(),
        "local_cu_seq_lens": built.group.local_cu_seq_lens.tolist(),
        "skip_kv_gather": built.skip_kv_gather,
    }
    for field, value in got.items():
        if value != case[field]:
            return f"{field}: got {value}, wanted {case[field]}"
    rows = case["query_slice"]
    if [built.token_start, built.token_stop] != rows:
        return f"rows: got {[built.token_start, built.token_stop]}, wanted {rows}"
    return None
