"""Head-tail layout against a plain per-row reading of its rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.head_tail import HeadTail, head_tail, replicated_requests, segment_size, shards_decode

requests = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 500), st.booleans()), max_size=12)
Request = tuple[int, int, bool]


def layout_of(batch: list[Request], pcp: int, dcp: int = 1, shard_decode: bool | None = None) -> HeadTail:
    scheduled, computed, prefilling = zip(*batch, strict=True) if batch else ((), (), ())
    return head_tail(scheduled, computed, prefilling, pcp, dcp, shard_decode)


def plain_rows(batch: list[Request], pcp: int, dcp: int, shard_decode: bool) -> list[list[int]]:
    """Global rows per rank, one row at a time."""
    decodes: list[list[int]] = [[] for _ in range(pcp)]
    prefills: list[list[int]] = [[] for _ in range(pcp)]
    first = turn = 0
    for query_len, _, prefilling in batch:
        size = -(-query_len // (2 * pcp))
        whole = not prefilling or (dcp > 1 and (2 * pcp - 1) * size >= query_len)
        into = prefills if prefilling else decodes
        for row in range(query_len):
            if not whole:
                segment = row // size
                prefills[min(segment, 2 * pcp - 1 - segment)].append(first + row)
            elif shard_decode:
                into[turn % pcp].append(first + row)
            else:
                for rank in range(pcp):
                    into[rank].append(first + row)
        turn += whole and query_len > 0
        first += query_len
    return [a + b for a, b in zip(decodes, prefills, strict=True)]


@settings(max_examples=200)
@given(requests, st.integers(1, 16), st.sampled_from([1, 2, 4]), st.booleans())
def test_rows_per_rank(batch: list[Request], pcp: int, dcp: int, shard_decode: bool) -> None:
    layout = layout_of(batch, pcp, dcp, shard_decode)
    assert [layout.rows(rank).tolist() for rank in range(pcp)] == plain_rows(batch, pcp, dcp, shard_decode)
    assert layout.rank_rows.tolist() == [len(layout.rows(rank)) for rank in range(pcp)]
    assert layout.total_rows == sum(query_len for query_len, _, _ in batch)


@settings(max_examples=200)
@given(requests, st.integers(1, 16), st.sampled_from([1, 2, 4]), st.integers(0, 7))
def test_split_then_restore_is_the_identity(batch: list[Request], pcp: int, dcp: int, extra: int) -> None:
    layout = layout_of(batch, pcp, dcp)
    length = layout.dispatch_rows + extra
    tables = layout.tables(length)
    hidden = np.random.default_rng(0).standard_normal((layout.total_rows, 3))
    padding = np.full((length, 3), np.nan)
    gathered = np.concatenate([np.concatenate([hidden[layout.rows(rank)], padding])[:length] for rank in range(pcp)])
    assert np.array_equal(gathered[tables.hidden_restore_idx], hidden)
    assert np.array_equal(tables.padded_gather_idx[tables.hidden_restore_idx], np.arange(layout.total_rows))
    written = tables.padded_gather_idx[tables.gathered_kv_write_mask]
    assert np.array_equal(np.sort(written), np.arange(layout.total_rows))


@given(requests, st.integers(1, 16), st.sampled_from([1, 2, 4]))
def test_rank_batches_carry_the_positions(batch: list[Request], pcp: int, dcp: int) -> None:
    layout = layout_of(batch, pcp, dcp)
    positions = [computed + i for query_len, computed, _ in batch for i in range(query_len)]
    owner = [request for request, (query_len, _, _) in enumerate(batch) for _ in range(query_len)]
    for rank in range(pcp):
        rows = layout.rows(rank)
        assert layout.positions(rank).tolist() == [positions[g] for g in rows]
        part = layout.rank_batch(rank)
        lengths = np.diff(part.query_start)
        assert part.query_start[-1] == len(rows)
        assert np.repeat(part.request, lengths).tolist() == [owner[g] for g in rows]
        local = 0
        for segment, seq_len in zip(layout.segments(rank), part.seq_lens.tolist(), strict=False):
            assert (segment.local_start, segment.start, segment.start_pos) == (
                local,
                rows[local],
                positions[rows[local]],
            )
            local = segment.local_stop
            assert seq_len == positions[rows[local - 1]] + 1


def test_a_rank_without_rows_keeps_one_empty_entry() -> None:
    layout = layout_of([(3, 0, True)], 4)
    assert layout.rank_rows.tolist() == [1, 1, 1, 0]
    part = layout.rank_batch(3)
    assert (part.request.tolist(), part.query_start.tolist(), part.seq_lens.tolist()) == ([0], [0, 0], [0])
    assert layout.segments(3) == []


def test_decodes_are_dealt_out_in_batch_order() -> None:
    layout = layout_of([(1, 9, False), (8, 0, True), (0, 5, False), (1, 7, False), (1, 4, False)], 2)
    assert [layout.request[layout.rank == rank].tolist() for rank in range(2)] == [[0, 4, 1, 1], [3, 1, 1]]


@pytest.mark.parametrize(("query_len", "whole"), [(1, True), (7, True), (8, False), (15, False), (14, True)])
def test_short_prefills_are_replicated_only_under_dcp(query_len: int, whole: bool) -> None:
    assert replicated_requests([query_len], [True], 4, 4).tolist() == [whole]
    assert replicated_requests([query_len], [True], 4, 1).tolist() == [False]
    assert replicated_requests([query_len], [False], 4, 1).tolist() == [True]


def test_sizes() -> None:
    assert [segment_size(n, 2) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    assert (shards_decode(1, 1), shards_decode(2, 1), shards_decode(2, 2)) == (False, True, False)


def test_bad_input_names_the_field() -> None:
    with pytest.raises(ValueError, match="pcp_size and dcp_size"):
        head_tail([1], [0], [True], 0)
    with pytest.raises(ValueError, match="num_scheduled, num_computed and is_prefilling differ"):
        head_tail([1, 2], [0], [True], 2)
    with pytest.raises(ValueError, match="may not be negative"):
        head_tail([1], [-1], [True], 2)
    with pytest.raises(ValueError, match="rank 2"):
        head_tail([1], [0], [True], 2).rows(2)
