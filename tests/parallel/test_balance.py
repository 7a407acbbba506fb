"""Work per rank, and the balance that head-tail promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.balance import halves_visits, head_tail_visits, imbalance, range_visits, row_visits
from parallel.head_tail import head_tail
from parallel.interleave import interleave, zigzag


@given(st.integers(0, 300), st.integers(0, 200), st.one_of(st.none(), st.integers(1, 300)))
def test_range_visits(start: int, rows: int, limit: int | None) -> None:
    plain = sum(p + 1 if limit is None else min(p + 1, limit) for p in range(start, start + rows))
    assert range_visits(np.array([start]), np.array([rows]), limit).tolist() == [plain]


@given(st.integers(1, 4000), st.integers(1, 16))
def test_fresh_prompt_is_within_one_segment_of_the_mean(query_len: int, pcp: int) -> None:
    layout = head_tail([query_len], [0], [True], pcp)
    work = head_tail_visits(layout)
    assert work.sum() == query_len * (query_len + 1) // 2
    segment = int(range_visits(layout.start_pos, layout.stop - layout.start).max())
    # NOTE: where clipping leaves the last segment empty, the rank of the new last one can be further off, by up to two.
    allowed = 1 if len(layout.rank) == 2 * pcp else 2
    assert abs(work - work.mean()).max() <= allowed * segment


@given(st.integers(1, 40), st.integers(1, 16), st.integers(0, 1000))
def test_whole_segments_balance_exactly(size: int, pcp: int, computed: int) -> None:
    work = head_tail_visits(head_tail([size * 2 * pcp], [computed], [True], pcp))
    assert len(set(work.tolist())) == 1
    assert imbalance(work) == 1.0


@given(st.lists(st.tuples(st.integers(32, 90), st.integers(0, 200)), min_size=1, max_size=4), st.integers(2, 16))
def test_all_splits_do_the_same_work(batch: list[tuple[int, int]], ranks: int) -> None:
    new, old = [n for n, _ in batch], [c for _, c in batch]
    ends = [n + c for n, c in batch]
    positions = np.array([c + i for n, c in batch for i in range(n)])
    for limit in (None, 64):
        total = int(np.minimum(positions + 1, limit or 10**9).sum())
        layout = head_tail(new, old, [True] * len(batch), ranks)
        assert head_tail_visits(layout, limit).sum() == total
        assert row_visits(interleave(new, ranks), positions, limit).sum() == total
        assert row_visits(zigzag(new, old, ranks), positions, limit).sum() == total
        assert halves_visits(ends, new, ranks, limit).sum() == total


def test_plain_halves_are_three_to_one() -> None:
    work = halves_visits([8192], [8192], 2)
    assert work[1] / work[0] == pytest.approx(3, rel=1e-3)
    assert imbalance(work) == pytest.approx(1.5, rel=1e-3)


def test_no_work_is_balanced() -> None:
    assert imbalance([0, 0]) == 1.0
