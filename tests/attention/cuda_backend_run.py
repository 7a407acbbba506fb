"""The subclass of SGLang's DSA backend on CPU tensors, run by ``test_cuda_backend.py`` in a process of its own.

SGLang's constructor, its planning of a step, its pool and our Triton kernels (interpreted) are the real ones. Replaced
are what only a GPU has: DeepGEMM, FlashMLA, the Triton writer of packed rows, and what torch.cuda says of the device.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.server_args import ServerArgs
from torch import Tensor

from attention.batch import AttentionBatch
from attention.cuda import backend as ours
from attention.cuda.choice import ChoiceError
from attention.kernels import reference
from attention.layouts import IndexCache, LatentCache, load_index, store_index, store_latent
from attention.sizes import PAGE_SIZE
from glm_runtime import config, hooks, plugin
from tests.attention.cuda_reference import ascending, plain_attention, slots_of, whole
from tests.attention.triton_interpreter import repair

repair()

FP8, BF16, TOPK, HEADS, INDEX_HEADS, SCALE = torch.float8_e4m3fn, torch.bfloat16, 64, 4, 4, 0.05
REQUEST = config.RuntimeConfig(
    policy="vllm-ledger",
    slots={"scheduler": "sglang", "context_parallel": "interleave", "indexer": "qchunk", "prefill_kv": "workspace"},
    device="accelerator",
    knobs={"sparse_indexer_max_logits_mb": 1, "step_log": None},
)
REQUESTS = [(9, 200), (5, 30), (1, 150), (1, 90), (6, 130)]
LN_2 = 0.6931471805599453


# ---- what only a GPU has ---------------------------------------------------------------------------------------------


def fp8_mqa_logits(
    q: Tensor, kv: Any, weights: Tensor, ks: Tensor, ke: Tensor, clean_logits: bool = False, max_seqlen_k: int = 0
) -> Tensor:
    """DeepGEMM's, compressed, its rows padded to 256 columns of anything."""
    keys, scales = kv
    assert q.shape[1] == 32 and q.dtype == keys.dtype == FP8 and q.is_contiguous() and weights.is_contiguous()
    assert not clean_logits and max_seqlen_k >= int((ke - ks).max()) and scales.data_ptr() % 16 == 0
    out = torch.full((q.shape[0], -(-max_seqlen_k // 256) * 256), 1e30)
    plain = reference.scores(q, weights, keys, scales)
    for i, (a, b) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
        out[i, : b - a] = plain[i, a:b]
    return out


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Any,
    max_context_len: int,
    clean_logits: bool = False,
) -> Tensor:
    """DeepGEMM's, one row a request."""
    assert q.shape[1:3] == (1, 32) and kv_cache.shape[1:] == (PAGE_SIZE, 1, 132) and context_lens.shape == (len(q), 1)
    assert schedule_meta == ("schedule", len(q), 132) and not clean_logits
    cache = IndexCache(kv_cache.view(kv_cache.shape[0], -1), "fp8")
    out = torch.full((q.shape[0], max_context_len), 1e30)
    for i, n in enumerate(context_lens[:, 0].tolist()):
        keys, scales = load_index(cache, slots_of(block_table[i], n))
        out[i, :n] = reference.scores(q[i], weights[i : i + 1], keys, scales)[0]
    return out


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    *,
    use_legacy: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """FlashMLA's prefill kernel: 64 heads, bfloat16 rows, sums in base 2."""
    assert q.shape[1:] == (64, 576) and kv.shape[1:] == (1, 576) and q.dtype == kv.dtype == BF16 and d_v == 512
    assert indices.shape == (q.shape[0], 1, TOPK) and attn_sink is None and topk_length is not None
    seen = torch.arange(TOPK) < topk_length.unsqueeze(1)
    ids = torch.where(seen, indices[:, 0], -1)
    assert (ids[seen] >= 0).all()
    out, lse = plain_attention(None, q, LatentCache(kv[:, 0].contiguous(), "bfloat16"), ids, sm_scale)
    return out, None, lse / LN_2


def get_mla_metadata(
    cache_seqlens: Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, Any]:
    assert cache_seqlens is not None and (num_heads_k, num_heads_q, is_fp8_kvcache, topk) == (1, 64, True, TOPK)
    return ("metadata", cache_seqlens.shape[0]), cache_seqlens


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    kv_format: str | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashMLA's decode kernel over packed rows."""
    assert indices is not None and cache_seqlens is not None and softmax_scale is not None and is_fp8_kvcache
    assert q.shape[1:] == (1, 64, 576) and k_cache.shape[1:] == (PAGE_SIZE, 1, 656) and kv_format == "V32"
    assert tile_scheduler_metadata == ("metadata", q.shape[0]) and num_splits is cache_seqlens
    cache = LatentCache(k_cache.view(torch.uint8).view(-1, 656), "fp8_packed")
    out, lse = plain_attention(None, q[:, 0], cache, indices[:, 0], softmax_scale)
    return out.unsqueeze(1), lse.unsqueeze(-1)


FAKES = (flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata)


class Pool(DSATokenToKVPool):
    """SGLang's pool; its Triton writer replaced."""

    def _write_mla_kv_buffer(self, dst: Tensor, loc: Tensor, nope: Tensor, rope: Tensor) -> None:
        cache = ours.latent_cache(dst.view(self.dtype), self.dsa_kv_cache_store_fp8, None)
        store_latent(cache, loc.long(), nope.view(-1, 512), rope.view(-1, 64))


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[None]:
    """A capability 9.0 device, as far as anybody asks."""
    import deep_gemm

    hooks.register(REQUEST)
    HookRegistry.apply_hooks()
    patch = pytest.MonkeyPatch()
    patch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "64")
    module = ModuleType("sglang.kernels.ops.attention.flash_mla_interface")
    for fake in FAKES:
        setattr(module, fake.__name__, fake)
    patch.setitem(sys.modules, module.__name__, module)
    patch.setattr(deep_gemm, "fp8_mqa_logits", fp8_mqa_logits)
    patch.setattr(deep_gemm, "fp8_paged_mqa_logits", fp8_paged_mqa_logits)
    patch.setattr(deep_gemm, "get_paged_mqa_logits_metadata", lambda lens, block, sms: ("schedule", len(lens), sms))
    patch.setattr(ours, "LIBRARIES", ("deep_gemm", "flash_mla"))  # top-k by Triton, whose ties have a rule
    patch.setattr(deep_gemm, "get_num_sms", lambda: 132)
    patch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "mem_get_info", lambda *args: (1 << 33, 1 << 34))
    patch.setattr("sglang.srt.utils.get_device_sm", lambda: 90)
    patch.setattr("sglang.srt.utils.is_blackwell", lambda: False)
    yield
    patch.undo()


