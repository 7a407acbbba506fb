"""A row's bits do not depend on the batch it runs in, on the cut of its prompt, or on the scratch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import paged
from attention.indexer import ragged
from attention.scratch import Scratch
from tests.attention.cases import INDEX_KINDS, Case, make, part

SCALE = 0.05
TOPK = 64


def forward(case: Case, nbytes: int = 1 << 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scratch = Scratch(nbytes)
    ids = ragged.select(case.batch, case.q, case.head_weights, case.index, TOPK, scratch)
    out, lse = paged.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids, SCALE, scratch, return_lse=True)
    return ids, out, lse


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@settings(deadline=None, max_examples=40)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([1, 64, 65, 100, 191, 192, 300])), min_size=1, max_size=5
    ),
    kind=st.sampled_from(INDEX_KINDS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    index_heads=st.sampled_from([1, 4, 6, 32]),
    heads=st.sampled_from([1, 4, 6]),
    cut=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_solo_chunked_and_any_scratch_give_the_same_bits(
    requests: list[tuple[int, int]],
    kind: str,
    dtype: torch.dtype,
    index_heads: int,
    heads: int,
    cut: int,
    seed: int,
) -> None:
    requests = [(min(rows, length), length) for rows, length in requests]
    case = make(requests, kind, dtype, index_heads, heads, seed)
    whole = forward(case)
    assert same(forward(case, 1 << 19), whole)
    for r, (rows, _) in enumerate(requests):
        start = int(case.batch.query_start[r])
        for first in range(0, rows, cut):
            stop = min(first + cut, rows)
            piece = forward(part(case, r, first, stop))
            assert same(piece, tuple(x[start + first : start + stop] for x in whole))
    for first in range(0, case.batch.rows, cut):
        stop = min(first + cut, case.batch.rows)
        rows = slice(first, stop)
        inputs = (case.q[rows], case.head_weights[rows], case.q_nope[rows], case.q_rope[rows])
        piece = forward(Case(case.batch.part(first, stop), case.index, case.latent, *inputs))
        assert same(piece, tuple(x[rows] for x in whole))


@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_tight_scratch_over_a_long_context(kind: str) -> None:
    """One row of scores at a time against all at once."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    case = make([(20, 9000), (1, 5000)], kind, dtype, index_heads=8)
    assert same(forward(case, 1 << 18), forward(case, 1 << 23))
