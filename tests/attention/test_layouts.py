"""Byte layouts of the caches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.kernels import cpu
from attention.layouts import (
    IndexCache,
    LatentCache,
    load_index,
    load_latent,
    pack_latent,
    quantise,
    store_index,
    store_latent,
    unpack_latent,
)
from attention.sizes import INDEX_PAGE_BYTES, INDEX_SCALE_AT, PACKED_BYTES
from tests.attention.cases import LATENT_KINDS, poisoned_index, poisoned_latent


def test_sizes() -> None:
    assert (PACKED_BYTES, INDEX_PAGE_BYTES, INDEX_SCALE_AT) == (656, 8448, 8192)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-20, 15), rows=st.integers(1, 9))
def test_packed_rows_read_back_within_half_a_step(seed: int, exponent: int, rows: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    nope = torch.randn((rows, 512), generator=rng) * 2.0**exponent
    rope = torch.randn((rows, 64), generator=rng).bfloat16()
    back = unpack_latent(pack_latent(nope, rope))
    assert torch.equal(back[:, 512:], rope.float())
    scale = nope.view(rows, 4, 128).abs().amax(-1).repeat_interleave(128, 1) / 448
    assert ((back[:, :512] - nope).abs() <= torch.maximum(nope.abs() / 16, scale * 2**-10) * 1.0001).all()


def test_an_all_zero_tile_is_zero_bytes_and_reads_as_zero() -> None:
    nope = torch.randn((3, 512))
    nope[1, 128:256] = 0
    rows = pack_latent(nope, torch.zeros((3, 64)))
    assert not rows[1, 128:256].any() and not rows[1, 516:520].any()
    back = unpack_latent(rows)
    assert back.isfinite().all() and not back[1, 128:256].any()


def test_largest_value_of_a_block_is_the_largest_byte() -> None:
    x = torch.tensor([[-3.0, 1.0, 0.5, 3.0] * 32])
    values, scale = quantise(x, 1e-4)
    assert values.float()[0, 0] == -448 and scale[0] == torch.tensor(3.0) / 448


def test_zero_key_has_the_floor_scale() -> None:
    cache = poisoned_index("fp8", 2)
    store_index(cache, torch.tensor([70]), torch.zeros((1, 128)))
    values, scale = load_index(cache, torch.tensor([70]))
    assert not values.any() and scale[0] == torch.tensor(1e-4) / 448


def test_index_page_offsets() -> None:
    cache = poisoned_index("fp8", 3)
    k = torch.randn((2, 128))
    store_index(cache, torch.tensor([64 + 5, 128 + 63]), k)
    values, scale = quantise(k, 1e-4)
    for i, (page, offset) in enumerate([(1, 5), (2, 63)]):
        assert torch.equal(cache.buffer[page, 128 * offset : 128 * offset + 128], values[i].view(torch.uint8))
        at = 8192 + 4 * offset
        assert cache.buffer[page, at : at + 4].view(torch.float32)[0] == scale[i]
    assert int((cache.buffer != 0xFF).any(0).sum()) <= 2 * 132, "bytes outside the two tokens changed"


@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_latent_store_then_load(kind: str) -> None:
    cache = poisoned_latent(kind, 2)
    slots = torch.tensor([100, 3, 64])
    nope, rope = torch.randn((3, 512)), torch.randn((3, 64))
    store_latent(cache, slots, nope, rope)
    back = load_latent(cache, slots)
    assert torch.allclose(back, torch.cat([nope, rope], 1), rtol=1 / 15, atol=1e-2)
    assert load_latent(cache, slots, torch.bfloat16).dtype == torch.bfloat16
    touched = (cache.buffer != 0xFF).any(1) if kind == "fp8_packed" else ~cache.buffer.isnan().all(1)
    assert touched.nonzero().flatten().tolist() == [3, 64, 100]


def test_raw_rows_have_one_scale_a_layer() -> None:
    cache = LatentCache(torch.full((130, 576), float("nan")).to(torch.float8_e4m3fn), "fp8_raw", 0.25)
    slots = torch.tensor([100, 3, 64])
    nope, rope = torch.randn((3, 512)), torch.randn((3, 64))
    nope[0, 0] = 1e6
    store_latent(cache, slots, nope, rope)
    back = load_latent(cache, slots)
    assert back[0, 0] == 448 * 0.25
    wanted = (torch.cat([nope, rope], 1) / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.25
    assert torch.equal(back, wanted)
    assert (~cache.buffer.float().isnan().all(1)).nonzero().flatten().tolist() == [3, 64, 100]
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty((3, 576), dtype=dtype)
        cpu.gather(cache, slots, out)
        assert torch.equal(out, back.to(dtype))
    with pytest.raises(ValueError, match="entry 1 is outside the latent cache of 130"):
        cpu.gather(cache, torch.tensor([0, 130]), torch.empty((2, 576)))


def test_only_raw_rows_have_a_scale() -> None:
    with pytest.raises(ValueError, match="scale"):
        LatentCache(torch.zeros((4, 576)), "float32", 2.0)
    with pytest.raises(ValueError, match="scale"):
        LatentCache(torch.zeros((4, 576)).to(torch.float8_e4m3fn), "fp8_raw", 0.0)


@pytest.mark.parametrize(
    ("buffer", "kind", "named"),
    [
        (torch.zeros((4, 576)), "bfloat16", "buffer"),
        (torch.zeros((4, 575)), "float32", "buffer"),
        (torch.zeros((576, 4)).T, "float32", "contiguous"),
        (torch.zeros((4, 576)), "fp8", "kind"),
    ],
)
def test_latent_cache_names_what_is_wrong(buffer: torch.Tensor, kind: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LatentCache(buffer, kind)


def test_index_cache_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="buffer"):
        IndexCache(torch.zeros((2, 8447), dtype=torch.uint8), "fp8")
    with pytest.raises(ValueError, match="kind"):
        IndexCache(torch.zeros((64, 128)), "fp8_packed")
