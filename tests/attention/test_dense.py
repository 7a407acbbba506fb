"""The dense branch: who takes it, and that its ids are what the indexer would have returned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.dense import causal_ids, dense_requests, dense_rows, page_runs
from attention.indexer import ragged
from attention.scratch import Scratch
from tests.attention.cases import make

TOPK = 64


@settings(deadline=None, max_examples=30)
@given(
    requests=st.lists(st.tuples(st.integers(0, 70), st.integers(1, TOPK)), min_size=1, max_size=5),
    padding=st.integers(0, 3),
)
def test_ids_are_the_indexers(requests: list[tuple[int, int]], padding: int) -> None:
    case = make([(min(n, length), length) for n, length in requests])
    want = ragged.select(case.batch, case.q, case.head_weights, case.index, TOPK, Scratch(1 << 20))
    found = causal_ids(case.batch, TOPK, case.batch.rows + padding)
    assert found.dtype == torch.int32
    assert torch.equal(found[: case.batch.rows], want)
    assert (found[case.batch.rows :] == -1).all()


def test_judged_by_request() -> None:
    case = make([(64, 64), (3, 65), (1, 10), (1, 500)])
    assert dense_requests(case.batch, TOPK).tolist() == [True, False, True, False]
    assert dense_rows(case.batch, TOPK) == 65


def test_runs_of_requests_that_read_pages() -> None:
    """Decoding rows and dense requests do; neighbours of a kind are one run, a request without rows is no decode."""
    case = make([(64, 64), (1, 500), (3, 65), (9, 700), (1, 10), (0, 90), (5, 66)])
    assert list(page_runs(case.batch, TOPK)) == [(True, 0, 2), (False, 2, 4), (True, 4, 6), (False, 6, 7)]


def test_a_long_context_is_refused() -> None:
    case = make([(3, 65)])
    with pytest.raises(ValueError, match="topk: 65 keys are visible"):
        causal_ids(case.batch, TOPK, 3)
    with pytest.raises(ValueError, match="rows: 2, the batch has 3"):
        causal_ids(case.batch, TOPK, 2)
