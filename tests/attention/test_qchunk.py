"""The qchunk indexer: ids equal to those of ragged, bit for bit, whatever the caps; buffers stay as they were made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.geometry import Geometry
from attention.indexer import ragged
from attention.indexer.qchunk import QChunk
from attention.indexer.split import LOGIT_BYTES
from attention.kernels.cpu_chunk import SPARE
from attention.scratch import Scratch
from tests.attention.cases import INDEX_KINDS, Case, make

TOPK = 16
LEAST = LOGIT_BYTES * (TOPK + SPARE + 1)


def geometry(case: Case, topk: int = TOPK, **changes: object) -> Geometry:
    values: dict[str, object] = {
        "max_model_len": max(1, int(case.batch.seq_lens.max())),
        "max_requests": case.batch.requests,
        "pool_tokens": case.index.slots,
        "topk": topk,
        "index_heads": case.q.shape[1],
        "index_dim": 128,
        "dtype": case.q.dtype,
        "index_kind": case.index.kind,
        "latent_kind": case.latent.kind,
    }
    return Geometry(**values | changes)  # type: ignore[arg-type]


def ids(slot: QChunk, case: Case, topk: int = TOPK) -> torch.Tensor:
    return slot.select(case.batch, case.q, case.head_weights, case.index, topk, Scratch(1 << 20))


def plain(case: Case, topk: int = TOPK) -> torch.Tensor:
    return ragged.select(case.batch, case.q, case.head_weights, case.index, topk, Scratch(1 << 20))


@settings(deadline=None, max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 70), st.sampled_from([1, 15, 16, 17, 63, 64, 65, 100, 130, 200])),
        min_size=1,
        max_size=5,
    ),
    kind=st.sampled_from(INDEX_KINDS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    heads=st.sampled_from([1, 4, 6]),
    cap=st.one_of(st.integers(LEAST, LEAST + 1200), st.integers(LEAST, 1 << 16), st.just(1 << 22)),
    rows=st.one_of(st.integers(1, 80), st.integers(1, 700), st.just(1 << 20)),
    strict=st.booleans(),
    distinct=st.sampled_from([0, 1, 3, 40]),
    seed=st.integers(0, 1000),
)
def test_ids_are_those_of_ragged(
    requests: list[tuple[int, int]],
    kind: str,
    dtype: torch.dtype,
    heads: int,
    cap: int,
    rows: int,
    strict: bool,
    distinct: int,
    seed: int,
) -> None:
    """``distinct`` > 0: only so many different keys, so that most scores are tied."""
    case = make([(min(n, length), length) for n, length in requests], kind, dtype, heads, 4, seed)
    if distinct:
        repeat_keys(case, distinct)
    made = geometry(case, knobs={"indexer_strict_cap": strict})
    slot = QChunk(made, max_logits_bytes=cap, max_rows=rows)
    assert torch.equal(ids(slot, case), plain(case))


def repeat_keys(case: Case, distinct: int) -> None:
    """Every request's keys become the first ``distinct`` of them, over and over."""
    for r in range(case.batch.requests):
        slots = case.batch.context_slots(r)
        source = slots[torch.arange(slots.shape[0]) % distinct]
        if case.index.kind == "fp8":
            pages, scales = case.index.buffer, case.index.buffer.view(torch.float32)
            for to, of in zip(slots.tolist(), source.tolist(), strict=True):
                a, b = to % 64 * 128, of % 64 * 128
                pages[to // 64, a : a + 128] = pages[of // 64, b : b + 128].clone()
                scales[to // 64, 2048 + to % 64] = scales[of // 64, 2048 + of % 64].clone()
        else:
            case.index.buffer[slots] = case.index.buffer[source]


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize("cap", [LEAST + 400, LEAST + 4000, 1 << 16, 1 << 20])
def test_long_context(kind: str, cap: int) -> None:
    case = make([(3, 3000), (150, 2000), (1, 700), (5, 5)], kind, torch.bfloat16, 8)
    assert torch.equal(ids(QChunk(geometry(case), max_logits_bytes=cap), case), plain(case))


def test_buffers_are_made_once_and_kept_to_their_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the strict cap nothing of the size of keys or logits is allocated by a step."""
    case = make([(200, 3000), (40, 900)])
    slot = QChunk(geometry(case), max_logits_bytes=1 << 16, max_rows=512)
    before = (slot.logits.data_ptr(), slot.keys.data_ptr())
    assert LOGIT_BYTES * slot.logits.numel() <= 1 << 16
    assert slot.keys.numel() == 512 * 512
    real, taken = torch.empty, []

    def empty(*size: object, **more: object) -> torch.Tensor:
        made = real(*size, **more)  # type: ignore[call-overload]
        taken.append(made.numel() * made.element_size())
        return made

    want, scratch, out = plain(case), Scratch(1 << 20), torch.zeros((240, TOPK), dtype=torch.int32)
    monkeypatch.setattr(torch, "empty", empty)
    found = slot.select(case.batch, case.q, case.head_weights, case.index, TOPK, scratch, out)
    monkeypatch.undo()
    assert torch.equal(found, want)
    assert sum(taken) == 0
    assert (slot.logits.data_ptr(), slot.keys.data_ptr()) == before


def test_keys_are_gathered_once_a_group() -> None:
    case = make([(100, 300), (100, 300), (100, 300)])
    slot = QChunk(geometry(case), max_logits_bytes=1 << 14, max_rows=10_000)
    assert torch.equal(ids(slot, case), plain(case))
    assert slot.counters.gathers == 3
    assert slot.counters.chunks > 20
    packed = QChunk(geometry(case), max_logits_bytes=1 << 22, max_rows=10_000)
    assert torch.equal(ids(packed, case), plain(case))
    assert (packed.counters.gathers, packed.counters.chunks) == (1, 1)


def test_decodes_and_short_contexts_are_not_gathered() -> None:
    case = make([(1, 300), (16, 16), (10, 14), (1, 1)])
    slot = QChunk(geometry(case))
    assert torch.equal(ids(slot, case), plain(case))
    assert (slot.counters.paged_rows, slot.counters.gathered_rows, slot.counters.gathers) == (28, 0, 0)


def test_padding_rows_are_minus_one() -> None:
    case = make([(3, 100)])
    slot = QChunk(geometry(case))
    q = torch.cat([case.q, torch.full((2, *case.q.shape[1:]), float("nan"))])
    weights = torch.cat([case.head_weights, torch.full((2, 4), float("nan"))])
    found = slot.select(case.batch, q, weights, case.index, TOPK, Scratch(1 << 20))
    assert torch.equal(found[:3], plain(case))
    assert (found[3:] == -1).all()


def test_a_cap_below_one_score_is_refused() -> None:
    case = make([(3, 100)])
    with pytest.raises(ValueError, match=f"--sparse-indexer-max-logits-mb.*{LEAST} are the least"):
        QChunk(geometry(case), max_logits_bytes=LEAST - 1)


def test_a_step_that_never_fills_the_cap_does_not_pay_for_it() -> None:
    case = make([(3, 100)])
    slot = QChunk(geometry(case), max_logits_bytes=1 << 30)
    assert slot.facts()["indexer_logits_bytes"] < 1 << 17


@pytest.mark.parametrize("change", [{"topk": 8}, {"dtype": torch.bfloat16}, {"index_kind": "bfloat16"}])
def test_another_geometry_is_refused(change: dict[str, object]) -> None:
    case = make([(3, 100)])
    slot = QChunk(geometry(case, **change))
    with pytest.raises(ValueError, match="the slot was made for"):
        ids(slot, case)


def test_a_slot_outside_the_cache_is_named() -> None:
    case = make([(3, 100)])
    case.batch.page_table[0, 1] = 999
    with pytest.raises(ValueError, match="outside the index cache"):
        ids(QChunk(geometry(case)), case)
