"""A rank's rows as a batch of its own: the layouts' own batches, and the rows back, for any rows at all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.head_tail import head_tail
from parallel.interleave import interleave
from parallel.local import local_batch
from parallel.tables import ranges

REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), min_size=1, max_size=8)


def starts(query_lens: list[int]) -> np.ndarray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(query_lens)])


@given(REQUESTS, st.integers(1, 8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_head_tail_gives_the_layouts_own_batch(
    requests: list[tuple[int, int]], ranks: int, prefilling: list[bool]
) -> None:
    new, prefix = (list(part) for part in zip(*requests, strict=True))
    layout = head_tail(new, prefix, prefilling[: len(new)], ranks)
    for rank in range(ranks):
        own = layout.rank_batch(rank)
        part = local_batch(layout.rows(rank), starts(new), np.add(new, prefix))
        # NOTE: neighbouring segments of one request (2P segments, P ranks of which one holds both) become one entry.
        same_rows = ranges(part.start_pos, part.seq_lens), ranges(own.start_pos, own.seq_lens)
        assert np.array_equal(*same_rows)
        lengths = np.diff(part.query_start), np.diff(own.query_start)
        assert np.array_equal(np.repeat(part.request, lengths[0]), np.repeat(own.request, lengths[1]))
        assert part.query_start[-1] == own.query_start[-1] == layout.rank_rows[rank]


@given(REQUESTS, st.data())
def test_any_rows(requests: list[tuple[int, int]], data: st.DataObject) -> None:
    new, prefix = (list(part) for part in zip(*requests, strict=True))
    total = sum(new)
    rows = data.draw(st.lists(st.integers(0, total - 1), unique=True, max_size=30)) if total else []
    part = local_batch(rows, starts(new), np.add(new, prefix))
    owner = np.repeat(np.arange(len(new)), new)
    position = ranges(np.array(prefix), np.add(new, prefix))
    lengths = np.diff(part.query_start)
    assert np.array_equal(part.seq_lens - part.start_pos, lengths)
    assert np.repeat(part.request, lengths).tolist() == owner[rows].tolist()
    assert ranges(part.start_pos, part.seq_lens).tolist() == position[rows].tolist()


def test_interleave_is_one_entry_a_row() -> None:
    split = interleave([7], 2)
    part = local_batch(split.rows(1), [0, 7], [10])
    assert part.seq_lens.tolist() == [5, 7, 9]
    assert np.diff(part.query_start).tolist() == [1, 1, 1]


def test_no_rows_and_wrong_rows() -> None:
    none = local_batch([], [0, 3], [3])
    assert (none.query_start.tolist(), none.seq_lens.tolist()) == ([0, 0], [0])
    with pytest.raises(ValueError, match="rows: 0 to 3, the step has 3"):
        local_batch([0, 3], [0, 3], [3])
