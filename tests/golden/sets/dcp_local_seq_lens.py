"""Lengths of the decode-context-parallel shards."""

from __future__ import annotations

from typing import Any

from parallel.dcp import local_lengths


def check(case: dict[str, Any]) -> str | None:
    size, interleave = case["dcp_size"], case["interleave"]
    local = [local_lengths(case["seq_lens"], size, rank, interleave).tolist() for rank in range(size)]
    return None if local == case["local"] else f"local: got {local}, wanted {case['local']}"
