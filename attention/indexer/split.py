"""How the indexer's query-by-key scoring is cut: two caps, pack by request, then cut along queries (and keys).

    keys N:      | request 0 | request 1 |   request 2    |      one chunk = (requests, query rows)
    rows M  r0   |###########|           |                |
            r1   |           |###########|                |      pack: sum N <= W rows of gathered keys
            r2   |           |           |################|            sum M * sum N <= E logits
                                         |################|      cut:  at most E // sum N query rows at once

    W = max_model_len * 8 * factor // ratio        (8 = two latent rows of 576 B per 132 B index row, rounded down)
    E = cap bytes // 4                             (logits are counted as float32)

    pack  take requests while both caps hold; the first of a group is taken in any case
    cut   rows at once = max(1, E // sum N)

A single row of more than E keys breaks the cap in vLLM, and a request of more than W keys breaks the workspace. With
`strict_cap` such a request is scored in key slices that keep both, and the caller merges a running top-k over them;
every other chunk is the same. With `fixed_shapes` sum N is rounded up to a width of `scratch_shape` wherever E is
shared out, so that the logits have few shapes.
Source: vLLM 0.33 v1/attention/backends/mla/indexer.py, facts section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LATENT_BYTES = 576
INDEX_ROW_BYTES = 132
LOGIT_BYTES = 4
INDEX_ROWS_PER_POSITION = LATENT_BYTES * 2 // INDEX_ROW_BYTES
DEFAULT_FACTOR = 2
DEFAULT_MAX_LOGITS_MB = 512

KeySlices = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Query rows [query_start, query_stop) of a request group, all half-open.

    Requests are [request_start, request_stop); query rows count from the first row of the group. `key_slices`, when not
    empty, are ranges of the group's keys to be scored one after another with a running top-k; `gathers_slices` says
    that the workspace holds one such slice at a time, so that each is gathered when its turn comes.
    """

    request_start: int
    request_stop: int
    query_start: int
    query_stop: int
    key_slices: KeySlices = ()
    gathers_slices: bool = False

    @property
    def skips_gather(self) -> bool:
        """The group's keys already lie in the workspace, gathered for its first query slice."""
        return self.query_start > 0 and not self.gathers_slices


def workspace_rows(max_model_len: int, factor: int = DEFAULT_FACTOR, compress_ratio: int = 1) -> int:
    """W, rows of the gathered index keys."""
    return max_model_len * INDEX_ROWS_PER_POSITION * factor // compress_ratio


def legal_workspace_rows(rows: int, max_model_len: int, max_requests: int, compress_ratio: int = 1) -> int:
    """Rows of a workspace of `rows` that a step of at most `max_requests` prefills can fill, counted in pooled keys."""
    return min(rows, max_requests * (max_model_len // compress_ratio))


def workspace_bytes(rows: int) -> int:
    """Bytes of `rows` gathered index keys: 128 B of e4m3 values and 4 B of scale each."""
    return rows * INDEX_ROW_BYTES


def logits_elements(max_logits_bytes: int) -> int:
    """E, float32 logits under a cap in bytes."""
    return max_logits_bytes // LOGIT_BYTES


def legal_logits_bytes(max_query_rows: int, max_keys: int, max_logits_bytes: int) -> int:
    """Most bytes of logits that a step needs under a kept cap: the cap, or the whole matrix where that is smaller."""
    return min(logits_elements(max_logits_bytes), max_query_rows * max_keys) * LOGIT_BYTES


def scratch_width(keys: int) -> int:
    """`keys` rounded up to one eighth of its power of two: at most eight widths per doubling of the context."""
    step = 1 << max(0, keys.bit_length() - 4)
    return -(-keys // step) * step


def scratch_shape(keys: int, elements: int) -> tuple[int, int]:
    """(rows, width) of the logits view for a group of `keys` under a cap of `elements`; rows * width <= elements.

    The shape depends on the width alone, so that one flat buffer serves a small fixed set of views.
    """
    if keys < 1 or elements < 1:
        raise ValueError(f"keys and elements must be at least 1, got {keys} and {elements}")
    width = min(scratch_width(keys), elements)
    return elements // width, width


def split_chunks(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    workspace_size: int,
    max_logits_bytes: int,
    request_offset: int = 0,
    strict_cap: bool = False,
    fixed_shapes: bool = False,
) -> list[Chunk]:
    """Chunks of one step's prefill requests, in row order; requests without rows may be left out.

    `seq_lens` are (compressed) key counts at the end of the step, `query_lens` the new rows, `workspace_size` W in
    rows. `request_offset` is added to the request indices. Raises ValueError for lists that differ in length, negative
    counts, or caps below one row and one logit where `strict_cap` has to keep them.
    """
    _check_lens(seq_lens, query_lens)
    elements = logits_elements(max_logits_bytes)
    if strict_cap:
        _check_caps(workspace_size, max_logits_bytes)

    def rows_at_once(keys: int, rows: int) -> int:
        if keys == 0:
            return rows
        if fixed_shapes and keys <= elements:
            return scratch_shape(keys, elements)[0]
        return elements // keys

    chunks: list[Chunk] = []
    first = 0
    while first < len(seq_lens):
        keys, rows, last = seq_lens[first], query_lens[first], first + 1
        while last < len(seq_lens):
            more_keys, more_rows = keys + seq_lens[last], rows + query_lens[last]
            if more_keys > workspace_size or more_rows > rows_at_once(more_keys, more_rows):
                break
            keys, rows, last = more_keys, more_rows, last + 1
        span = min(keys, workspace_size, elements) if strict_cap else keys
        at_once = max(1, rows_at_once(span, rows))
        slices = _slices(keys, span) if span < keys else ()
        gathers = strict_cap and keys > workspace_size
        chunks += [
            Chunk(request_offset + first, request_offset + last, start, min(start + at_once, rows), slices, gathers)
            for start in range(0, rows, at_once)
        ]
        first = last
    return chunks


def count_launches(chunks: Sequence[Chunk]) -> int:
    """Scoring launches of one layer: one a chunk, or one a key slice where keys are cut."""
    return sum(max(1, len(chunk.key_slices)) for chunk in chunks)


def _slices(keys: int, span: int) -> KeySlices:
    return tuple((start, min(start + span, keys)) for start in range(0, keys, span))


def _check_lens(seq_lens: Sequence[int], query_lens: Sequence[int]) -> None:
    if len(seq_lens) != len(query_lens):
        raise ValueError(f"seq_lens and query_lens differ in length: {len(seq_lens)} and {len(query_lens)}")
    if min(seq_lens, default=0) < 0 or min(query_lens, default=0) < 0:
        raise ValueError("seq_lens and query_lens may not be negative")


def _check_caps(workspace_size: int, max_logits_bytes: int) -> None:
    if max_logits_bytes < LOGIT_BYTES:
        raise ValueError(
            f"--sparse-indexer-max-logits-mb leaves {max_logits_bytes} bytes; one logit takes {LOGIT_BYTES}"
        )
    if workspace_size < 1:
        raise ValueError(f"the indexer workspace must have at least 1 row, got {workspace_size}")
