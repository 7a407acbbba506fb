"""Mooncake's traces: JSON lines with arrival in ms and one id for each 512 tokens of prompt.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3]}

An id names its block and everything before it, the last one possibly a part of a block.
Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces; Qin et al., Mooncake, FAST 2025.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from glm_runtime.traces.request import Request, TraceError

BLOCK_SIZE = 512


def number(row: dict[str, Any], name: str, whole: bool = True) -> Any:
    """A number of a JSON row. Raises ValueError naming the field."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ValueError(f"{name} is missing" if value is None else f"{name} {value!r} is no {'whole ' * whole}number")
    return value


def json_row(path: object, line: int, text: str) -> dict[str, Any]:
    """One line as a JSON object. Raises TraceError."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        raise TraceError(path, line, f"no JSON: {text.strip()[:60]!r}") from None
    if not isinstance(row, dict):
        raise TraceError(path, line, "no JSON object")
    return row


def parse(path: object, lines: Iterable[str]) -> list[Request]:
    """Requests of a Mooncake JSON lines trace, in file order. Raises TraceError naming the row."""
    found = []
    for place, text in enumerate(lines, 1):
        if not text.strip():
            continue
        row = json_row(path, place, text)
        try:
            ids = row.get("hash_ids", [])
            if not isinstance(ids, list) or not all(type(block) is int for block in ids):
                raise ValueError("hash_ids is no list of whole numbers")
            request = Request(
                number(row, "timestamp", whole=False) / 1e3,
                number(row, "input_length"),
                number(row, "output_length"),
                tuple(ids),
                BLOCK_SIZE if ids else 0,
            )
        except (ValueError, OverflowError) as error:
            raise TraceError(path, place, str(error)) from None
        found.append(request)
    return found
