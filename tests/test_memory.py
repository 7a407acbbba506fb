"""Bytes of a token in the KV pool, against the layouts and against real buffers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention import layouts
from attention.sizes import INDEX_PAGE_BYTES, LATENT_DIM, PAGE_SIZE
from glm_runtime import memory

CONFIG = {
    "num_hidden_layers": 8,
    "indexer_types": ["full", "full", "full", "shared", "shared", "shared", "full", "shared"],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
}
GLM5 = {"num_hidden_layers": 78, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


@pytest.mark.parametrize(
    ("kind", "latent", "index"), [("float32", 2304, 512), ("bfloat16", 1152, 256), ("fp8_e4m3", 656, 132)]
)
def test_rows_as_documented(kind: str, latent: int, index: int) -> None:
    assert memory.latent_row_bytes(kind) == latent
    assert memory.index_row_bytes(kind) == index
    assert memory.token_bytes(CONFIG, kind) == 8 * latent + 4 * index
    assert memory.token_bytes(GLM5, kind) == 78 * (latent + index)


def test_rows_are_those_of_real_buffers() -> None:
    rows = layouts.pack_latent(torch.zeros(3, 512), torch.zeros(3, 64))
    assert rows.nbytes // 3 == memory.latent_row_bytes("fp8_e4m3")
    page = layouts.IndexCache(torch.zeros(1, INDEX_PAGE_BYTES, dtype=torch.uint8), "fp8")
    assert page.buffer.nbytes == page.slots * memory.index_row_bytes("fp8_e4m3")
    for kind, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        latent = layouts.LatentCache(torch.zeros(5, LATENT_DIM, dtype=dtype), kind)
        assert latent.buffer.nbytes == 5 * memory.latent_row_bytes(kind)


@given(st.integers(0, 2**40), st.sampled_from(memory.KINDS))
def test_the_pool_fits_and_is_not_smaller_than_it_must_be(free: int, kind: str) -> None:
    tokens = memory.pool_tokens(free, CONFIG, kind)
    row = memory.token_bytes(CONFIG, kind)
    assert tokens % PAGE_SIZE == 0
    assert tokens == 0 or (tokens + PAGE_SIZE) * row <= free
    assert (tokens + 2 * PAGE_SIZE) * row + row * PAGE_SIZE > free


def test_full_layers() -> None:
    assert memory.full_layers(CONFIG) == 4
    assert memory.full_layers(GLM5) == 78
    # The pattern of an MTP layer behind the last one does not count.
    assert memory.full_layers(CONFIG | {"indexer_types": [*CONFIG["indexer_types"], "full"]}) == 4


@pytest.mark.parametrize("key", list(memory.WIDTHS))
def test_other_widths_are_named(key: str) -> None:
    assert memory.odd_width(CONFIG) is None
    text = memory.odd_width(CONFIG | {key: 96})
    assert text is not None and f"{key} is 96" in text
