"""Sparse MLA against the plain expression, and its edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import paged
from attention.batch import AttentionBatch
from attention.indexer import ragged
from attention.kernels import cpu, reference
from attention.layouts import IndexCache, LatentCache, load_latent
from attention.scratch import Scratch
from tests.attention.cases import INDEX_KINDS, Case, make

SCALE = 0.07


def random_ids(case: Case, width: int, seed: int, holes: bool) -> torch.Tensor:
    """Ascending visible positions, -1 behind, or anywhere when ``holes``."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.full((case.batch.rows, width), -1, dtype=torch.int32)
    for i, position in enumerate(case.batch.row_positions().tolist()):
        count = int(torch.randint(0, min(width, position + 1) + 1, (1,), generator=rng))
        picked = torch.randperm(position + 1, generator=rng)[:count].sort().values.to(torch.int32)
        places = torch.randperm(width, generator=rng)[:count].sort().values if holes else torch.arange(count)
        ids[i, places] = picked
    return ids


@settings(deadline=None, max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([1, 2, 63, 64, 65, 130, 200])), min_size=1, max_size=4
    ),
    width=st.sampled_from([1, 3, 64, 65, 130]),
    heads=st.sampled_from([1, 2, 4, 5, 8]),
    kind=st.sampled_from(INDEX_KINDS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    holes=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_the_plain_expression(
    requests: list[tuple[int, int]], width: int, heads: int, kind: str, dtype: torch.dtype, holes: bool, seed: int
) -> None:
    case = make([(min(rows, length), length) for rows, length in requests], kind, dtype, heads=heads, seed=seed)
    ids = random_ids(case, width, seed, holes)
    scratch = Scratch(1 << 20)
    out, lse = paged.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids, SCALE, scratch, return_lse=True)
    want, want_lse = torch.empty_like(out), torch.empty_like(lse)
    reference.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids, SCALE, scratch, want, want_lse)
    step = 2e-6 if dtype == torch.float32 else 2**-7
    assert out.isfinite().all()
    assert torch.allclose(out.float(), want.float(), rtol=step, atol=step * 2)
    assert torch.allclose(lse, want_lse, rtol=1e-5, atol=1e-4)
    empty = (ids < 0).all(1)
    assert not out[empty].any() and (lse[empty] == float("-inf")).all()


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_rows_give_the_same_bits_as_pages(kind: str, dtype: torch.dtype) -> None:
    """What a workspace holds: rows up-converted to q's type, ids as row numbers, in the same order."""
    case = make([(4, 300)], kind, dtype, heads=8)
    ids = random_ids(case, 150, 3, holes=True)
    scratch = Scratch(1 << 20)
    want = paged.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids, SCALE, scratch)
    plain = torch.float32 if case.latent.kind == "float32" else dtype
    rows = load_latent(case.latent, case.batch.context_slots(0), plain)
    gathered = LatentCache(rows, "float32" if plain == torch.float32 else "bfloat16")
    assert torch.equal(paged.attend_rows(case.q_nope, case.q_rope, gathered, ids, SCALE, scratch), want)


def test_strided_queries_are_read_in_place() -> None:
    case = make([(3, 100)], heads=4)
    ids = random_ids(case, 64, 1, holes=False)
    joined = torch.cat([case.q_nope, case.q_rope], dim=-1)
    scratch = Scratch(1 << 20)
    want = paged.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids, SCALE, scratch)
    got = paged.attend(case.batch, joined[..., :512], joined[..., 512:], case.latent, ids, SCALE, scratch)
    assert torch.equal(got, want)


def test_large_logits_do_not_overflow() -> None:
    case = make([(1, 200)])
    ids = torch.arange(200, dtype=torch.int32).view(1, -1)
    out, lse = paged.attend(
        case.batch, case.q_nope * 100, case.q_rope * 100, case.latent, ids, 1.0, Scratch(1 << 20), return_lse=True
    )
    assert out.isfinite().all() and lse.isfinite().all()


def test_an_all_zero_packed_row_attends_as_zero() -> None:
    case = make([(1, 64)], "fp8")
    case.latent.buffer[case.batch.context_slots(0)] = 0
    ids = torch.arange(64, dtype=torch.int32).view(1, -1)
    out = paged.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids, SCALE, Scratch(1 << 20))
    assert not out.any()


