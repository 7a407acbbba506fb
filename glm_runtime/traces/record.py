"""Recorded traffic of a server: JSON lines, the first one a header.

    {"format": "glm_runtime-record", "version": 1, "block_size": 64}
    {"t": 0.0, "prompt_tokens": 130, "output_tokens": 16, "blocks": ["3f0c...", "9a1e..."], "rid": "..."}

A block's name is a hash of its tokens and of the name before it, so it tells what is shared and not what was said:

    name(i) = sha256(name(i-1) ++ tokens of block i as int32)[:8], in hexadecimal;  name(-1) is empty
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from glm_runtime.traces.mooncake import json_row, number
from glm_runtime.traces.request import Request, TraceError

FORMAT = "glm_runtime-record"
VERSION = 1
_NAME_BYTES = 8


def header(block_size: int) -> dict[str, Any]:
    """The first line of a record."""
    return {"format": FORMAT, "version": VERSION, "block_size": block_size}


def block_names(tokens: Sequence[int], block_size: int) -> list[str]:
    """Names of the prompt's whole blocks."""
    names: list[str] = []
    before = b""
    data = np.asarray(tokens, dtype="<i4")
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        before = hashlib.sha256(before + data[start : start + block_size].tobytes()).digest()[:_NAME_BYTES]
        names.append(before.hex())
    return names


def row(
    t: float,
    prompt_tokens: int,
    output_tokens: int,
    blocks: Sequence[str],
    rid: str | None = None,
    text: str | None = None,
) -> dict[str, Any]:
    """One request's line: `t` seconds after the start of the record."""
    line: dict[str, Any] = {
        "t": round(t, 6),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "blocks": list(blocks),
    }
    if rid is not None:
        line["rid"] = rid
    if text is not None:
        line["text"] = text
    return line


def parse(path: object, lines: Iterable[str]) -> list[Request]:
    """Requests of a record, in file order. Raises TraceError naming the row."""
    rows = ((place, text) for place, text in enumerate(lines, 1) if text.strip())
    place, text = next(rows, (1, ""))
    head = json_row(path, place, text)
    if head.get("format") != FORMAT:
        raise TraceError(path, place, f"the first line is no header with format {FORMAT!r}")
    if head.get("version") != VERSION:
        raise TraceError(path, place, f"version {head.get('version')!r} of {FORMAT}; this reads {VERSION}")
    try:
        block_size = number(head, "block_size")
    except ValueError as error:
        raise TraceError(path, place, str(error)) from None
    found = []
    for place, text in rows:
        line = json_row(path, place, text)
        try:
            ids = tuple(map(_block_id, line.get("blocks", [])))
            request = Request(
                number(line, "t", whole=False),
                number(line, "prompt_tokens"),
                number(line, "output_tokens"),
                ids,
                block_size if ids else 0,
                _text(line, "rid"),
                _text(line, "text"),
            )
        except (ValueError, TypeError) as error:
            raise TraceError(path, place, str(error)) from None
        found.append(request)
    return found


def _block_id(name: Any) -> int:
    if type(name) is int:
        return name
    if isinstance(name, str):
        try:
            return int(name, 16)
        except ValueError:
            pass
    raise ValueError(f"block {name!r} is no whole number and no hexadecimal name")


def _text(line: dict[str, Any], name: str) -> str | None:
    value = line.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} {value!r} is no text")
    return value
