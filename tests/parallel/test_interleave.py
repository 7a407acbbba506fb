"""SGLang's splits: every row once, gathered back, and the lists that its metadata carries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from parallel.interleave import Interleave, Zigzag, interleave, interleave_applies, zigzag, zigzag_applies

lens = st.lists(st.integers(1, 120), min_size=1, max_size=6)


def gathered(layout: Interleave | Zigzag, hidden: np.ndarray) -> np.ndarray:
    length = layout.padded_rows()
    parts = [np.concatenate([hidden[layout.rows(r)], np.full(length, -1)])[:length] for r in range(layout.cp_size)]
    return np.concatenate(parts)


@given(lens, st.integers(2, 16))
def test_interleave_round_trip(extend: list[int], cp: int) -> None:
    assume(interleave_applies(extend, cp))
    layout = interleave(extend, cp)
    hidden = np.arange(sum(extend)) * 3
    assert [len(layout.rows(rank)) for rank in range(cp)] == layout.rank_rows()
    assert layout.padded_rows() % cp == 0
    assert np.array_equal(gathered(layout, hidden)[layout.tables().hidden_restore_idx], hidden)


@given(st.data(), st.integers(2, 16), st.integers(1, 5))
def test_zigzag_round_trip(data: st.DataObject, cp: int, requests: int) -> None:
    extend = data.draw(st.lists(st.integers(2 * cp, 2 * cp + 90), min_size=requests, max_size=requests))
    prefix = data.draw(st.lists(st.integers(0, 50), min_size=requests, max_size=requests))
    layout = zigzag(extend, prefix, cp)
    hidden = np.arange(sum(extend)) * 3
    assert [len(layout.rows(rank)) for rank in range(cp)] == layout.rank_rows()
    assert layout.padded_rows() % (2 * cp) == 0
    assert np.array_equal(gathered(layout, hidden)[layout.tables().hidden_restore_idx], hidden)

    # The way SGLang itself splits and restores: by the two index lists.
    blocks = np.split(hidden, np.cumsum(layout.split_list())[:-1])
    local = [np.concatenate([blocks[i] for i in layout.zigzag_index(rank)]) for rank in range(cp)]
    assert all(np.array_equal(local[rank], hidden[layout.rows(rank)]) for rank in range(cp))
    back = np.split(np.concatenate(local), np.cumsum(layout.reverse_split_len())[:-1])
    assert np.array_equal(np.concatenate([back[i] for i in layout.cp_reverse_index()]), hidden)
    for rank in range(cp):
        head, tail = layout.query_lens(rank)
        assert sum(head) + sum(tail) == layout.rank_rows()[rank]
    assert layout.kv_lens(0)[1] == [p + e for p, e in zip(prefix, extend, strict=True)]


def test_where_they_do_not_apply() -> None:
    assert not interleave_applies([1, 1], 3)
    assert not interleave_applies([8], 1)
    assert not zigzag_applies([8, 3], 2)
    assert zigzag_applies([4], 2)
    with pytest.raises(ValueError, match="at least 3 tokens, got 2"):
        interleave([1, 1], 3)
    with pytest.raises(ValueError, match="at least 4 tokens in each request"):
        zigzag([8, 3], [0, 0], 2)
    with pytest.raises(ValueError, match="differ in length"):
        zigzag([8, 8], [0], 2)
