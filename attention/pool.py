"""The KV pool of the CPU path: SGLang's DSA pool with rows that a CPU can write and read.

    kv_buffer[layer]     [slots, 1, 576] float32 / bfloat16,  or [slots, 1, 656] uint8 (fp8, packed)
    index_k[full layer]  [pages, 64 * 128] float32 / bfloat16, or [pages, 8448] uint8 (fp8: 64 keys, then 64 scales)

SGLang's in-tree pool keeps fp8 index keys whatever the cache dtype, and writes through Triton. Here the index keys
follow the cache dtype, and writes go through `attention.layouts`. Addressing, allocation and lifecycle stay SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from attention.layouts import IndexCache, LatentCache

Cache = TypeVar("Cache")


class FloatIndexKeyCache(IndexKeyCache):
    """Index keys as plain rows of the cache dtype, a page of 64 rows per buffer row."""

    def _buffer_shape(self, num_pages: int) -> tuple[int, int]:
        return num_pages, self.pool.page_size * self.pool.index_head_dim

    def move(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the keys of slots `src_loc` to slots `tgt_loc` in every full layer."""
        if tgt_loc.numel() == 0:
            return
        target, source = tgt_loc.view(-1).long(), src_loc.view(-1).long()
        for pages in self.buffer:
            if pages.shape[0]:
                rows = pages.view(-1, self.pool.index_head_dim)
                rows[target] = rows.index_select(0, source)


class CpuDsaPool(DSATokenToKVPool):
    """`DSATokenToKVPool` whose rows `attention.layouts` reads and writes."""

    def _create_index_key_cache(self) -> IndexKeyCache:
        if self.dsa_kv_cache_store_fp8:
            return IndexKeyCache(self, self.index_buf_size)
        self.index_k_with_scale_buffer_dtype = self.dtype
        return FloatIndexKeyCache(self, self.index_buf_size)

    @property
    def row_kind(self) -> str:
        """Layout name of both caches, as `attention.layouts` calls them."""
        if self.dsa_kv_cache_store_fp8:
            return "fp8_packed"
        return str(self.dtype).removeprefix("torch.")

    def latent_cache(self, layer_id: int) -> LatentCache:
        """Latent rows of one layer, [slots, row]."""
        layer = layer_id - self.start_layer
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer)
        rows = self.kv_buffer[layer]
        return self._kept(("latent", layer), rows, lambda: LatentCache(rows.squeeze(1), self.row_kind))

    def index_cache(self, layer_id: int) -> IndexCache:
        """Index keys of one full layer: [slots, 128] rows, or [pages, 8448] bytes for fp8."""
        layer = layer_id - self.start_layer
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer)
        pages = self.index_key_cache.buffer[layer]
        if self.dsa_kv_cache_store_fp8:
            return self._kept(("index", layer), pages, lambda: IndexCache(pages, "fp8"))
        return self._kept(
            ("index", layer), pages, lambda: IndexCache(pages.view(-1, self.index_head_dim), self.row_kind)
        )

    def _kept(self, key: tuple[str, int], buffer: torch.Tensor, make: Callable[[], Cache]) -> Cache:
        """The view made of `buffer` before, or a new one: every step asks for every layer's, and checking it costs."""
        kept: dict[tuple[str, int], tuple[torch.Tensor, Any]] = self.__dict__.setdefault("_views", {})
        entry = kept.get(key)
        if entry is None or entry[0] is not buffer:
            entry = kept[key] = (buffer, make())
        view: Cache = entry[1]
        return view
