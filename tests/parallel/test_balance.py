"""Work per rank, and the balance that head-tail promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.balance import (
    halves_visits,
    head_tail_visits,
    imbalance,
    range_visits,
    row_visits,
    step_shares,
    whole_shares,
)
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


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 200)), min_size=1, max_size=6),
    st.integers(2, 6),
    st.sampled_from(["head-tail", "interleave", "zigzag"]),
    st.sampled_from([None, 16]),
)
def test_shares_of_a_step_count_every_row_and_visit_once(
    requests: list[tuple[int, int]], ranks: int, split: str, limit: int | None
) -> None:
    new, prefix = (list(part) for part in zip(*requests, strict=True))
    shares = step_shares(split, new, prefix, ranks, limit)
    assert shares is not None
    visits = sum(min(p + 1, limit or p + 1) for n, start in requests for p in range(start, start + n))
    whole = whole_shares(new, prefix, ranks, limit)
    assert whole.visits == [visits] * ranks and whole.imbalance == 1.0
    if shares != whole:  # the split applies
        assert (sum(shares.rows), sum(shares.visits)) == (sum(new), visits)


def test_shares_of_one_row_requests_are_dealt_out() -> None:
    shares = step_shares("head-tail", [1, 8, 1, 1], [10, 0, 20, 30], 2)
    assert shares is not None
    assert shares.rows == [4 + 2, 4 + 1]  # requests 0 and 3 on rank 0, request 2 on rank 1
    assert shares.visits == [(1 + 2 + 7 + 8) + 11 + 31, (3 + 4 + 5 + 6) + 21]
    assert step_shares("somebody-else's", [4], [0], 2) is None


def test_the_planner_counts_by_the_same_function() -> None:
    from types import SimpleNamespace

    from glm_runtime.plan.ranks import prefill_shares

    for split in ("head-tail", "interleave", "zigzag"):
        setup: Any = SimpleNamespace(sizes=SimpleNamespace(pcp=2, dcp=1), split=split)
        step: Any = SimpleNamespace(rows=1000, start=500, end=1500)
        planned, shares = prefill_shares(setup, step, 64), step_shares(split, [1000], [500], 2, 64)
        assert shares is not None
        assert (list(planned.rows), list(planned.visits)) == (shares.rows, shares.visits)
        assert planned.imbalance == shares.imbalance
