"""SGLang's DSA backend with the slots `qchunk` and `workspace` in its prefill; everything else is inherited.

    model layer ──q_fp8, gates──> Indexer._get_topk_ragged ──hook──> topk_ragged ─> ChunkedIndexer ─> ids [rows, topk]
                ──q, latent─────> forward_extend ─> latent rows into the pool ─> GatheredPrefill ─> [rows, heads, 512]
                                        └─ prefill reads pages, or short contexts (MHA): SGLang's own forward_extend

Of a prefill step the ids are positions within their request, whichever slots are chosen: SGLang's unfused form, which
its own kernels take as well. Decode and verification keep the fused form. Not yet run on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.attention.utils import concat_mla_absorb_q_general
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
from sglang.srt.runtime_context import get_parallel

from attention.cuda.choice import ChoiceError, Machine, choose, needs_factor
from attention.cuda.indexer import ChunkedIndexer
from attention.cuda.library import LibraryCalls
from attention.cuda.prefill import GatheredPrefill
from attention.cuda.step import Step
from attention.geometry import Geometry
from attention.layouts import IndexCache, LatentCache
from attention.sizes import NOPE_DIM, PACKED_BYTES
from parallel.collectives import all_gather_rows

if TYPE_CHECKING:
    from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

LIBRARIES = ("deep_gemm", "flash_mla", "flashinfer", "sgl_kernel")


@dataclass(frozen=True)
class SlotNames:
    """The slots in force, as the report reads them."""

    indexer_name: str
    prefill_name: str


class GlmDsaBackend(DeepseekSparseAttnBackend):
    """DSA attention on a GPU.

    Args:
        runner: SGLang's model runner.
        indexer, prefill_kv: names of the slots, `ragged` or `qchunk`, and `paged` or `workspace`.
        knobs: effective settings of the slots, by name.

    Raises:
        ChoiceError: a model or device that the slots cannot serve; one line naming what to change.
        RuntimeError: `qchunk` without the hook through which SGLang's indexer reaches it.
        ValueError: too little free memory for their buffers.
    """

    use_fused_topk: bool

    def __init__(self, runner: ModelRunner, indexer: str, prefill_kv: str, knobs: Mapping[str, Any]) -> None:
        super().__init__(runner)
        self.slots = SlotNames(indexer, prefill_kv)
        require_plain(self, runner.model_config.hf_text_config)
        if indexer == "qchunk" and not hooked():
            # NOTE: the report takes the slots from here, so what is not in place must not pass for it.
            raise RuntimeError("--indexer qchunk: the hook of SGLang's Indexer._get_topk_ragged is not in place")
        machine = machine_of(self, runner.model_config.hf_text_config.index_n_heads)
        self.choice = choose(machine, prefill_kv == "workspace")
        if knobs.get("sparse_mla_prefill_workspace_factor") is not None and not needs_factor(indexer, self.choice):
            raise ChoiceError(
                "--sparse-mla-prefill-workspace-factor has nothing to size: prefill reads pages here, since "
                f"{self.choice.why}; drop it"
            )
        device = torch.device(self.device)
        calls = LibraryCalls(self.choice, self.dsa_topk_backend)
        self.indexer_slot: ChunkedIndexer | None = None
        self.prefill_slot: GatheredPrefill | None = None
        # NOTE: one after the other: the second sees what the first has left free.
        if indexer == "qchunk":
            self.indexer_slot = ChunkedIndexer(geometry_of(self, runner, machine, knobs), calls, device)
        if self.choice.reads == "workspace":
            self.prefill_slot = GatheredPrefill(geometry_of(self, runner, machine, knobs), calls, device)
        self.local_ids = self.indexer_slot is not None or self.prefill_slot is not None
        self._step: tuple[Any, Step] | None = None
        if get_parallel().tp_rank == 0:
            logger.info("glm_runtime: %s", self.choice.line(self.indexer_slot is not None))

    def facts(self) -> dict[str, Any]:
        """Calls in use, buffers in bytes, counters: plain JSON values for GET /policy."""
        found: dict[str, Any] = {"gpu": self.choice.facts()}
        for slot in (self.indexer_slot, self.prefill_slot):
            if slot is not None:
                found |= slot.facts()
        return found

    def step(self) -> Step:
        """The step of the current forward metadata, made once."""
        metadata = self.forward_metadata
        if self._step is None or self._step[0] is not metadata:
            lengths = metadata.indexer_seq_lens_cpu.tolist()
            rows = [int(n) for n in metadata.dsa_extend_seq_lens_list]
            self._step = (metadata, Step(lengths, rows, metadata.real_page_table))
        return self._step[1]

    def get_indexer_metadata(self, layer_id: int, forward_batch: ForwardBatch) -> DSAIndexerMetadata:
        """SGLang's, with its top-k unfused in prefill steps."""
        metadata = super().get_indexer_metadata(layer_id, forward_batch)
        if self.local_ids and forward_batch.forward_mode.is_extend_without_speculative():
            return replace(metadata, force_unfused_topk=True)
        return metadata

    def select(self, layer_id: int, q: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Ids of a prefill step by the `qchunk` slot; `weights` as SGLang's indexer hands them over, [n, heads, 1]."""
        assert self.indexer_slot is not None, "the qchunk slot is not in force"
        pages = get_token_to_kv_pool().get_index_k_with_scale_buffer(layer_id=layer_id)
        # NOTE: under a prefill graph q ends at the real rows, while the gates keep the padded ones.
        gates = weights.squeeze(-1)[: q.shape[0]].float()
        return self.indexer_slot.select(self.step(), q, gates, IndexCache(pages, "fp8"), out)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Prefill rows through the slots; speculative rows, short contexts and page reads are SGLang's."""
        prefill = forward_batch.forward_mode.is_extend_without_speculative()
        slot = self.prefill_slot
        if not prefill or slot is None or self.use_mha:
            with self.unfused(prefill and self.local_ids):
                return super().forward_extend(
                    q,
                    k,
                    v,
                    layer,
                    forward_batch,
                    save_kv_cache,
                    q_rope=q_rope,
                    k_rope=k_rope,
                    topk_indices=topk_indices,
                    **kwargs,
                )
        given = [name for name, value in kwargs.items() if value is not None and value is not False]
        if given or topk_indices is None:
            raise RuntimeError(f"--prefill-kv workspace cannot take {', '.join(given) or 'a layer without top-k ids'}")
        if k is not None and save_kv_cache:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        heads = layer.tp_q_head_num
        if q_rope is None:
            rows = q.contiguous().view(-1, heads, layer.head_dim)
        else:
            nope = q.view(-1, heads, NOPE_DIM)
            rows = concat_mla_absorb_q_general(nope, q_rope.view(nope.shape[0], heads, -1))
        return slot.attend(self.step(), rows, self.latent_cache(layer), topk_indices, layer.scaling)

    @contextmanager
    def unfused(self, wanted: bool) -> Iterator[None]:
        """SGLang's forward_extend reads `use_fused_topk` to know what the ids are."""
        before = self.use_fused_topk
        self.use_fused_topk = before and not wanted
        try:
            yield
        finally:
            self.use_fused_topk = before

    def latent_cache(self, layer: RadixAttention) -> LatentCache:
        """Latent rows of one layer as the slots read them."""
        return latent_cache(
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.dsa_kv_cache_store_fp8,
            getattr(layer, "k_scale_float", None),
        )


def latent_cache(buffer: torch.Tensor, packed: bool, layer_scale: float | None) -> LatentCache:
    """SGLang's key buffer of one layer, [slots, 1, row], as a `LatentCache`."""
    rows = buffer.view(buffer.shape[0], -1)
    if packed:
        return LatentCache(rows.view(torch.uint8), "fp8_packed")
    if rows.dtype == torch.float8_e4m3fn:
        return LatentCache(rows, "fp8_raw", 1.0 if layer_scale is None else float(layer_scale))
    return LatentCache(rows, str(rows.dtype).removeprefix("torch."))


def latent_kind(packed: bool, dtype: torch.dtype) -> str:
    """Layout name of the pool's latent rows."""
    if packed:
        return "fp8_packed"
    return "fp8_raw" if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")


def require_plain(backend: DeepseekSparseAttnBackend, config: Any) -> None:
    """Raise ChoiceError for a model or a mode of SGLang that the slots do not know."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        raise ChoiceError("--indexer qchunk and --prefill-kv workspace need CPU or an NVIDIA GPU; use ragged and paged")
    odd = {
        "decode context parallelism": backend.dcp_size > 1,
        "HiSparse": backend.hisparse_coordinator is not None,
        "pooled index keys": backend.dsa_index_kpool > 1,
        "a sharded KV pool": backend._kv_shard_pool is not None,
        "forced initial or local tokens": any(
            getattr(config, n, 0) for n in ("index_init_tokens", "index_local_tokens")
        ),
        "latent rows of another width": (backend.kv_lora_rank, backend.qk_rope_head_dim) != (NOPE_DIM, 64),
    }
    for name, found in odd.items():
        if found:
            raise ChoiceError(
                f"--indexer qchunk and --prefill-kv workspace do not support {name}; use ragged and paged"
            )


def hooked() -> bool:
    """Whether SGLang's hook registry has wrapped the function that `topk_ragged` stands around."""
    return hasattr(Indexer._get_topk_ragged, "__wrapped__")


def machine_of(backend: DeepseekSparseAttnBackend, index_heads: int) -> Machine:
    """What the choice depends on, read off SGLang's backend."""
    found = {name for name in LIBRARIES if find_spec(name) is not None}
    if envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.get():
        found.discard("deep_gemm")  # the operator's word that it does not work here
    pool = backend.token_to_kv_pool
    kind = latent_kind(backend.dsa_kv_cache_store_fp8, pool.dtype)
    if kind == "fp8_packed" and backend.kv_cache_dim != PACKED_BYTES:
        raise ChoiceError(f"latent rows of {backend.kv_cache_dim} bytes are not known; use --prefill-kv paged")
    return Machine(
        capability=backend.device_capability,
        heads=backend.num_q_heads,
        index_heads=index_heads,
        latent_kind=kind,
        prefill_backend=backend.dsa_prefill_impl,
        topk_backend=backend.dsa_topk_backend.value,
        topk=backend.dsa_index_topk,
        libraries=found,
    )


def geometry_of(
    backend: DeepseekSparseAttnBackend, runner: ModelRunner, machine: Machine, knobs: Mapping[str, Any]
) -> Geometry:
    """Sizes of this rank's attention, read off SGLang's model runner; memory free on the device now."""
    config, pool, parallel = runner.model_config.hf_text_config, runner.token_to_kv_pool, get_parallel()
    shared = parallel.tp_size > 1
    return Geometry(
        max_model_len=runner.model_config.context_len,
        max_requests=runner.req_to_token_pool.req_to_token.shape[0],
        pool_tokens=pool.size + pool.page_size,
        topk=machine.topk,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        dtype=runner.model_config.dtype,
        index_kind="fp8",
        latent_kind=machine.latent_kind,
        knobs=knobs,
        ranks=parallel.tp_size,
        rank=parallel.tp_rank,
        exchange=partial(all_gather_rows, group=parallel.tp_group.device_group) if shared else None,
        free_bytes=torch.cuda.mem_get_info()[0],
    )


def topk_ragged(
    original: Callable[..., torch.Tensor],
    self: Any,
    enable_dual_stream: bool,
    forward_batch: ForwardBatch,
    layer_id: int,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    metadata: Any,
    topk_result: torch.Tensor | None = None,
) -> torch.Tensor:
    """Around `Indexer._get_topk_ragged` (`self` is SGLang's Indexer): the `qchunk` slot where it is in force.

    Args:
        q_fp8: float8_e4m3fn [n, heads, 128]. weights: float32 [n or more, heads, 1].
        topk_result: int32 [n or more, topk] to fill.
    """
    backend = get_attn_backend()
    if getattr(backend, "indexer_slot", None) is None:
        return original(self, enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata, topk_result)
    with self._with_real_sm_count():
        found: torch.Tensor = backend.select(layer_id, q_fp8, weights, topk_result)
    return found
