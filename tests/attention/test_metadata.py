"""Chunk metadata: the bounds of each row are exactly its visible keys, in every slice and on every rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.indexer.metadata import Sharding, chunk_metadata
from attention.indexer.split import split_chunks

batches = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 20)), min_size=1, max_size=6)
Batch = list[tuple[int, int]]


def rows_of(batch: Batch) -> list[tuple[int, int]]:
    """(request, position) of every query row."""
    return [(request, old + i) for request, (old, new) in enumerate(batch) for i in range(new)]


@settings(max_examples=150, deadline=None)
@given(batches, st.sampled_from([1, 2, 4]), st.integers(1, 300), st.integers(4, 3000), st.integers(1, 4))
def test_rows_see_their_keys_and_no_others(batch: Batch, ratio: int, workspace: int, cap: int, world: int) -> None:
    ends, new = [o + n for o, n in batch], [n for _, n in batch]
    chunks = split_chunks([n // ratio for n in ends], new, workspace, cap, strict_cap=True)
    rows = rows_of(batch)
    for rank in range(world):
        built = chunk_metadata(chunks, ends, new, ratio, Sharding(world, rank, 2), first_token=5)
        scored = 0
        for chunk, data in zip(chunks, built, strict=True):
            members = range(chunk.request_start, chunk.request_stop)
            # The rank's keys, in gathered order: (request, compressed position).
            keys = [(r, p) for r in members for p in range(ends[r] // ratio) if p // 2 % world == rank]
            count = chunk.query_stop - chunk.query_start
            if data is None:
                assert all(ends[r] // ratio == 0 for r in members)
                scored += count
                continue
            assert data.group.local_keys == len(keys)
            assert data.group.total_keys == sum(ends[r] // ratio for r in members)
            assert data.group.max_keys == max(ends[r] // ratio for r in members)
            assert (data.token_start, data.token_stop) == (5 + scored, 5 + scored + count)
            for i, (request, position) in enumerate(rows[scored : scored + count]):
                ks, ke = int(data.cu_seqlen_ks[i]), int(data.cu_seqlen_ke[i])
                assert keys[ks:ke] == [k for k in keys if k[0] == request and k[1] < (position + 1) // ratio]
            scored += count
        assert scored == len(rows)


@settings(deadline=None)
@given(batches, st.integers(1, 60), st.integers(4, 400))
def test_key_slices_together_give_the_whole_range(batch: Batch, workspace: int, cap: int) -> None:
    ends, new = [o + n for o, n in batch], [n for _, n in batch]
    chunks = split_chunks(ends, new, workspace, cap, strict_cap=True)
    for data in chunk_metadata(chunks, ends, new):
        if data is None or not data.key_slices:
            continue
        seen: list[list[int]] = [[] for _ in data.cu_seqlen_ks]
        for start, stop in data.key_slices:
            ks, ke = data.slice_bounds(start, stop)
            assert (ks <= ke).all() and (ks >= 0).all() and (ke <= stop - start).all()
            for row, low, high in zip(seen, ks.tolist(), ke.tolist(), strict=True):
                row += range(start + low, start + high)
        whole = zip(data.cu_seqlen_ks.tolist(), data.cu_seqlen_ke.tolist(), strict=True)
        assert seen == [list(range(low, high)) for low, high in whole]


def test_one_entry_per_key_row_and_one_gather_per_group() -> None:
    chunks = split_chunks([6, 4], [4, 2], 10, 4 * 60)
    (data,) = chunk_metadata(chunks, [6, 4], [4, 2])
    assert data is not None
    assert data.group.token_to_seq.tolist() == [0] * 6 + [1] * 4
    assert data.group.cu_seq_lens.tolist() == [0, 6, 10]
    assert data.cu_seqlen_ks.tolist() == [0, 0, 0, 0, 6, 6]
    assert data.cu_seqlen_ke.tolist() == [3, 4, 5, 6, 9, 10]

    slices = chunk_metadata(split_chunks([6], [4], 10, 4 * 12), [6], [4])
    assert [s.skip_kv_gather for s in slices if s is not None] == [False, True]
    first, second = slices
    assert first is not None and second is not None
    assert first.group is second.group


def test_a_rank_without_keys_has_empty_ranges() -> None:
    (data,) = chunk_metadata(split_chunks([2], [2], 10, 400), [2], [2], sharding=Sharding(4, 3, 1))
    assert data is not None
    assert data.group.local_keys == 0
    assert data.cu_seqlen_ks.tolist() == data.cu_seqlen_ke.tolist() == [0, 0]


def test_bounds_are_int32() -> None:
    (data,) = chunk_metadata(split_chunks([8], [3], 10, 400), [8], [3])
    assert data is not None
    arrays = (data.cu_seqlen_ks, data.cu_seqlen_ke, data.group.token_to_seq, data.group.local_cu_seq_lens)
    assert all(array.dtype == np.int32 for array in arrays)


def test_bad_input_names_the_field() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        chunk_metadata([], [1], [1, 1])
    with pytest.raises(ValueError, match="compress_ratio"):
        chunk_metadata([], [1], [1], compress_ratio=0)
