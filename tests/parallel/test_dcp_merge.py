"""Partial results merged by log-sum-exp: the result over all keys, whoever held them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.dcp import page_tokens
from parallel.dcp_merge import context_bytes, merge, pack, partial_bytes, query_bytes, unpack


def attend(logits: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [n, h, d], lse [n, h]) over keys [k, d] with logits [n, h, k], -inf where a key is not seen."""
    return torch.nan_to_num(logits.softmax(-1)) @ values, logits.logsumexp(-1)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(0, 40), st.integers(0, 10_000), st.sampled_from([1.0, 30.0]))
def test_merge_is_attention_over_all_keys(ranks: int, keys: int, seed: int, spread: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn((3, 2, keys), generator=rng) * spread
    values = torch.randn((keys, 8), generator=rng)
    holder = torch.randint(0, ranks, (keys,), generator=rng)
    parts = [attend(logits[..., holder == rank], values[holder == rank]) for rank in range(ranks)]
    out, lse = merge(torch.stack([p for p, _ in parts]), torch.stack([w for _, w in parts]))
    want, total = attend(logits, values)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, total, rtol=1e-5, atol=1e-5)


def test_a_rank_without_keys_changes_no_bit_and_is_not_read() -> None:
    part, lse = torch.randn(4, 2, 8), torch.randn(4, 2)
    out, total = merge(torch.stack([torch.full_like(part, torch.nan), part]), torch.stack([lse - torch.inf, lse]))
    assert torch.equal(out, part) and torch.equal(total, lse)


def test_a_row_that_nobody_has_keys_for_is_zero() -> None:
    out, lse = merge(torch.full((2, 1, 1, 8), torch.nan), torch.full((2, 1, 1), -torch.inf))
    assert torch.equal(out, torch.zeros(1, 1, 8)) and bool((lse == -torch.inf).all())


@given(st.integers(1, 4), st.integers(0, 5), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_packed_comes_out_by_heads(ranks: int, rows: int, own: int, dtype: torch.dtype) -> None:
    out, lse = torch.randn(rows, ranks * own, 512).to(dtype), torch.randn(rows, ranks * own)
    packed = pack(out, lse, ranks)
    assert packed.nbytes * (ranks - 1) == partial_bytes(ranks, rows, own, out.element_size()) * ranks
    parts, lses = unpack(packed, dtype)
    for rank in range(ranks):
        heads = slice(rank * own, (rank + 1) * own)
        assert torch.equal(parts[rank], out[:, heads]) and torch.equal(lses[rank], lse[:, heads])


def test_bytes_of_a_decode_step_at_real_size() -> None:
    """64 rows, 8 heads a rank, 8 ranks, bf16; and the contexts of one million-token prompt (facts section 6)."""
    assert query_bytes(8, 64, 8, 2) == 7 * 64 * 8 * 1152
    assert partial_bytes(8, 64, 8, 2) == 7 * 64 * 8 * 1028
    assert context_bytes(4, 262_144, 2) == 3 * 262_144 * 1152


def test_pages_hold_whole_rounds() -> None:
    assert [page_tokens(2, 1), page_tokens(8, 8), page_tokens(2, 64), page_tokens(4, 64)] == [64, 64, 128, 256]
    assert page_tokens(3, 1) == 192
