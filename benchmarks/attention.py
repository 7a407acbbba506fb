"""Attention on the CPU: scoring, top-k, gather, sparse MLA, decode and the whole layer, against floors and peers.

floor of a part      one-thread GEMM (oneDNN, cache-sized pieces) of the same flops, or a copy of the same bytes,
                     taken in turn with the part
reference            the plain torch expression (attention/kernels/reference.py), fewer rows, scaled
transformers         GlmMoeDsaAttention with a filled cache, same weights, same rows, outputs compared

python -m benchmarks.attention [--quick] [--json FILE]
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attention import paged
from attention.batch import AttentionBatch
from attention.indexer import ragged
from attention.indexer.numerics import IndexerWeights, project, rope_interleaved, rope_tables
from attention.kernels import cpu, reference
from attention.kernels.topk import collect
from attention.layouts import IndexCache, LatentCache, store_index, store_latent
from attention.scratch import Scratch
from attention.sizes import INDEX_DIM, INDEX_PAGE_BYTES, LATENT_DIM, NOPE_DIM, PACKED_BYTES, PAGE_SIZE, ROPE_DIM
from benchmarks.common import Ask, Report, interleave, measure_floor, median, parser, ratio

HEADS = 8
INDEX_HEADS = 32
PIECE = 1024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def batch_of(rows: int, context: int, requests: int = 1) -> AttentionBatch:
    """Requests of ``rows`` query rows over ``context`` tokens, pages shuffled."""
    pages = -(-context // PAGE_SIZE)
    generator = torch.Generator().manual_seed(context)
    table = torch.randperm(requests * pages, generator=generator).to(torch.int32).view(requests, pages)
    start = torch.arange(requests + 1, dtype=torch.int32) * rows
    return AttentionBatch(start, torch.full((requests,), context, dtype=torch.int32), table)


def index_cache(kind: str, slots: int) -> IndexCache:
    """Random keys in every slot."""
    if kind == "fp8":
        cache = IndexCache(torch.zeros((slots // PAGE_SIZE, INDEX_PAGE_BYTES), dtype=torch.uint8), kind)
    else:
        cache = IndexCache(torch.zeros((slots, INDEX_DIM), dtype=DTYPES[kind]), kind)
    store_index(cache, torch.arange(slots), torch.randn((slots, INDEX_DIM)))
    return cache


def latent_cache(kind: str, slots: int) -> LatentCache:
    """Random rows in every slot."""
    if kind == "fp8_packed":
        cache = LatentCache(torch.zeros((slots, PACKED_BYTES), dtype=torch.uint8), kind)
    else:
        cache = LatentCache(torch.zeros((slots, LATENT_DIM), dtype=DTYPES[kind]), kind)
    store_latent(cache, torch.arange(slots), torch.randn((slots, NOPE_DIM)), torch.randn((slots, ROPE_DIM)))
    return cache


def gemm(flop: float, inner: int, dtype: torch.dtype) -> Callable[[], object]:
    """A library product of ``flop`` floating-point operations in pieces that stay in cache."""
    left, right = torch.randn((PIECE, inner)).to(dtype), torch.randn((PIECE, inner)).to(dtype)
    times = max(1, round(flop / (2 * PIECE * PIECE * inner)))
    linear = torch.ops.mkldnn._linear_pointwise

    def run() -> None:
        for _ in range(times):
            linear(left, right, None, "none", [], "")

    return run


def scoring(report: Report, kind: str, rows: int, context: int, topk: int) -> None:
    """Scoring with top-k against the GEMM of the scoring alone."""
    dtype = DTYPES.get(kind, torch.bfloat16)
    batch, cache, scratch = batch_of(rows, context), index_cache(kind, context), Scratch(64 << 20)
    q, weights = torch.randn((rows, INDEX_HEADS, INDEX_DIM)).to(dtype), torch.randn((rows, INDEX_HEADS))
    flop = 2.0 * INDEX_DIM * INDEX_HEADS * sum(range(context - rows + 1, context + 1))
    few = max(1, rows // 16)
    small = AttentionBatch(torch.tensor([0, few], dtype=torch.int32), batch.seq_lens, batch.page_table)
    out = torch.empty((few, topk), dtype=torch.int32)

    def plain() -> None:
        reference.select(small, q[-few:], weights[-few:], cache, topk, scratch, out)

    times = interleave(
        {
            "floor": gemm(flop, INDEX_DIM, dtype),
            "ours": lambda: ragged.select(batch, q, weights, cache, topk, scratch),
            "reference": plain,
        },
        rounds=5,
    )
    slower = ratio(times, "ours", "floor")
    name = f"scoring_{kind}"
    report.figure(
        name, {"ms": 1e3 * median(times["ours"]), "x_floor": slower, "gflop_s": flop / min(times["ours"]) / 1e9}
    )
    report.figure(f"{name}_reference_x", ratio(times, "reference", "ours") * rows / few)
    print(
        f"scoring + top-k {kind:10s} {rows} x {context}: {1e3 * median(times['ours']):9.2f} ms, "
        f"{slower:.2f}x the GEMM floor"
    )
    if kind in DTYPES:
        report.ask(Ask(f"scoring {kind} against the GEMM floor", slower, 2.0, "<=", "x"))


def selection(report: Report, rows: int, context: int, topk: int) -> None:
    """Top-k alone, and torch.topk and a stable sort on the same scores."""
    scores = torch.randn((rows, context))
    spent, out = torch.empty_like(scores), torch.empty((rows, topk), dtype=torch.int32)

    def ours() -> None:
        spent.copy_(scores)
        for i in range(rows):
            collect(spent[i].data_ptr(), context, topk, out[i].data_ptr())

    times = interleave(
        {"ours": ours, "torch.topk": lambda: scores.topk(topk), "sort": lambda: scores.sort(stable=True)}, 3
    )
    report.figure("topk_ms", {name: 1e3 * median(series) for name, series in times.items()})
    print("top-k alone:", ", ".join(f"{name} {1e3 * median(series):.1f} ms" for name, series in times.items()))


def sparse(report: Report, kind: str, rows: int, context: int, topk: int) -> None:
    """Sparse MLA in place against the GEMM of its two products."""
    dtype = DTYPES.get(kind, torch.bfloat16)
    batch, cache, scratch = batch_of(rows, context), latent_cache(kind, context), Scratch(64 << 20)
    q_nope, q_rope = torch.randn((rows, HEADS, NOPE_DIM)).to(dtype), torch.randn((rows, HEADS, ROPE_DIM)).to(dtype)
    ids = torch.stack([torch.randperm(context - rows)[:topk].sort().values for _ in range(rows)]).to(torch.int32)
    flop = 2.0 * rows * HEADS * topk * (LATENT_DIM + NOPE_DIM)
    few = max(1, rows // 16)
    small = AttentionBatch(torch.tensor([0, few], dtype=torch.int32), batch.seq_lens, batch.page_table)
    out, lse = torch.empty_like(q_nope[:few]), torch.empty((few, HEADS))

    def plain() -> None:
        reference.attend(small, q_nope[:few], q_rope[:few], cache, ids[:few], 0.05, scratch, out, lse)

    times = interleave(
        {
            "floor": gemm(flop, LATENT_DIM, dtype),
            "ours": lambda: paged.attend(batch, q_nope, q_rope, cache, ids, 0.05, scratch),
            "reference": plain,
        },
        rounds=5,
    )
    slower = ratio(times, "ours", "floor")
    report.figure(f"sparse_{kind}", {"ms": 1e3 * median(times["ours"]), "x_floor": slower})
    report.figure(f"sparse_{kind}_reference_x", ratio(times, "reference", "ours") * rows / few)
    print(
        f"sparse MLA {kind:10s} {rows} x {topk} x {HEADS}: {1e3 * median(times['ours']):9.2f} ms, "
        f"{slower:.2f}x the GEMM floor"
    )
    if kind in DTYPES:
        report.ask(Ask(f"sparse MLA {kind} against the GEMM floor", slower, 2.5, "<=", "x"))


def gathering(report: Report, kind: str, count: int) -> None:
    """Rows at random slots into contiguous rows, against a copy of the same bytes."""
    dtype = DTYPES.get(kind, torch.bfloat16)
    cache, slots = latent_cache(kind, count), torch.randperm(count)
    out = torch.empty((count, LATENT_DIM), dtype=dtype)
    moved = cache.buffer.numel() * cache.buffer.element_size() + out.numel() * out.element_size()
    source = torch.ones(moved // 8)
    target = torch.empty_like(source)
    times = interleave(
        {
            "floor": lambda: target.copy_(source),
            "ours": lambda: cpu.gather(cache, slots, out),
            "reference": lambda: reference.gather(cache, slots, out),
        },
        rounds=15,
    )
    slower = ratio(times, "ours", "floor")
    report.figure(
        f"gather_{kind}",
        {"ms": 1e3 * median(times["ours"]), "x_floor": slower, "gb_s": moved / min(times["ours"]) / 1e9},
    )
    report.figure(f"gather_{kind}_reference_x", ratio(times, "reference", "ours"))
    print(f"gather {kind:10s} {count} rows: {1e3 * median(times['ours']):9.2f} ms, {slower:.2f}x a copy")
    if kind in DTYPES:
        report.ask(Ask(f"gather {kind} against a copy", slower, 2.5, "<=", "x"))


def decode(report: Report, kind: str, requests: int, context: int, topk: int) -> None:
    """One step of one layer: a row a request."""
    dtype = DTYPES.get(kind, torch.bfloat16)
    batch = batch_of(1, context, requests)
    index, latent = (
        index_cache(kind, requests * context),
        latent_cache("fp8_packed" if kind == "fp8" else kind, requests * context),
    )
    scratch = Scratch(64 << 20)
    q, weights = torch.randn((requests, INDEX_HEADS, INDEX_DIM)).to(dtype), torch.randn((requests, INDEX_HEADS))
    q_nope, q_rope = (
        torch.randn((requests, HEADS, NOPE_DIM)).to(dtype),
        torch.randn((requests, HEADS, ROPE_DIM)).to(dtype),
    )
    ids = ragged.select(batch, q, weights, index, topk, scratch)
    score_flop = 2.0 * INDEX_DIM * INDEX_HEADS * context * requests
    times = interleave(
        {
            "floor": gemm(max(score_flop, 2 * PIECE**2 * INDEX_DIM), INDEX_DIM, dtype),
            "select": lambda: ragged.select(batch, q, weights, index, topk, scratch),
            "attend": lambda: paged.attend(batch, q_nope, q_rope, latent, ids, 0.05, scratch),
        },
        rounds=15,
    )
    floor = median(times["floor"]) * min(1.0, score_flop / (2 * PIECE**2 * INDEX_DIM))
    row = {
        "select_us": 1e6 * median(times["select"]),
        "attend_us": 1e6 * median(times["attend"]),
        "select_x_floor": median(times["select"]) / floor,
    }
    report.figure(f"decode_{kind}_b{requests}_c{context}", row)
    print(
        f"decode {kind:9s} batch {requests:3d} context {context:5d} topk {topk}: select {row['select_us']:9.1f} us "
        f"({row['select_x_floor']:.2f}x the GEMM floor), attend {row['attend_us']:8.1f} us"
    )


@dataclass
class Layer:
    """Our way through one attention layer with the weights of transformers' module."""

    module: Any
    theta: float
    topk: int

    def __post_init__(self) -> None:
        m = self.module
        up = m.kv_b_proj.weight.view(m.num_heads, m.qk_nope_head_dim + m.v_head_dim, NOPE_DIM)
        self.absorb = up[:, : m.qk_nope_head_dim].contiguous()
        self.expand = up[:, m.qk_nope_head_dim :].transpose(1, 2).contiguous()
        i = m.indexer
        self.index = IndexerWeights(i.wq_b.weight, i.wk.weight, i.k_norm.weight, i.k_norm.bias, i.weights_proj.weight)

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        index: IndexCache,
        latent: LatentCache,
        scratch: Scratch,
    ) -> Tensor:
        """x [n, hidden] -> [n, hidden]."""
        m, n = self.module, x.shape[0]
        slots = batch.context_slots(0)[-n:]
        residual = m.q_a_layernorm(m.q_a_proj(x))
        q = m.q_b_proj(residual).view(n, m.num_heads, -1)
        q_pass, q_rope = q.split([m.qk_nope_head_dim, ROPE_DIM], dim=-1)
        compressed, k_rope = m.kv_a_proj_with_mqa(x).split([NOPE_DIM, ROPE_DIM], dim=-1)
        cos, sin = rope_tables(positions, ROPE_DIM, self.theta)
        q_rope, k_rope = rope_interleaved(q_rope, cos, sin), rope_interleaved(k_rope, cos, sin)
        store_latent(latent, slots, m.kv_a_layernorm(compressed), k_rope)
        iq, ik, weights = project(x, residual, positions, self.index, ROPE_DIM, self.theta)
        store_index(index, slots, ik)
        ids = ragged.select(batch, iq, weights, index, self.topk, scratch)
        absorbed = torch.bmm(q_pass.transpose(0, 1), self.absorb).transpose(0, 1)
        out = paged.attend(batch, absorbed, q_rope, latent, ids, m.scaling, scratch)
        values = torch.bmm(out.transpose(0, 1), self.expand).transpose(0, 1).reshape(n, -1)
        return functional.linear(values, m.o_proj.weight)