# ---- a model runner, a step ------------------------------------------------------------------------------------------


def runner_of(kind: str, prefill: str, topk: str = "flashinfer") -> Any:
    """As much of SGLang's model runner as the backend reads, over its real pool. FlashInfer counts as absent."""
    args = ServerArgs(
        model_path="m",
        device="cpu",
        dsa_prefill_backend=prefill,
        dsa_decode_backend="trtllm" if kind == "fp8_raw" else "flashmla_kv",
        dsa_topk_backend=topk,
    )
    get_context().set_server_args(args)
    names = ("tp", "attn_tp", "attn_dcp", "attn_cp", "pp", "moe_ep", "moe_tp", "attn_dp")
    get_parallel().override_permanently(**{f"{n}_size": 1 for n in names}, tp_rank=0, attn_dcp_rank=0)
    text = SimpleNamespace(
        architectures=["GlmMoeDsaForCausalLM"],
        index_topk=TOPK,
        index_n_heads=INDEX_HEADS,
        index_head_dim=128,
        model_type="glm_moe_dsa",
    )
    model = SimpleNamespace(
        hf_config=text,
        hf_text_config=text,
        context_len=512,
        num_attention_heads=HEADS,
        qk_nope_head_dim=192,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dtype=BF16,
    )
    dtype = BF16 if kind == "bfloat16" else FP8
    width = {"bfloat16": 576, "fp8_raw": 576, "fp8_packed": 656}[kind]
    pool = Pool(1024, PAGE_SIZE, 512, dtype, 64, 1, "cpu", 128, False, width)
    table = torch.zeros((8, 512), dtype=torch.int32)
    pages = torch.randperm(16, generator=torch.Generator().manual_seed(0)) + 1
    at = 0
    for r, (_, length) in enumerate(REQUESTS):
        count = -(-length // PAGE_SIZE)
        slots = (pages[at : at + count, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
        table[r + 1, : count * PAGE_SIZE] = slots
        at += count
    return SimpleNamespace(
        device="cpu",
        page_size=PAGE_SIZE,
        model_config=model,
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=table, size=7),
        is_draft_worker=False,
        hisparse_coordinator=None,
        kv_cache_dtype=dtype,
        max_running_requests=7,
    )


def forward_batch(runner: Any, mode: ForwardMode = ForwardMode.MIXED) -> Any:
    """All requests; the rows before the new ones are in the cache already."""
    rows, ends = [n for n, _ in REQUESTS], [length for _, length in REQUESTS]
    table = runner.req_to_token_pool.req_to_token
    new = [table[r + 1, end - n : end] for r, (n, end) in enumerate(REQUESTS)]
    prefix = [end - n for n, end in REQUESTS]
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(REQUESTS),
        seq_lens=torch.tensor(ends),
        seq_lens_cpu=torch.tensor(ends),
        seq_lens_sum=sum(ends),
        req_pool_indices=torch.arange(1, len(REQUESTS) + 1),
        extend_seq_lens=torch.tensor(rows),
        extend_seq_lens_cpu=rows,
        extend_prefix_lens=torch.tensor(prefix),
        extend_prefix_lens_cpu=prefix,
        extend_num_tokens=sum(rows),
        out_cache_loc=torch.cat(new).long(),
        global_num_tokens_cpu=None,
        attn_cp_metadata=None,
        spec_info=None,
        get_max_chunk_capacity=lambda: 1 << 20,
    )


class World:
    """One backend, its cache filled, and the inputs of one layer."""

    def __init__(
        self,
        kind: str,
        prefill: str,
        indexer: str = "qchunk",
        prefill_kv: str = "workspace",
        topk: str = "flashinfer",
        **knobs: Any,
    ) -> None:
        self.runner = runner_of(kind, prefill, topk)
        self.fb = forward_batch(self.runner)
        self.backend = ours.GlmDsaBackend(
            self.runner, indexer, prefill_kv, {"sparse_indexer_max_logits_mb": 1, **knobs}
        )
        self.pool = self.runner.token_to_kv_pool
        rng = torch.Generator().manual_seed(1)
        table = self.runner.req_to_token_pool.req_to_token
        rows, ends = [n for n, _ in REQUESTS], [length for _, length in REQUESTS]
        starts = torch.tensor([0, *rows]).cumsum(0).int()
        pages = (table[1 : len(REQUESTS) + 1, ::PAGE_SIZE] // PAGE_SIZE).contiguous()
        self.batch = AttentionBatch(starts, torch.tensor(ends, dtype=torch.int32), pages)
        self.index = IndexCache(self.pool.get_index_k_with_scale_buffer(layer_id=0), "fp8")
        latent = self.backend.latent_cache(self.layer())
        for r in range(len(REQUESTS)):
            slots = self.batch.context_slots(r)
            store_index(self.index, slots, whole(rng, len(slots), 128, largest=0))
            store_latent(
                latent,
                slots,
                torch.randn((len(slots), 512), generator=rng),
                torch.randn((len(slots), 64), generator=rng),
            )
        n = self.batch.rows
        self.q8 = whole(rng, n, INDEX_HEADS, 128, largest=1).to(FP8)
        self.gates = whole(rng, n, INDEX_HEADS, 1)
        self.q_nope = torch.randn((n, HEADS, 512), generator=rng).to(BF16)
        self.q_rope = torch.randn((n, HEADS, 64), generator=rng).to(BF16)
        self.k = torch.randn((n, 1, 512), generator=rng).to(BF16)
        self.k_rope = torch.randn((n, 1, 64), generator=rng).to(BF16)

    def layer(self) -> Any:
        return SimpleNamespace(
            layer_id=0,
            tp_q_head_num=HEADS,
            tp_k_head_num=1,
            head_dim=576,
            v_head_dim=512,
            scaling=SCALE,
            is_cross_attention=False,
            k_scale_float=0.5 if self.pool_is_raw() else None,
        )

    def pool_is_raw(self) -> bool:
        return self.runner.kv_cache_dtype == FP8 and not self.backend.dsa_kv_cache_store_fp8

    def plain_ids(self) -> Tensor:
        """Scored request by request, unsplit."""
        out = torch.full((self.batch.rows, TOPK), -1, dtype=torch.int32)
        owner, position = self.batch.row_requests().tolist(), self.batch.row_positions().tolist()
        for i, (r, p) in enumerate(zip(owner, position, strict=True)):
            keys, scale = load_index(self.index, self.batch.context_slots(r)[: p + 1])
            row = reference.scores(self.q8[i : i + 1], self.gates[i : i + 1, :, 0], keys, scale)[0]
            found = reference.best(row, TOPK)
            out[i, : found.shape[0]] = found
        return out

    def select(self, out: Tensor | None = None) -> Tensor:
        indexer = SimpleNamespace(_with_real_sm_count=nullcontext)
        return ours.topk_ragged(unexpected, indexer, False, self.fb, 0, self.q8, self.gates, None, out)

    def attend(self, ids: Tensor) -> Tensor:
        return self.backend.forward_extend(
            self.q_nope, self.k, self.k, self.layer(), self.fb, True, self.q_rope, self.k_rope, ids, is_neox=False
        )


def unexpected(*args: Any, **kwargs: Any) -> Tensor:
    raise AssertionError("SGLang's own part ran")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A world whose backend and pool are those of the forward pass."""

    def make(*args: Any, **kwargs: Any) -> World:
        world = World(*args, **kwargs)
        monkeypatch.setattr(ours, "get_attn_backend", lambda: world.backend)
        monkeypatch.setattr(ours, "get_token_to_kv_pool", lambda: world.pool)
        world.backend.init_forward_metadata(world.fb)
        return world

    return make


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp8_packed", "fp8_raw"])
def test_a_mixed_step_through_both_slots(kind: str, served: Any) -> None:
    world = served(kind, "flashmla_sparse", indexer_strict_cap=True)
    choice = world.backend.choice
    assert (choice.score, choice.reads, choice.attend) == ("DeepGEMM", "workspace", "Triton")  # 64 ids: not FlashMLA's
    ids = world.select()
    assert torch.equal(ascending(ids), world.plain_ids())
    out = world.attend(ids)
    latent = world.backend.latent_cache(world.layer())
    q = torch.cat([world.q_nope, world.q_rope], dim=-1)
    want, _ = plain_attention(world.batch, q, latent, world.plain_ids(), SCALE)
    assert torch.allclose(out.float(), want.float(), rtol=2**-6, atol=2**-5)
    facts = json.loads(json.dumps(world.backend.facts()))
    assert facts["indexer_work"] == {"chunks": 2, "gathers": 2, "key_slices": 0}
    assert facts["prefill_work"] == {"gathers": 2, "workspace_rows": 330}
    assert facts["gpu"]["state"] == "not yet run on a GPU"


def test_rows_just_written_are_read(served: Any) -> None:
    world = served("fp8_packed", "flashmla_sparse")
    world.attend(world.select())
    cache = world.backend.latent_cache(world.layer())
    fresh = cache.buffer[world.fb.out_cache_loc]
    stored = LatentCache(torch.zeros_like(fresh), "fp8_packed")
    store_latent(stored, torch.arange(len(fresh)), world.k[:, 0], world.k_rope[:, 0])
    assert torch.equal(fresh, stored.buffer)


def test_flashmla_reads_the_workspace_and_the_pages_of_single_rows(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attention.cuda.choice.FLASHMLA_IDS", 64)
    world = served("fp8_packed", "flashmla_sparse")
    assert (world.backend.choice.attend, world.backend.choice.pages) == ("FlashMLA", "FlashMLA")
    ids = world.select()
    out = world.attend(ids)
    q = torch.cat([world.q_nope, world.q_rope], dim=-1)
    latent = world.backend.latent_cache(world.layer())
    want, want_lse = plain_attention(world.batch, q, latent, world.plain_ids(), SCALE)
    assert torch.allclose(out.float(), want.float(), rtol=2**-7, atol=2**-6)
    slot = world.backend.prefill_slot
    _, lse = slot.attend(world.backend.step(), q, latent, ids, SCALE, return_lse=True)
    assert torch.allclose(lse, want_lse, rtol=1e-4, atol=1e-3)


def test_a_given_buffer_is_filled_beyond_the_rows(served: Any) -> None:
    world = served("fp8_packed", "flashmla_sparse")
    out = torch.full((world.batch.rows + 3, TOPK), 7, dtype=torch.int32)
    world.gates = torch.cat([world.gates, world.gates[:3]])
    assert world.select(out) is out
    assert (out[-3:] == -1).all() and torch.equal(ascending(out[:-3]), world.plain_ids())


def test_sglangs_own_top_k(served: Any) -> None:
    """Equal scores may be kept otherwise; what is kept scores the same."""
    world = served("fp8_packed", "flashmla_sparse", topk="torch")
    assert world.backend.choice.topk == "torch"
    found, wanted = ascending(world.select()), world.plain_ids()
    owner, position = world.batch.row_requests().tolist(), world.batch.row_positions().tolist()
    for i, (r, p) in enumerate(zip(owner, position, strict=True)):
        keys, scale = load_index(world.index, world.batch.context_slots(r)[: p + 1])
        row = reference.scores(world.q8[i : i + 1], world.gates[i : i + 1, :, 0], keys, scale)[0]
        ours_, theirs = (row[ids[i][ids[i] >= 0].long()].sort().values for ids in (found, wanted))
        assert torch.equal(ours_, theirs)


def test_ids_are_local_in_prefill_and_fused_in_decode(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`qchunk` with `paged`: SGLang's own forward_extend, told that the ids are positions."""
    world = served("bfloat16", "flashmla_sparse", prefill_kv="paged")
    backend = world.backend
    assert backend.prefill_slot is None and backend.use_fused_topk
    told = []
    monkeypatch.setattr(
        dsa_backend.DeepseekSparseAttnBackend,
        "forward_extend",
        lambda self, *args, **kwargs: told.append((self.use_fused_topk, kwargs["topk_indices"] is not None)),
    )
    world.attend(world.select())
    assert told == [(False, True)] and backend.use_fused_topk
    assert backend.get_indexer_metadata(0, world.fb).force_unfused_topk
    decode = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    assert not backend.get_indexer_metadata(0, decode).force_unfused_topk


def test_sglangs_indexer_with_the_workspace(served: Any) -> None:
    world = served("fp8_packed", "flashmla_sparse", indexer="ragged", topk="torch")
    assert world.backend.indexer_slot is None
    passed = []
    indexer = SimpleNamespace(_with_real_sm_count=nullcontext)
    ours.topk_ragged(lambda *args: passed.append(args), indexer, False, world.fb, 0, world.q8, world.gates, None)
    assert len(passed) == 1 and passed[0][0] is indexer
    metadata = world.backend.get_indexer_metadata(0, world.fb)
    # SGLang's own unfused top-k of a dummy, as for short contexts: positions of the request.
    found = metadata.topk_transform(torch.zeros((world.batch.rows, TOPK)), TOPK)
    assert found.max() < TOPK


def test_short_contexts_stay_sglangs(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = served("fp8_packed", "flashmla_sparse")
    world.backend.use_mha = True
    ran = []
    monkeypatch.setattr(
        dsa_backend.DeepseekSparseAttnBackend, "forward_extend", lambda self, *args, **kwargs: ran.append(args)
    )
    world.attend(world.plain_ids())
    assert len(ran) == 1


def test_pages_are_read_where_a_workspace_saves_nothing(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        world = served("bfloat16", "flashmla_sparse")
    assert world.backend.prefill_slot is None and world.backend.choice.reads == "pages"
    said = [record.getMessage() for record in caplog.records if "glm_runtime" in record.getMessage()]
    assert said == [
        "glm_runtime: index scores by DeepGEMM, top-k by Triton; prefill reads pages by SGLang's own kernel: bfloat16 "
        "rows need no up-conversion (not yet run on a GPU)"
    ]
    with pytest.raises(ChoiceError, match="--sparse-mla-prefill-workspace-factor has nothing to size"):
        World("bfloat16", "flashmla_sparse", "ragged", "workspace", sparse_mla_prefill_workspace_factor=3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dcp_size": 2}, "decode context parallelism"),
        ({"hisparse_coordinator": object()}, "HiSparse"),
        ({"dsa_index_kpool": 4}, "pooled index keys"),
        ({"kv_lora_rank": 256}, "latent rows of another width"),
    ],
)
def test_what_the_slots_do_not_know_is_named(served: Any, change: dict[str, Any], named: str) -> None:
    backend = served("fp8_packed", "flashmla_sparse").backend
    vars(backend).update(change)
    with pytest.raises(ChoiceError, match=f"do not support {named}; use ragged and paged"):
        ours.require_plain(backend, SimpleNamespace())
    with pytest.raises(ChoiceError, match="forced initial or local tokens"):
        ours.require_plain(served("fp8_packed", "flashmla_sparse").backend, SimpleNamespace(index_init_tokens=4))


def test_the_plugin_puts_it_in_the_place_of_dsa(served: Any) -> None:
    plugin._register_gpu(REQUEST)
    made = ATTENTION_BACKENDS["dsa"](runner_of("fp8_packed", "flashmla_sparse"))
    assert isinstance(made, ours.GlmDsaBackend) and ATTENTION_BACKENDS["nsa"] is ATTENTION_BACKENDS["dsa"]
    assert (made.slots.indexer_name, made.slots.prefill_name) == ("qchunk", "workspace")
    world = served("fp8_packed", "flashmla_sparse")
    indexer = SimpleNamespace(_with_real_sm_count=nullcontext)
    found = Indexer._get_topk_ragged(indexer, False, world.fb, 0, world.q8, world.gates, None)
    assert torch.equal(ascending(found), world.plain_ids())


def test_a_hook_that_is_not_in_place_ends_the_start(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Indexer, "_get_topk_ragged", lambda self: None)
    with pytest.raises(RuntimeError, match="the hook of SGLang's Indexer"):
        World("fp8_packed", "flashmla_sparse")
    World("fp8_packed", "flashmla_sparse", indexer="ragged")
