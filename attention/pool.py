"""The KV pool of the CPU path: SGLang's DSA pool with rows that a CPU can write and read.

    kv_buffer[layer]     [slots, 1, 576] float32 / bfloat16,  or [slots, 1, 656] uint8 (fp8, packed)
    index_k[full layer]  [pages, 64 * 128] float32 / bfloat16, or [pages, 8448] uint8 (fp8: 64 keys, then 64 scales)

SGLang's in-tree pool keeps fp8 index keys whatever the cache dtype, and writes through Triton. Here the index keys
follow the cache dtype, and writes go through `attention.layouts`. Addressing, allocation and lifecycle stay SGLang's.

Under decode context parallel the allocator, the radix tree and the index keys see the slots of an unsharded cache; a
rank's latent buffer has a row for each slot that it owns, and nothing else changes (`attention/shards.py`):

    kv_buffer[layer]     [slots / W, 1, ...]          slots: the pool's tokens and one page for padding
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from attention.layouts import IndexCache, LatentCache
from attention.shards import ShardedCache, Shards
from attention.sizes import PAGE_SIZE
from parallel.dcp import page_tokens

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

    @property
    def slots(self) -> int:
        """Token slots, the page for padding included."""
        return int(self.size + self.page_size)

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


class ShardedDsaPool(CpuDsaPool):
    """`CpuDsaPool` of one rank under decode context parallel: every `size`-th run of `interleave` latent rows.

    NOTE: SGLang hands over the allocator's page, whole rounds of runs; index pages stay at 64 tokens.
    """

    dcp_size = 1
    interleave = 1
    shards: Shards | None = None  # set by the backend, which knows the group

    def __init__(self, size: int, page_size: int, *args: Any, **kwargs: Any) -> None:
        if page_size != page_tokens(self.dcp_size, self.interleave, PAGE_SIZE) or size % page_size:
            raise ValueError(
                f"--page-size {page_size} and {size} tokens: {self.dcp_size} ranks with runs of {self.interleave} need "
                f"whole pages of {page_tokens(self.dcp_size, self.interleave, PAGE_SIZE)}"
            )
        self.slot_count = size + page_size
        kwargs["index_buf_size"] = self.slot_count - PAGE_SIZE  # SGLang adds a page
        super().__init__(size, PAGE_SIZE, *args, **kwargs)

    @property
    def slots(self) -> int:
        return self.slot_count

    def _create_buffers(self) -> None:
        rows = self.slot_count // self.dcp_size
        self.kv_buffer = [
            torch.zeros((rows, 1, self.kv_cache_dim), dtype=self.store_dtype, device=self.device)
            for _ in range(self.layer_num)
        ]

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        raise NotImplementedError("decode context parallel: rows cannot be moved between ranks")

    def get_cpu_copy(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError("decode context parallel: a rank holds a share of the rows only")

    def load_cpu_copy(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError("decode context parallel: a rank holds a share of the rows only")

    def latent_cache(self, layer_id: int) -> LatentCache:
        """This rank's latent rows of one layer, [slots / W, row]."""
        assert self.shards is not None, "the backend has not said which rank this is"
        shards, rows = self.shards, self.kv_buffer[layer_id - self.start_layer]
        key = ("sharded", layer_id - self.start_layer)
        return self._kept(key, rows, lambda: ShardedCache(rows.squeeze(1), self.row_kind, shards=shards))


def pool_class(dcp_size: int, interleave: int) -> type[CpuDsaPool]:
    """The pool class of a launch: SGLang makes the object, so the sizes are the class's."""
    if dcp_size == 1:
        return CpuDsaPool
    return type("ShardedDsaPool", (ShardedDsaPool,), {"dcp_size": dcp_size, "interleave": interleave})
