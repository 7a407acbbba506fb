"""Planning of the sparse-MLA prefill workspace: which requests share it, and where each one's rows begin.

    R rows of 576 bf16     | request 0 (whole context) | request 1     | free |        group 0
                           | request 2                         | free        |         group 1, starts counted anew

    R = factor * max_model_len       factor = 5 up to 262,144 positions, else 2; never below 2
    group = requests in order while the sum of their contexts <= R

Once per layer and group the whole contexts (prefix and new tokens) are gathered from the cache, up-converted, and read
by top-k ids remapped to these rows (`attention.topk_remap`). Under PCP + DCP each rank also keeps its own shard of
R // dcp rows.
Source: vLLM 0.33 v1/attention/backends/mla/flashmla_sparse.py and v1/attention/backends/utils.py, facts section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROW_VALUES = 576
ROW_BYTES = ROW_VALUES * 2
SHORT_CONTEXT = 262_144
SHORT_FACTOR = 5
LEAST_FACTOR = 2


def workspace_factor(max_model_len: int) -> int:
    """Default factor: full-length requests that the workspace holds at once."""
    return SHORT_FACTOR if max_model_len <= SHORT_CONTEXT else LEAST_FACTOR


def workspace_rows(max_model_len: int, factor: int | None = None) -> int:
    """R, rows of the workspace. Raises ValueError for a factor below 2."""
    chosen = workspace_factor(max_model_len) if factor is None else factor
    if chosen < LEAST_FACTOR:
        raise ValueError(f"--sparse-mla-prefill-workspace-factor must be at least {LEAST_FACTOR}, got {chosen}")
    return chosen * max_model_len


def workspace_bytes(rows: int, dcp_size: int = 1, row_bytes: int = ROW_BYTES) -> int:
    """Bytes of a workspace of `rows`; under PCP + DCP with the rank's own shard of rows // dcp_size beside it."""
    shard = rows // dcp_size if dcp_size > 1 else 0
    return (rows + shard) * row_bytes


def gather_bytes(context_rows: int, cache_row_bytes: int, row_bytes: int = ROW_BYTES) -> tuple[int, int]:
    """(read, written) bytes per layer to gather `context_rows` rows from the cache."""
    return context_rows * cache_row_bytes, context_rows * row_bytes


@dataclass(frozen=True, slots=True)
class Group:
    """Requests [request_start, request_stop) that share the workspace; `starts[i]` is the i-th one's first row."""

    request_start: int
    request_stop: int
    starts: tuple[int, ...]
    rows: int


def plan_groups(seq_lens: Sequence[int], rows: int, request_offset: int = 0) -> list[Group]:
    """Groups of prefill requests with whole contexts `seq_lens` in a workspace of `rows`, in order.

    `request_offset` is added to the request indices. Raises ValueError for a context that does not fit alone.
    """
    if seq_lens and min(seq_lens) < 0:
        raise ValueError("seq_lens may not be negative")
    groups: list[Group] = []
    starts: list[int] = []
    used = 0
    first = request_offset
    for request, length in enumerate(seq_lens, request_offset):
        if length > rows:
            raise ValueError(
                f"request {request} has a context of {length} rows, the prefill workspace only {rows}; "
                f"raise --sparse-mla-prefill-workspace-factor"
            )
        if used + length > rows:
            groups.append(Group(first, request, tuple(starts), used))
            first, starts, used = request, [], 0
        starts.append(used)
        used += length
    if starts:
        groups.append(Group(first, first + len(starts), tuple(starts), used))
    return groups


def workspace_starts(groups: Sequence[Group]) -> list[int]:
    """First workspace row of every request of `groups`, in order."""
    return [start for group in groups for start in group.starts]
