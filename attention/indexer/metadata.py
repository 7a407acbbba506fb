"""What one indexer chunk needs: which gathered keys each query row scores, and where they come from.

    gathered keys of a group     | request 0 | request 1        |     cu_seq_lens   0, N0, N0+N1
    token_to_seq                 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1        one entry per KEY row, not per query row
    query row at position p      ....... ks |<---- ke - ks --->|      ks = start of its request, ke = ks + visible(p)

    visible(p) = (p + 1) // ratio, and under DCP its part on this rank (`parallel.dcp.local_lengths`)

Keys are gathered once per request group and reused by its later query slices. A chunk whose group has no (compressed)
key is dropped: its rows keep -1. Under DCP ks, ke and local_cu_seq_lens count this rank's keys; a rank may hold none.
Source: vLLM 0.33 v1/attention/backends/mla/indexer.py, facts section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attention.indexer.split import Chunk, KeySlices
from parallel.dcp import local_lengths
from parallel.tables import Ints

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Decode-context-parallel placement of the index keys; `interleave` counts compressed rows."""

    size: int = 1
    rank: int = 0
    interleave: int = 1


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Gathered keys of the requests [request_start, request_stop), shared by all query slices of the group.

    `token_to_seq` int32 [sum N] request within the group of each key row; `cu_seq_lens` int32 [n+1] and
    `local_cu_seq_lens` int32 [n+1] running keys of all ranks and of this one; `max_keys` the longest request.
    """

    request_start: int
    request_stop: int
    token_to_seq: Int32s
    cu_seq_lens: Int32s
    local_cu_seq_lens: Int32s
    max_keys: int

    @property
    def total_keys(self) -> int:
        """Keys of all ranks."""
        return int(self.cu_seq_lens[-1])

    @property
    def local_keys(self) -> int:
        """Keys of this rank, the rows that it gathers; 0 is possible under DCP."""
        return int(self.local_cu_seq_lens[-1])


@dataclass(frozen=True, slots=True)
class ChunkMetadata:
    """One chunk: batch rows [token_start, token_stop), bounds int32 [rows] into the gathered keys, and its group.

    `block_table` rows of the chunk are [group.request_start, group.request_stop). `key_slices` and `gathers_slices` are
    those of the `Chunk`.
    """

    group: KeyGroup
    token_start: int
    token_stop: int
    cu_seqlen_ks: Int32s
    cu_seqlen_ke: Int32s
    skip_kv_gather: bool
    key_slices: KeySlices = ()
    gathers_slices: bool = False

    def slice_bounds(self, start: int, stop: int) -> tuple[Int32s, Int32s]:
        """(ks, ke) int32 [rows] of the key slice [start, stop), relative to its first key; ks == ke sees nothing."""
        ks = np.clip(self.cu_seqlen_ks, start, stop) - np.int32(start)
        ke = np.clip(self.cu_seqlen_ke, start, stop) - np.int32(start)
        return ks, ke


def chunk_metadata(
    chunks: Sequence[Chunk],
    seq_lens: Sequence[int] | Ints,
    query_lens: Sequence[int] | Ints,
    compress_ratio: int = 1,
    sharding: Sharding | None = None,
    first_token: int = 0,
) -> list[ChunkMetadata | None]:
    """Metadata of each chunk, None for one without keys.

    `seq_lens` (uncompressed, end of the step) and `query_lens` are those of the requests that the chunks index;
    `first_token` is the batch row of the first request's first query row.
    """
    ends = np.asarray(seq_lens, dtype=np.int64)
    rows = np.asarray(query_lens, dtype=np.int64)
    if len(ends) != len(rows):
        raise ValueError(f"seq_lens and query_lens differ in length: {len(ends)} and {len(rows)}")
    if compress_ratio < 1:
        raise ValueError(f"compress_ratio must be at least 1, got {compress_ratio}")
    shard = sharding or Sharding()
    row_start = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(rows)])

    built: list[ChunkMetadata | None] = []
    group: KeyGroup | None = None
    bounds: tuple[Int32s, Int32s] | None = None
    for chunk in chunks:
        span = slice(chunk.request_start, chunk.request_stop)
        if group is None or (group.request_start, group.request_stop) != (chunk.request_start, chunk.request_stop):
            group = _key_group(chunk, ends[span], compress_ratio, shard)
            bounds = None
        if group.total_keys == 0:
            built.append(None)
            continue
        if bounds is None:
            bounds = _row_bounds(group, ends[span], rows[span], compress_ratio, shard)
        token = first_token + int(row_start[chunk.request_start])
        built.append(
            ChunkMetadata(
                group=group,
                token_start=token + chunk.query_start,
                token_stop=token + chunk.query_stop,
                cu_seqlen_ks=bounds[0][chunk.query_start : chunk.query_stop],
                cu_seqlen_ke=bounds[1][chunk.query_start : chunk.query_stop],
                skip_kv_gather=chunk.skips_gather,
                key_slices=chunk.key_slices,
                gathers_slices=chunk.gathers_slices,
            )
        )
    return built


def _running(lengths: Ints) -> Int32s:
    totals: Int32s = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]).astype(np.int32)
    return totals


def _key_group(chunk: Chunk, ends: Ints, ratio: int, shard: Sharding) -> KeyGroup:
    keys = ends // ratio
    local = local_lengths(keys, shard.size, shard.rank, shard.interleave)
    return KeyGroup(
        request_start=chunk.request_start,
        request_stop=chunk.request_stop,
        token_to_seq=np.repeat(np.arange(len(keys), dtype=np.int32), keys),
        cu_seq_lens=_running(keys),
        local_cu_seq_lens=_running(local),
        max_keys=int(keys.max(initial=0)),
    )


def _row_bounds(group: KeyGroup, ends: Ints, rows: Ints, ratio: int, shard: Sharding) -> tuple[Int32s, Int32s]:
    # NOTE: lengths are expanded per row before they are localised; the other order gives wrong bounds.
    stops = np.cumsum(rows)
    seen = np.arange(int(rows.sum()), dtype=np.int64) + np.repeat(ends + 1 - stops, rows)
    visible = local_lengths(seen // ratio, shard.size, shard.rank, shard.interleave)
    ks = np.repeat(group.local_cu_seq_lens[:-1], rows)
    return ks, (ks + visible).astype(np.int32)