@pytest.mark.parametrize("bad", [100, 2**31 - 1])
def test_an_id_beyond_the_context_is_named(bad: int) -> None:
    case = make([(2, 100)])
    ids = torch.tensor([[1, 2], [3, bad]], dtype=torch.int32)
    with pytest.raises(ValueError, match="topk_ids: row 1"):
        paged.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids, SCALE, Scratch(1 << 20))


def test_bad_shapes_are_named() -> None:
    case = make([(2, 100)])
    ids = torch.zeros((2, 4), dtype=torch.int32)
    scratch = Scratch(1 << 20)
    with pytest.raises(ValueError, match="q_rope"):
        paged.attend(case.batch, case.q_nope, case.q_rope[..., :32], case.latent, ids, SCALE, scratch)
    with pytest.raises(ValueError, match="topk_ids"):
        paged.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids.long(), SCALE, scratch)
    with pytest.raises(ValueError, match="q_nope"):
        paged.attend(case.batch, case.q_nope[:1], case.q_rope[:1], case.latent, ids[:1], SCALE, scratch)


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_equals_torch_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    case = make([(1, 333)], kind)
    slots = case.batch.context_slots(0)[torch.randperm(333)]
    out, want = torch.empty((333, 576), dtype=dtype), torch.empty((333, 576), dtype=dtype)
    cpu.gather(case.latent, slots, out)
    reference.gather(case.latent, slots, want)
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match="slots: entry 2"):
        cpu.gather(case.latent, torch.tensor([0, 1, case.latent.slots]), out[:3])
    with pytest.raises(ValueError, match="out"):
        cpu.gather(case.latent, slots, out[:3])


def test_addresses_beyond_two_gigabytes() -> None:
    """A cache of 4 million slots, of which only the last two pages are ever touched."""
    pages = 1 << 16
    cache = LatentCache(torch.empty((pages * 64, 656), dtype=torch.uint8), "fp8_packed")
    index = IndexCache(torch.empty((pages * 4, 8448), dtype=torch.uint8), "fp8")
    small = make([(2, 100)], "fp8")
    table = torch.tensor([[pages - 1, pages - 2]], dtype=torch.int32)
    far = AttentionBatch(small.batch.query_start, small.batch.seq_lens, table)
    cache.buffer[far.context_slots(0)] = small.latent.buffer[small.batch.context_slots(0)]
    ids = random_ids(small, 64, 5, holes=False)
    scratch = Scratch(1 << 20)
    want = paged.attend(small.batch, small.q_nope, small.q_rope, small.latent, ids, SCALE, scratch)
    assert torch.equal(paged.attend(far, small.q_nope, small.q_rope, cache, ids, SCALE, scratch), want)
    table = torch.tensor([[4 * pages - 1, 4 * pages - 2]], dtype=torch.int32)
    far = AttentionBatch(small.batch.query_start, small.batch.seq_lens, table)
    index.buffer[table[0].long()] = small.index.buffer[small.batch.page_table[0].long()]
    want = ragged.select(small.batch, small.q, small.head_weights, small.index, 8, scratch)
    assert torch.equal(ragged.select(far, small.q, small.head_weights, index, 8, scratch), want)


def test_raw_rows_are_gathered_not_read_in_place() -> None:
    case = make([(3, 90)], "bfloat16", torch.bfloat16)
    raw = torch.nan_to_num(case.latent.buffer.float()).to(torch.float8_e4m3fn)
    cache = LatentCache(raw, "fp8_raw", 0.5)
    ids = random_ids(case, 20, 1, False)
    with pytest.raises(ValueError, match="fp8_raw"):
        paged.attend(case.batch, case.q_nope, case.q_rope, cache, ids, SCALE, Scratch(1 << 20))
    found, lse = torch.empty((3, 4, 512), dtype=torch.bfloat16), torch.empty((3, 4))
    reference.attend(case.batch, case.q_nope, case.q_rope, cache, ids, SCALE, Scratch(1 << 20), found, lse)
    wide = LatentCache((raw.float() * 0.5).to(torch.bfloat16), "bfloat16")
    want = paged.attend(case.batch, case.q_nope, case.q_rope, wide, ids, SCALE, Scratch(1 << 20))
    assert torch.allclose(found.float(), want.float(), rtol=2**-7, atol=2**-6)
