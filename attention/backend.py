"""SGLang attention backend of the CPU path: DSA on every forward, through the indexer and prefill-KV slots.

    model layer ──hidden, q_lora──> index_forward ──> index keys into the pool, then indexer.select ─> ids [rows, topk]
                ──q, latent───────> forward       ──> latent rows into the pool, then prefill.attend ─> [rows, h*512]

    rows of a batch     request 0: q q q | request 1: q | ...      (extend rows and decode rows are the same thing here)
    prefill ranks       under context parallelism `batch` holds this rank's rows; keys of all rows are gathered before
                        they are stored, so that every rank keeps the full cache
    padding             SGLang may hand over more rows than the batch has (see `glm_runtime/cpu_rows.py`): extra rows
                        are neither stored nor attended, their output is zero.

A layer without an indexer ("shared") gets the ids of the last full layer from SGLang's model code and passes them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.cp.base import get_cp_strategy
from sglang.srt.model_executor.forward_context import get_attn_backend

from attention import dense, shard_check
from attention.batch import AttentionBatch, Part
from attention.geometry import Geometry
from attention.layouts import IndexCache, LatentCache, store_index, store_latent
from attention.scratch import Scratch
from attention.shards import Shards
from parallel.collectives import all_gather_rows, sub_group
from parallel.local import local_batch

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from attention.pool import CpuDsaPool


class IndexerSlot(Protocol):
    """What an indexer implementation offers: top-k key positions of each query row."""

    def select(
        self,
        batch: AttentionBatch,
        q: torch.Tensor,
        head_weights: torch.Tensor,
        cache: IndexCache,
        topk: int,
        scratch: Scratch,
    ) -> torch.Tensor: ...


class PrefillKvSlot(Protocol):
    """What a prefill-KV implementation offers: attention of each query row over its selected keys."""

    def attend(
        self,
        batch: AttentionBatch,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        cache: LatentCache,
        topk_ids: torch.Tensor,
        scale: float,
        scratch: Scratch,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Slots:
    """The implementations in force, by their registered names.

    An implementation is a module or object that offers what its slot needs, or a class, which is made here, once, from
    the `Geometry` of the process, and keeps its buffers.
    """

    indexer_name: str
    indexer: IndexerSlot
    prefill_name: str
    prefill: PrefillKvSlot

    def made(self, geometry: Geometry) -> Slots:
        """With an object in place of each class. Raises what their constructors raise."""
        parts = {"indexer": self.indexer, "prefill": self.prefill}
        return replace(self, **{n: part(geometry) for n, part in parts.items() if isinstance(part, type)})

    def facts(self) -> dict[str, Any]:
        """What the implementations say of themselves: buffers in bytes, counters."""
        found: dict[str, Any] = {}
        for part in (self.indexer, self.prefill):
            tell = getattr(part, "facts", None)
            if tell is not None:
                found |= tell()
        return found


class GlmCpuBackend(AttentionBackend):
    """DSA attention on CPU tensors.

    Args:
        runner: SGLang's model runner; gives the pools and the model's geometry.
        slots: indexer and prefill-KV implementations.
        scratch_mb: MiB of scratch that indexer and attention share; nothing of size heads x queries x keys leaves it.
        knobs: effective settings of the slots, by name.
    """

    # Lengths are read as CPU tensors anyway.
    needs_cpu_seq_lens = False

    def __init__(
        self, runner: ModelRunner, slots: Slots, scratch_mb: int, knobs: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.token_to_kv_pool: CpuDsaPool = runner.token_to_kv_pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.page_size = runner.token_to_kv_pool.page_size
        self.rank_dim = runner.model_config.kv_lora_rank
        self.shards = shards_of(runner)
        geometry = geometry_of(runner, knobs or {}, self.shards)
        self.topk = geometry.topk
        self.slots = slots.made(geometry)
        self.scratch = Scratch(scratch_mb << 20)
        self.batch: AttentionBatch | None = None
        self.write_slots = torch.empty(0, dtype=torch.int64)  # of all rows of the step, also where this rank has few
        self.rows = 0
        self.split: ForwardBatch | None = None  # the step whose rows are shared among prefill ranks
        self.all_dense = False  # no row of the batch sees more than topk keys: queries of the indexer are not needed
        self.dense_rows = 0  # since start, once a step
        self.sparse_rows = 0
        self._causal: torch.Tensor | None = None
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None  # under shards: rows that this rank keeps, where
        if self.shards is not None:
            if not getattr(self.slots.prefill, "READS_SHARDS", False):
                raise ValueError(
                    f"--prefill-kv {self.slots.prefill_name} reads a whole cache; use paged or workspace, or set "
                    "--decode-context-parallel-size 1"
                )
            shard_check.run(self.shards, geometry.latent_kind, geometry.dtype)
            self.shards.moved.clear()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan one forward: which rows belong to whom, and where their pages lie."""
        self.split = None
        if forward_batch.forward_mode.is_idle():
            self.batch, self.rows, self.all_dense = None, 0, False
            return
        seq_lens = forward_batch.seq_lens.to(torch.int32)
        requests = seq_lens.numel()
        start = torch.zeros(requests + 1, dtype=torch.int32)
        if forward_batch.forward_mode.is_decode():
            start[1:] = torch.arange(1, requests + 1, dtype=torch.int32)
        else:
            start[1:] = forward_batch.extend_seq_lens.cumsum(0)
        pages = (int(seq_lens.max()) + self.page_size - 1) // self.page_size
        first_slots = self.req_to_token[forward_batch.req_pool_indices, : pages * self.page_size : self.page_size]
        self.batch = AttentionBatch(start, seq_lens, (first_slots // self.page_size).to(torch.int32), self.page_size)
        self.write_slots = forward_batch.out_cache_loc[: self.batch.rows].long()
        self._stored = None if self.shards is None else self.shards.owned(self.write_slots)
        if forward_batch.attn_cp_metadata is not None:
            self.batch = self._own_part(self.batch, forward_batch)
        self.rows = self.batch.rows
        short = dense.dense_rows(self.batch, self.topk)
        self.dense_rows += short
        self.sparse_rows += self.rows - short
        self.all_dense = short == self.rows > 0
        self._causal = None

    def _own_part(self, whole: AttentionBatch, forward_batch: ForwardBatch) -> AttentionBatch:
        """This prefill rank's rows of the step."""
        self.split = forward_batch
        held = get_cp_strategy().local_q_indices(whole.rows, forward_batch)
        part = local_batch(held.numpy(), whole.query_start.numpy(), whole.seq_lens.numpy())
        start, ends = (torch.from_numpy(value).to(torch.int32) for value in (part.query_start, part.seq_lens))
        pages = whole.page_table.index_select(0, torch.from_numpy(part.request))
        of: Part | None = None
        if self.shards is not None:
            layout = getattr(forward_batch.attn_cp_metadata, "layout", None)  # of head-tail; others cut every request
            everywhere = torch.zeros(whole.requests, dtype=torch.bool)
            if layout is not None:
                everywhere = torch.from_numpy(layout.replicated)
            of = Part(whole, torch.from_numpy(part.request), everywhere)
        return AttentionBatch(start, ends, pages, whole.page_size, of)

    @property
    def _idle(self) -> bool:
        """Whether this rank has nothing to attend: no rows, and no keys that another rank's rows need."""
        return self.rows == 0 and (self.shards is None or self.split is None)

    def _all_rows(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys [n, width] of this rank's rows, n at least as many -> those of all rows of the step, in its order."""
        if self.split is None:
            return keys[: self.rows]
        gathered: torch.Tensor = get_cp_strategy().gather_kv_cache(keys, self.split)
        return gathered

    def facts(self) -> dict[str, Any]:
        """Memory and counters of attention since start, for GET /policy: plain JSON values."""
        rows = {"dense": self.dense_rows, "sparse": self.sparse_rows}
        facts = {"scratch_bytes": self.scratch.nbytes, "scratch_peak_bytes": self.scratch.peak, "rows": rows}
        if self.shards is not None:
            latent_bytes = sum(buffer.nbytes for buffer in self.token_to_kv_pool.kv_buffer)
            facts["shards"] = self.shards.facts() | {"latent_bytes": latent_bytes}
        return facts | self.slots.facts()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Store the rows' latent keys, then attend.

        Args:
            q: [rows, heads, 576] absorbed query (512 latent, 64 RoPE). k: [rows, 1, 576] latent row. v: in k already.
            kwargs: `topk_indices` int32 [rows, topk], request-local positions, -1 where there are fewer.

        Returns:
            [rows, heads * 512] in q's dtype.
        """
        heads, dim = layer.tp_q_head_num, self.rank_dim
        out = torch.zeros(q.shape[0], heads * dim, dtype=q.dtype)
        rows = self.rows
        if self.batch is None:
            return out
        cache = self.token_to_kv_pool.latent_cache(layer.layer_id)
        if save_kv_cache:
            self._store(cache, self._all_rows(k.view(-1, layer.head_dim)))
        if self._idle:
            return out
        q = q.view(-1, heads, layer.head_dim)[:rows]
        ids = kwargs["topk_indices"][:rows]
        attended = self.slots.prefill.attend(
            self.batch, q[..., :dim], q[..., dim:], cache, ids, layer.scaling, self.scratch
        )
        out[:rows] = attended.reshape(rows, heads * dim)
        return out

    def attend(
        self,
        layer_id: int,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        ids: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """`forward` for callers that hold the parts: store the rows' latent keys, then attend.

        Args:
            q_nope, q_rope: [rows, heads, 512] absorbed and [rows, heads, 64]; latent: [rows, 576], normed and turned.
            ids: int32 [rows, topk], from `index`. scale: softmax scale.

        Returns:
            [rows, heads, 512] in q's dtype.
        """
        rows = self.rows
        if self.batch is None:
            return torch.zeros_like(q_nope)
        cache = self.token_to_kv_pool.latent_cache(layer_id)
        self._store(cache, self._all_rows(latent))
        if self._idle:
            return torch.zeros_like(q_nope)
        attend = self.slots.prefill.attend
        seen = attend(self.batch, q_nope[:rows], q_rope[:rows], cache, ids[:rows], scale, self.scratch)
        if rows == q_nope.shape[0]:
            return seen
        return torch.cat([seen, seen.new_zeros(q_nope.shape[0] - rows, *seen.shape[1:])])

    def _store(self, cache: LatentCache, latent: torch.Tensor) -> None:
        """Write the rows' latent keys [rows, 576], under shards those that this rank owns."""
        slots = self.write_slots
        if self._stored is not None:
            which, slots = self._stored
            latent = latent[which]
        if cache.buffer.dtype == latent.dtype:
            cache.buffer.index_copy_(0, slots, latent)
        else:
            store_latent(cache, slots, latent[:, : self.rank_dim], latent[:, self.rank_dim :])

    def index(self, q: torch.Tensor, k: torch.Tensor, gates: torch.Tensor, layer_id: int, topk: int) -> torch.Tensor:
        """Store the rows' index keys of a full layer, then select.

        Args:
            q: [rows, index heads, 128] after RoPE. k: [rows, 128] after norm and RoPE.
            gates: float32 [rows, index heads], softmax and head scales folded in.

        Returns:
            int32 [rows, topk] request-local positions, ascending, -1 tail.
        """
        ids = torch.full((q.shape[0], topk), -1, dtype=torch.int32)
        rows = self.rows
        if self.batch is None:
            return ids
        if self.all_dense:
            return self.index_dense(k, layer_id, topk)
        cache = self.token_to_kv_pool.index_cache(layer_id)
        store_index(cache, self.write_slots, self._all_rows(k))
        if rows == 0:
            return ids
        ids[:rows] = self.slots.indexer.select(self.batch, q[:rows], gates[:rows], cache, topk, self.scratch)
        return ids

    def index_dense(self, k: torch.Tensor, layer_id: int, topk: int) -> torch.Tensor:
        """`index` for a step that is dense throughout (`all_dense`): the keys are stored, nothing is scored.

        Args:
            k: [rows, 128] after norm and RoPE.

        Returns:
            int32 [rows, topk], 0 to the row's position; the same tensor for every layer of the step.
        """
        assert self.batch is not None, "a step without rows has no dense branch"
        store_index(self.token_to_kv_pool.index_cache(layer_id), self.write_slots, self._all_rows(k))
        if self._causal is None or self._causal.shape != (k.shape[0], topk):
            self._causal = dense.causal_ids(self.batch, topk, k.shape[0])
        return self._causal

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


def shards_of(runner: ModelRunner) -> Shards | None:
    """How this rank shares the latent cache, and with whom; None where each rank holds all of it.

    Ranks next to each other in SGLang's tensor-parallel group share one cache; prefill ranks are such ranks, too, each
    with all heads.
    """
    from sglang.srt.runtime_context import get_parallel

    pool, parallel = runner.token_to_kv_pool, get_parallel()
    size = getattr(pool, "dcp_size", 1)
    if size == 1:
        return None
    group = sub_group(parallel.tp_group.device_group, size)
    same_heads = parallel.attn_cp_size > 1
    pool.shards = Shards(size, parallel.tp_rank % size, pool.interleave, group, same_heads)
    return pool.shards


def geometry_of(runner: ModelRunner, knobs: Mapping[str, Any], shards: Shards | None = None) -> Geometry:
    """Sizes of this rank's attention, read off SGLang's model runner."""
    from sglang.srt.runtime_context import get_parallel

    config, pool, parallel = runner.model_config.hf_text_config, runner.token_to_kv_pool, get_parallel()
    kind = pool.row_kind
    shared = parallel.attn_tp_size > 1
    return Geometry(
        max_model_len=runner.model_config.context_len,
        max_requests=runner.req_to_token_pool.req_to_token.shape[0],
        pool_tokens=pool.slots,
        topk=config.index_topk,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        dtype=runner.model_config.dtype,
        index_kind="fp8" if kind == "fp8_packed" else kind,
        latent_kind=kind,
        knobs=knobs,
        ranks=parallel.attn_tp_size,
        rank=parallel.attn_tp_rank,
        exchange=partial(all_gather_rows, group=parallel.attn_tp_group.device_group) if shared else None,
        free_bytes=psutil.virtual_memory().available,
        shards=shards,
    )


def index_forward(
    self: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    layer_id: int,
    return_indices: bool = True,
    use_cuda_graph: bool = False,
) -> torch.Tensor:
    """`Indexer.forward` on our platform (registered out-of-tree forward; `self` is SGLang's Indexer).

    q = RoPE(wq_b(q_lora)), k = RoPE(LayerNorm(wk(x))), gate = weights_proj(x) * heads^-0.5 * 128^-0.5, RoPE on the
    first 64 of 128 dims; see `attention/indexer/numerics.py` for the formula and its source.

    Args:
        x: [rows, hidden]. q_lora: [rows, q_lora_rank], normed. positions: int64 [rows].

    Returns:
        int32 [rows, topk].
    """
    backend = get_attn_backend()
    key = self.k_norm(self.wk(x)[0])
    rope = self.rope_head_dim
    if backend.all_dense:
        short = key[:, None, :rope]
        _, k_rope = self.rotary_emb(positions, short.clone(), short.contiguous())
        return backend.index_dense(torch.cat([k_rope.squeeze(1), key[:, rope:]], dim=-1), layer_id, self.index_topk)
    query = self.wq_b(q_lora)[0].view(-1, self.n_heads, self.head_dim)
    q_rope, k_rope = self.rotary_emb(positions, query[..., :rope].contiguous(), key[:, None, :rope].contiguous())
    query = torch.cat([q_rope, query[..., rope:]], dim=-1)
    key = torch.cat([k_rope.squeeze(1), key[:, rope:]], dim=-1)
    weight = self.weights_proj.weight
    if weight.dtype != torch.float32:
        # NOTE: SGLang builds weights_proj in bfloat16 whatever the model's dtype; the product itself is float32.
        weight = weight.float()
    gates = F.linear(x.float(), weight) * (self.n_heads * self.head_dim) ** -0.5
    ids: torch.Tensor = backend.index(query, key, gates, layer_id, self.index_topk)
    return ids
