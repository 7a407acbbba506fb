"""Groups of the prefill workspace."""

from __future__ import annotations

from itertools import zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.workspace import (
    gather_bytes,
    plan_groups,
    workspace_bytes,
    workspace_factor,
    workspace_rows,
    workspace_starts,
)


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), max_size=30), st.integers(100, 400), st.integers(0, 7))
def test_groups_cover_the_requests_and_fit(seq_lens: list[int], rows: int, offset: int) -> None:
    groups = plan_groups(seq_lens, rows, offset)
    members = [request for g in groups for request in range(g.request_start, g.request_stop)]
    assert members == list(range(offset, offset + len(seq_lens)))
    for group, after in zip_longest(groups, groups[1:]):
        lengths = [seq_lens[r - offset] for r in range(group.request_start, group.request_stop)]
        assert group.rows == sum(lengths) <= rows
        assert list(group.starts) == [sum(lengths[:i]) for i in range(len(lengths))]
        if after is not None:
            assert group.rows + seq_lens[after.request_start - offset] > rows
    assert len(workspace_starts(groups)) == len(seq_lens)


def test_exact_fit_and_zero_lengths_join() -> None:
    groups = plan_groups([6, 4, 0, 1], 10)
    assert [(g.request_start, g.request_stop, g.starts) for g in groups] == [(0, 3, (0, 6, 10)), (3, 4, (0,))]


def test_a_context_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"request 3 .* 11 rows.*--sparse-mla-prefill-workspace-factor"):
        plan_groups([4, 11], 10, request_offset=2)
    with pytest.raises(ValueError, match="may not be negative"):
        plan_groups([-1], 10)


def test_factor_rule() -> None:
    assert [workspace_factor(n) for n in (1, 262_144, 262_145, 2**20)] == [5, 5, 2, 2]
    assert workspace_rows(2**20) == 2_097_152
    assert workspace_rows(131_072) == 655_360
    assert workspace_rows(1000, factor=3) == 3000
    with pytest.raises(ValueError, match="--sparse-mla-prefill-workspace-factor must be at least 2, got 1"):
        workspace_rows(1000, factor=1)


def test_two_full_requests_always_fit() -> None:
    for length in (1000, 262_144, 2**20):
        assert len(plan_groups([length, length], workspace_rows(length))) == 1


def test_bytes() -> None:
    assert workspace_bytes(workspace_rows(2**20)) == 2_097_152 * 1152
    assert workspace_bytes(1000, dcp_size=4) == 1250 * 1152
    assert gather_bytes(2**20, 656) == (687_865_856, 1_207_959_552)
