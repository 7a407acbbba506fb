"""CSV traces: Azure's LLM inference trace of 2023, and the same with relative times and prefix blocks.

    TIMESTAMP,ContextTokens,GeneratedTokens                            2023-11-16 18:17:03.9799600,4808,10
    arrival_ms,input_tokens,output_tokens                              52,3180,8
    arrival_ms,input_tokens,output_tokens,prefix_block_ids_512         0,6758,500,0 1 2 3

Absolute times count from the earliest row. The block size stands in the last column's name.
Source: github.com/Azure/AzurePublicDataset (AzureLLMInferenceTrace); Patel et al., Splitwise, ISCA 2024.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from itertools import starmap

from glm_runtime.traces.request import Request, TraceError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
RELATIVE = ("arrival_ms", "input_tokens", "output_tokens")
_BLOCKS = re.compile(r"prefix_block_ids_([1-9]\d*)")


def block_size_of(head: str) -> int | None:
    """Tokens a block by the header line; 0 without blocks, None where it is no header of ours."""
    columns = tuple(head.strip().split(","))
    if columns in (AZURE, RELATIVE):
        return 0
    if columns[:3] == RELATIVE and len(columns) == 4 and (found := _BLOCKS.fullmatch(columns[3])):
        return int(found[1])
    return None


def parse(path: object, lines: Iterable[str], need_blocks: bool = False) -> list[Request]:
    """Requests of a CSV trace, in file order. Raises TraceError naming the row."""
    rows = enumerate(lines, 1)
    _, head = next(rows, (0, ""))
    block_size = block_size_of(head.lstrip("\ufeff"))
    if block_size is None or (need_blocks and not block_size):
        wanted = ",".join(RELATIVE) + ",prefix_block_ids_N" if need_blocks else " or ".join(map(",".join, _HEADS))
        raise TraceError(path, 1, f"the header is {head.strip()!r}, expected {wanted}")
    absolute = head.lstrip("\ufeff").startswith(AZURE[0])
    width = 4 if block_size else 3
    found: list[tuple[int, float, list[str]]] = []
    for number, line in rows:
        if not line.strip():
            continue
        cells = line.strip().split(",")
        if len(cells) != width:
            raise TraceError(path, number, f"{len(cells)} columns, the header has {width}")
        try:
            if absolute:
                at = datetime.fromisoformat(cells[0]).timestamp()
            else:
                at = float(cells[0]) / 1e3
        except ValueError:
            raise TraceError(path, number, f"{cells[0]!r} is no {'time' if absolute else 'arrival_ms'}") from None
        found.append((number, at, cells))
    start = min((at for _, at, _ in found), default=0.0) if absolute else 0.0

    def made(number: int, at: float, cells: list[str]) -> Request:
        try:
            blocks = tuple(map(int, cells[3].split())) if block_size else ()
            return Request(round(at - start, 6), int(cells[1]), int(cells[2]), blocks, block_size if blocks else 0)
        except ValueError as error:
            raise TraceError(path, number, str(error)) from None

    return list(starmap(made, found))


_HEADS = (AZURE, RELATIVE)