def layer(report: Report, kind: str, rows: int, context: int, topk: int, rounds: int) -> None:
    """The whole attention layer for the last ``rows`` of ``context`` tokens, against transformers' module."""
    from transformers import DynamicCache, GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaRotaryEmbedding

    dtype, theta = DTYPES[kind], 10000.0
    config = GlmMoeDsaConfig(
        hidden_size=512,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=256,
        kv_lora_rank=NOPE_DIM,
        qk_nope_head_dim=192,
        qk_rope_head_dim=ROPE_DIM,
        v_head_dim=256,
        index_n_heads=INDEX_HEADS,
        index_head_dim=INDEX_DIM,
        index_topk=topk,
        indexer_types=["full"],
        mlp_layer_types=["dense"],
        max_position_embeddings=2 * context,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    module = GlmMoeDsaAttention(config, 0).to(dtype).eval()
    rotary = GlmMoeDsaRotaryEmbedding(config)
    past = context - rows
    batch, scratch = batch_of(rows, context), Scratch(64 << 20)
    index, latent = index_cache(kind, context), latent_cache(kind, context)
    ours = Layer(module, theta, topk)
    x, positions = torch.randn((rows, config.hidden_size)).to(dtype), torch.arange(past, context)
    slots = batch.context_slots(0)[:past]
    kept_latent, kept_index = latent.buffer[slots], index.buffer[slots]

    def halves(rope: Tensor) -> Tensor:
        return torch.cat([rope[..., 0::2], rope[..., 1::2]], dim=-1)

    their_latent = kept_latent[:, :NOPE_DIM].view(1, 1, past, NOPE_DIM)
    their_rope = halves(kept_latent[:, NOPE_DIM:]).view(1, 1, past, ROPE_DIM)
    their_index = torch.cat([halves(kept_index[:, :ROPE_DIM]), kept_index[:, ROPE_DIM:]], dim=-1).view(
        1, past, INDEX_DIM
    )
    embeddings = rotary(x.view(1, rows, -1), positions.view(1, -1))
    mask = torch.arange(context).view(1, 1, 1, -1) <= positions.view(1, 1, -1, 1)

    def theirs() -> Tensor:
        cache = DynamicCache(config=config)
        cache.update(their_latent, their_rope, 0)
        cache.update_indexer(their_index, 0)
        return module(x.view(1, rows, -1), embeddings, mask, past_key_values=cache)[0][0]

    with torch.inference_mode():
        want, got = theirs(), ours.run(x, positions, batch, index, latent, scratch)
        apart = float((want - got).abs().max() / want.abs().max())
        times = interleave(
            {"transformers": theirs, "ours": lambda: ours.run(x, positions, batch, index, latent, scratch)},
            rounds,
            warmup=0,
        )
    faster = ratio(times, "transformers", "ours")
    report.figure(
        f"layer_{kind}", {"ms": 1e3 * median(times["ours"]), "x_transformers": faster, "largest_difference": apart}
    )
    print(
        f"whole layer {kind:9s} {rows} x {context}: {1e3 * median(times['ours']):9.1f} ms, transformers "
        f"{1e3 * median(times['transformers']):9.1f} ms, {faster:.1f}x; outputs differ by {apart:.1e} of the largest"
    )
    report.ask(Ask(f"whole layer {kind} against transformers at {context} keys", faster, 5.0, ">=", "x"))


def peak(report: Report, rows: int, context: int, heads: int, megabytes: int) -> None:
    """Growth of the process's resident peak while one chunk is selected, queries and ids aside."""
    batch, cache = batch_of(rows, context), index_cache("bfloat16", context)
    q, weights = torch.randn((rows, heads, INDEX_DIM)).to(torch.bfloat16), torch.randn((rows, heads))
    out = torch.zeros((rows, 64), dtype=torch.int32)
    scratch = Scratch(megabytes << 20)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    ragged.select(batch, q, weights, cache, 64, scratch, out)
    grown = (resident("VmHWM") - before) / 2**20
    report.figure(f"peak_mib_{rows}x{context}_h{heads}", {"grown": grown, "scratch_peak": scratch.peak / 2**20})
    print(f"peak of {rows} x {context} at {heads} heads: {grown:.1f} MiB more resident, cap {megabytes} MiB")
    report.ask(Ask(f"scratch of {rows} x {context} at {heads} heads", grown, megabytes + 1.0, "<=", " MiB"))


def resident(field: str) -> int:
    """Bytes of a memory field of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    options = parser(__doc__.splitlines()[0]).parse_args()
    report = Report("attention", options)
    torch.set_num_threads(options.threads)
    quick = options.quick
    floor = measure_floor(options.threads)
    report.figure("floor", floor)
    print(
        f"floor, {options.threads} thread(s): copy {floor.copy_gb_s:.0f} GB/s, GEMM float32 "
        f"{floor.gemm_f32_gflop_s:.0f}, bfloat16 {floor.gemm_bf16_gflop_s:.0f} GFLOP/s"
    )
    rows = 128 if quick else 512
    for kind in ("float32", "bfloat16", "fp8"):
        scoring(report, kind, rows, 8192, 512)
    if not quick:
        for kind in ("float32", "bfloat16", "fp8"):
            prefill(report, kind)
    selection(report, rows, 8192, 512)
    for kind in ("float32", "bfloat16", "fp8_packed"):
        sparse(report, kind, rows, 8192, 512)
        gathering(report, kind, 8192 if quick else 65536)
    for kind in ("float32", "bfloat16", "fp8"):
        for requests in (1, 8) if quick else (1, 8, 64):
            for context in (512, 8192) if quick else (512, 2048, 8192):
                decode(report, kind, requests, context, 64)
    for kind in DTYPES:
        layer(report, kind, 64 if quick else 512, 8192, 512, 1 if quick else 3)
    for heads in (4,) if quick else (4, 32):
        peak(report, 1024 if quick else 16384, 65536, heads, 64)
    return report.finish()


def prefill(report: Report, kind: str) -> None:
    """A whole prompt of 2,048 tokens."""
    dtype = DTYPES.get(kind, torch.bfloat16)
    batch, cache, scratch = batch_of(2048, 2048), index_cache(kind, 2048), Scratch(64 << 20)
    q, weights = torch.randn((2048, INDEX_HEADS, INDEX_DIM)).to(dtype), torch.randn((2048, INDEX_HEADS))
    flop = 2.0 * INDEX_DIM * INDEX_HEADS * sum(range(65, 2049))
    times = interleave(
        {"floor": gemm(flop, INDEX_DIM, dtype), "ours": lambda: ragged.select(batch, q, weights, cache, 64, scratch)}, 5
    )
    slower = ratio(times, "ours", "floor")
    report.figure(f"prefill_2048_{kind}", {"ms": 1e3 * median(times["ours"]), "x_floor": slower})
    print(
        f"scoring + top-k {kind:10s} 2048 x 2048: {1e3 * median(times['ours']):9.2f} ms, {slower:.2f}x the GEMM floor"
    )


if __name__ == "__main__":
    raise SystemExit(main())
