"""The indexer's top-k: against the plain expression, at the edges, with ties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import kernels
from attention.batch import AttentionBatch
from attention.indexer import ragged
from attention.kernels.cpu_slices import least_bytes
from attention.kernels.reference import scores
from attention.kernels.score import quantise as quantise_row
from attention.layouts import INDEX_AMAX_FLOOR, IndexCache, load_index, quantise, store_index
from attention.scratch import Scratch, ScratchTooSmall
from tests.attention.cases import INDEX_KINDS, Case, make

LENGTHS = st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])


def check_row(found: torch.Tensor, row: torch.Tensor, topk: int, tolerance: float) -> None:
    """``found`` is ascending, has the right count, and leaves out nothing better by more than ``tolerance``."""
    ids = found[found >= 0].long()
    assert ids.shape[0] == min(topk, row.shape[0])
    assert (found[ids.shape[0] :] == -1).all()
    assert (ids.diff() > 0).all() and (ids.numel() == 0 or int(ids[-1]) < row.shape[0])
    rest = torch.ones(row.shape[0], dtype=torch.bool)
    rest[ids] = False
    if bool(rest.any()) and ids.numel():
        assert row[ids].min() >= row[rest].max() - tolerance


def check_case(case: Case, topk: int, nbytes: int = 1 << 20) -> None:
    found = ragged.select(case.batch, case.q, case.head_weights, case.index, topk, Scratch(nbytes))
    assert found.shape == (case.q.shape[0], topk) and found.dtype == torch.int32
    owners, positions = case.batch.row_requests().tolist(), case.batch.row_positions().tolist()
    q, weights = case.q, case.head_weights
    if case.index.kind == "fp8":
        values, scale = quantise(q, INDEX_AMAX_FLOOR)
        q, weights = values.float(), weights * scale
    for i, (r, position) in enumerate(zip(owners, positions, strict=True)):
        keys, key_scale = load_index(case.index, case.batch.context_slots(r)[: position + 1])
        row = scores(q[i : i + 1].double(), weights[i : i + 1].double(), keys.double(), key_scale.double())[0]
        check_row(found[i], row, topk, 1e-4 * max(1.0, float(row.abs().max())))


@settings(deadline=None, max_examples=60)
@given(
    requests=st.lists(st.tuples(st.integers(0, 9), LENGTHS), min_size=1, max_size=5),
    topk=st.sampled_from([1, 8, 63, 64, 65]),
    heads=st.sampled_from([1, 2, 3, 4, 5, 8, 32]),
    kind=st.sampled_from(INDEX_KINDS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_ids_are_the_best(
    requests: list[tuple[int, int]], topk: int, heads: int, kind: str, dtype: torch.dtype, seed: int
) -> None:
    requests = [(min(rows, length), length) for rows, length in requests]
    check_case(make(requests, kind, dtype, index_heads=heads, seed=seed), topk)


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize("length", [64, 65, 66, 128, 129])
def test_context_of_topk_and_one_more(kind: str, length: int) -> None:
    check_case(make([(length, length)], kind, seed=length), 64)


def test_rows_that_see_no_more_than_topk_take_everything() -> None:
    case = make([(70, 70)])
    found = ragged.select(case.batch, case.q, case.head_weights, case.index, 64, Scratch(1 << 20))
    for i in range(64):
        assert found[i].tolist() == [*range(i + 1), *[-1] * (63 - i)]


@pytest.mark.parametrize("name", kernels.NAMES)
def test_ties_go_to_the_lowest_position(name: str) -> None:
    case = make([(3, 200)])
    keys = case.index.buffer
    slots = case.batch.context_slots(0)
    keys[slots] = torch.randn((4, 128)).repeat(50, 1)
    q = case.q.clone()
    out = torch.empty((3, 60), dtype=torch.int32)
    kernels.import_kernels(name).select(case.batch, q, case.head_weights, case.index, 60, Scratch(1 << 20), out)
    for i in range(3):
        seen = 198 + i
        kinds = scores(q[i : i + 1], case.head_weights[i : i + 1], keys[slots[:4]])[0]
        order = kinds.argsort(descending=True).tolist()
        want = [p for k in order for p in range(k, seen, 4)][:60]
        assert out[i].tolist() == sorted(want)


def test_all_scores_zero_takes_the_first() -> None:
    case = make([(2, 150)])
    case.index.buffer[case.batch.context_slots(0)] = 0
    found = ragged.select(case.batch, case.q, case.head_weights, case.index, 40, Scratch(1 << 20))
    assert found.tolist() == [list(range(40))] * 2


def test_fp8_zero_keys_and_queries() -> None:
    case = make([(2, 150)], "fp8")
    case.q.zero_()
    found = ragged.select(case.batch, case.q, case.head_weights, case.index, 40, Scratch(1 << 20))
    assert found.tolist() == [list(range(40))] * 2


def test_padding_rows_are_minus_one() -> None:
    case = make([(2, 100)])
    q = torch.cat([case.q, torch.full((3, 4, 128), float("nan"))])
    weights = torch.cat([case.head_weights, torch.full((3, 4), float("nan"))])
    found = ragged.select(case.batch, q, weights, case.index, 8, Scratch(1 << 20))
    assert (found[2:] == -1).all() and (found[:2] >= 0).all()


def test_no_requests() -> None:
    empty = AttentionBatch(
        torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros((0, 1), dtype=torch.int32)
    )
    found = ragged.select(
        empty,
        torch.zeros((0, 4, 128)),
        torch.zeros((0, 4)),
        IndexCache(torch.zeros((64, 128)), "float32"),
        8,
        Scratch(1 << 16),
    )
    assert found.shape == (0, 8)


def test_scratch_stays_within_its_budget_and_refuses_less_than_a_page() -> None:
    case = make([(9, 6000)])
    for nbytes in (1 << 17, 1 << 18, 1 << 22):
        scratch = Scratch(nbytes)
        ragged.select(case.batch, case.q, case.head_weights, case.index, 64, scratch)
        assert 0 < scratch.peak <= nbytes
    with pytest.raises(ScratchTooSmall, match="top-k 4096"):
        ragged.select(case.batch, case.q, case.head_weights, case.index, 4096, Scratch(1 << 16))


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize("ties", [False, True])
def test_keys_in_slices_give_the_ids_of_an_unsplit_row(kind: str, ties: bool) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    case = make([(3, 3000), (1, 9000)], kind, dtype, index_heads=6)
    if ties:
        for r in range(2):
            slots = case.batch.context_slots(r)
            store_index(case.index, slots, torch.randn((50, 128)).repeat(slots.shape[0] // 50, 1))
    for topk in (1, 63, 64, 100, 1000):
        want = ragged.select(case.batch, case.q, case.head_weights, case.index, topk, Scratch(1 << 20))
        for extra in (0, 256, 1000, 4096, 16384):
            fixed = 256 * 128 if kind in ("float32", "fp8") else 256 * 64
            own = 4 * 6 * 65 if kind == "fp8" else 0
            nbytes = fixed + least_bytes(topk) + own + 64 + extra
            found = ragged.select(case.batch, case.q, case.head_weights, case.index, topk, Scratch(nbytes))
            assert torch.equal(found, want), (topk, extra)


def test_a_page_outside_the_cache_is_named() -> None:
    case = make([(1, 100)])
    case.batch.page_table[0, 1] = 999
    with pytest.raises(ValueError, match="page_table: request 0"):
        ragged.select(case.batch, case.q, case.head_weights, case.index, 8, Scratch(1 << 20))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": torch.zeros((2, 4, 64))}, "q"),
        ({"q": torch.zeros((1, 4, 128))}, "q|head_weights"),
        ({"q": torch.zeros((2, 4, 128), dtype=torch.float16)}, "q"),
        ({"head_weights": torch.zeros((2, 3))}, "head_weights"),
        ({"topk": 0}, "topk"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], named: str) -> None:
    case = make([(2, 100)])
    given_ = {"q": case.q, "head_weights": case.head_weights, "topk": 8} | change
    with pytest.raises(ValueError, match=named):
        ragged.select(case.batch, given_["q"], given_["head_weights"], case.index, given_["topk"], Scratch(1 << 20))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-30, 20))
def test_queries_are_quantised_to_the_bits_of_torch(dtype: torch.dtype, seed: int, exponent: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    q = (torch.randn((5, 128), generator=rng) * 2.0**exponent).to(dtype)
    q[3] = 0
    q[4, ::2] *= 2**-9
    weights = torch.randn(5, generator=rng)
    got, folded = torch.empty((5, 128), dtype=torch.bfloat16), torch.empty(5)
    quantise_row(q.data_ptr(), 5, dtype == torch.bfloat16, got.data_ptr(), weights.data_ptr(), folded.data_ptr())
    values, scale = quantise(q, INDEX_AMAX_FLOOR)
    assert torch.equal(got.float(), values.float())
    assert torch.equal(folded, weights * scale)
