"""Gather tables as inverse functions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.tables import gather_bytes, gather_tables, ranges


def rows(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_seven_tokens_over_two_ranks() -> None:
    tables = gather_tables([rows(0, 1, 6), rows(2, 3, 4, 5)], 7)
    assert tables.padded_rows == 4
    assert tables.hidden_restore_idx.tolist() == [0, 1, 4, 5, 6, 7, 2]
    assert tables.padded_gather_idx.tolist() == [0, 1, 6, 0, 2, 3, 4, 5]
    assert tables.gathered_kv_write_mask.tolist() == [True, True, True, False, True, True, True, True]


def test_copies_restore_to_the_first_rank_and_are_written_once() -> None:
    tables = gather_tables([rows(0, 1), rows(0, 2), rows(0)], 3)
    assert tables.hidden_restore_idx.tolist() == [0, 1, 3]
    assert tables.gathered_kv_write_mask.tolist() == [True, True, False, True, False, False]


def test_slots_are_padded_where_nothing_is_written() -> None:
    tables = gather_tables([rows(0, 2), rows(1)], 3)
    assert tables.slots(rows(70, 71, 72)).tolist() == [70, 72, 71, -1]
    assert tables.slots(rows(70, 71, 72), pad_slot=9).tolist() == [70, 72, 71, 9]


def test_a_graph_size_below_the_longest_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="padded_rows is 1"):
        gather_tables([rows(0, 1)], 2, padded_rows=1)


def test_a_row_without_holder_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 is held by no rank"):
        gather_tables([rows(0), rows(2)], 3)


def test_no_rows() -> None:
    tables = gather_tables([rows(), rows()], 0, padded_rows=2)
    assert tables.padded_gather_idx.tolist() == [0, 0, 0, 0]
    assert not tables.gathered_kv_write_mask.any()


@given(st.data(), st.integers(1, 16), st.integers(0, 60), st.integers(0, 5))
def test_identities_for_any_holding(data: st.DataObject, ranks: int, total: int, extra: int) -> None:
    holders = [data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=3)) for _ in range(total)]
    held = [rows(*[g for g in range(total) if rank in holders[g]]) for rank in range(ranks)]
    length = max(len(part) for part in held) + extra
    tables = gather_tables(held, total, length)

    restore, gather = tables.hidden_restore_idx, tables.padded_gather_idx
    assert gather[restore].tolist() == list(range(total))
    assert [int(t) // length for t in restore] == [min(where) for where in holders]
    assert sorted(gather[tables.gathered_kv_write_mask].tolist()) == list(range(total))
    states = np.arange(total) * 10
    gathered = np.concatenate([np.pad(states[part], (0, length - len(part)), constant_values=-7) for part in held])
    assert gathered[restore].tolist() == states.tolist()


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 9))))
def test_ranges(parts: list[tuple[int, int]]) -> None:
    starts = rows(*[start for start, _ in parts])
    stops = rows(*[start + n for start, n in parts])
    assert ranges(starts, stops).tolist() == [i for start, n in parts for i in range(start, start + n)]


def test_gather_bytes() -> None:
    assert gather_bytes(padded_rows=4096, ranks=4, row_bytes=1152) == 3 * 4096 * 1152
