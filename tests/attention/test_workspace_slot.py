"""The workspace prefill-KV slot: the bits of paged from gathered rows, in one fixed buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import paged
from attention.geometry import Geometry
from attention.indexer import ragged
from attention.scratch import Scratch
from attention.workspace_slot import Workspace, row_dtype
from tests.attention.cases import INDEX_KINDS, Case, make

TOPK = 64
SCALE = 0.05


def geometry(case: Case, **changes: object) -> Geometry:
    values: dict[str, object] = {
        "max_model_len": max(1, int(case.batch.seq_lens.max())),
        "max_requests": case.batch.requests,
        "pool_tokens": case.latent.slots,
        "topk": TOPK,
        "index_heads": case.q.shape[1],
        "index_dim": 128,
        "dtype": case.q.dtype,
        "index_kind": case.index.kind,
        "latent_kind": case.latent.kind,
    }
    return Geometry(**values | changes)  # type: ignore[arg-type]


def chosen(case: Case) -> torch.Tensor:
    return ragged.select(case.batch, case.q, case.head_weights, case.index, TOPK, Scratch(1 << 20))


def attended(slot: Workspace, case: Case, ids: torch.Tensor) -> torch.Tensor:
    return slot.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids, SCALE, Scratch(1 << 20))


def in_place(case: Case, ids: torch.Tensor) -> torch.Tensor:
    return paged.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids, SCALE, Scratch(1 << 20))


@settings(deadline=None, max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([1, 63, 64, 65, 100, 191, 300])), min_size=1, max_size=6
    ),
    kind=st.sampled_from(INDEX_KINDS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    heads=st.sampled_from([1, 4, 6]),
    spare=st.sampled_from([0, 1, 50, 400, 10_000]),
    seed=st.integers(0, 1000),
)
def test_bits_are_those_of_paged(
    requests: list[tuple[int, int]], kind: str, dtype: torch.dtype, heads: int, spare: int, seed: int
) -> None:
    """Whatever the size of the workspace, from the longest context on."""
    case = make([(min(n, length), length) for n, length in requests], kind, dtype, 4, heads, seed)
    ids = chosen(case)
    slot = Workspace(geometry(case), max_rows=max(length for _, length in requests) + spare)
    assert torch.equal(attended(slot, case, ids), in_place(case, ids))


def test_a_group_is_gathered_once_and_reads_nothing_else() -> None:
    case = make([(10, 200), (12, 100), (3, 300), (1, 250), (20, 40)])
    slot = Workspace(geometry(case), max_rows=300)
    ids = chosen(case)
    slot.buffer.fill_(float("nan"))
    assert torch.equal(attended(slot, case, ids), in_place(case, ids))
    # Requests 0 and 1 fill the workspace together, request 2 alone; 3 is one row and 4 is short: both read pages.
    assert (slot.counters.gathers, slot.counters.workspace_rows) == (2, 600)
    assert (slot.counters.gathered_rows, slot.counters.paged_rows) == (25, 21)


def test_the_buffer_follows_the_factor_and_never_grows() -> None:
    case = make([(10, 200), (12, 100)])
    room = geometry(case, max_requests=64, pool_tokens=1 << 20)
    assert Workspace(room).rows == 5 * 200
    for factor in (2, 3):
        slot = Workspace(geometry(case, max_requests=64, pool_tokens=1 << 20, knobs={
            "sparse_mla_prefill_workspace_factor": factor,
        }))  # fmt: skip
        before = slot.buffer.data_ptr()
        attended(slot, case, chosen(case))
        assert slot.rows == factor * 200
        assert slot.buffer.data_ptr() == before
        assert slot.facts()["prefill_workspace_bytes"] == factor * 200 * 576 * 4
    assert Workspace(geometry(case, max_requests=2, pool_tokens=1 << 20)).rows == 400
    assert Workspace(geometry(case, max_requests=64, pool_tokens=256)).rows == 256
    with pytest.raises(ValueError, match="--sparse-mla-prefill-workspace-factor must be at least 2, got 1"):
        Workspace(geometry(case, knobs={"sparse_mla_prefill_workspace_factor": 1}))


def test_padding_rows_are_zero() -> None:
    case = make([(3, 100)])
    ids = torch.cat([chosen(case), torch.full((2, TOPK), -1, dtype=torch.int32)])
    nan = float("nan")
    q_nope = torch.cat([case.q_nope, torch.full((2, *case.q_nope.shape[1:]), nan)])
    q_rope = torch.cat([case.q_rope, torch.full((2, *case.q_rope.shape[1:]), nan)])
    out = Workspace(geometry(case)).attend(case.batch, q_nope, q_rope, case.latent, ids, SCALE, Scratch(1 << 20))
    assert torch.equal(out[:3], in_place(case, ids[:3]))
    assert (out[3:] == 0).all()


def test_an_id_outside_its_context_is_named() -> None:
    case = make([(3, 100), (3, 120)])
    ids = chosen(case)
    ids[1, 5] = 100  # the first row of the next request's context
    with pytest.raises(ValueError, match="topk_ids: row 1 has an id outside its context"):
        attended(Workspace(geometry(case)), case, ids)


@pytest.mark.parametrize("change", [{"dtype": torch.bfloat16, "latent_kind": "bfloat16"}])
def test_another_float_type_is_refused(change: dict[str, object]) -> None:
    case = make([(3, 100)])
    with pytest.raises(ValueError, match=r"the workspace holds torch\.bfloat16"):
        attended(Workspace(geometry(case, **change)), case, chosen(case))


def test_types_of_the_rows() -> None:
    half, whole = torch.bfloat16, torch.float32
    assert [row_dtype(kind, half) for kind in ("float32", "bfloat16", "fp8_packed")] == [whole, half, half]
    assert [row_dtype(kind, whole) for kind in ("float32", "bfloat16", "fp8_packed")] == [whole] * 3
