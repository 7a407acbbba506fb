"""A model of a step's time. Nothing here is measured on the planned machine; every term is printed with its formula.

    step = sum of its terms               no overlap of terms
    term = max(work / rate, bytes / bandwidth), or bytes / link + exchanges x latency

| term        | work                                              | bytes                                     |
|-------------|---------------------------------------------------|-------------------------------------------|
| projections | 2 x rows x attention and indexer weights          | those weights once                        |
| experts     | 2 x rows x weights of a token's experts, / ranks  | weights of the experts that are touched   |
| scoring     | 2 x heads x dim x key visits                      | scores written once, read twice, 4 B each |
| index keys  |                                                   | contexts gathered: read and written       |
| attention   | 2 x heads x (576 + 512) x chosen keys             | chosen keys x row                         |
| workspace   |                                                   | contexts x (row + 1152), a layer          |
| head        | 2 x sampled rows x hidden x vocabulary            | that weight once                          |
| exchange    |                                                   | `traffic.py`                              |
| launches    | pieces x launch time                              |                                           |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from attention.workspace import gather_bytes
from glm_runtime.plan.chunks import step_chunks
from glm_runtime.plan.ranks import prefill_shares, scoring_shares
from glm_runtime.plan.setup import WEIGHT_BYTES, Setup
from glm_runtime.plan.timeline import Step, Timeline
from glm_runtime.plan.traffic import step_traffic

LOGIT_PASSES = 3
"""Scores are written once and read twice by the top-k."""
LAYER_LAUNCHES = 24
"""Kernels of a layer beside the indexer's chunks."""
CHUNK_LAUNCHES = 3
"""Score, top-k, fill."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one step by term."""

    terms: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.terms.values())


def index_flop(setup: Setup, visits: int) -> int:
    """Multiply-adds of scoring, two each, in one layer."""
    return 2 * setup.model["index_n_heads"] * setup.model["index_head_dim"] * visits


def attend_flop(setup: Setup, chosen: int, heads: int) -> int:
    """Multiply-adds of sparse MLA, two each, in one layer: scores over 576 values, sums over 512."""
    return 2 * heads * (setup.model.latent_values + setup.model["kv_lora_rank"]) * chosen


def touched_share(experts: int, each: int, rows: int) -> float:
    """Share of the experts that `rows` tokens touch, were they chosen at random: 1 - (1 - each / experts)^rows."""
    return 1 - (1 - each / experts) ** rows if experts else 0.0


def step_cost(setup: Setup, step: Step) -> Cost:
    """Time of one step on the busiest rank."""
    model, device, sizes = setup.model, setup.device, setup.sizes
    parts, tp = model.parameters, sizes.tp
    bandwidth = device.bandwidth * device.memory_share
    gemm = (device.matmul_fp8 if setup.weights in ("fp4", "fp8") else device.matmul) * device.gemm_share
    width = WEIGHT_BYTES[setup.weights]
    topk = model["index_topk"]
    shares = prefill_shares(setup, step) if step.rows else None
    own = step.decode_rows + (max(shares.rows) if shares else 0)
    total = step.tokens

    def bound(work: float, nbytes: float, rate: float) -> float:
        return max(work / rate, nbytes / bandwidth)

    attention = parts["heads"] / tp + parts["latent"] + parts.get("indexer", 0)
    plain = (parts.get("dense", 0) + parts.get("shared", 0)) / tp
    experts = parts.get("experts", 0) / setup.expert_ranks
    count = int(model.config.get("n_routed_experts") or 0)
    each = int(model.config.get("num_experts_per_tok") or 0)
    active = experts * each / count if count else 0.0
    sampled = step.decode_rows + 1
    dense = step.end <= topk
    chosen_decode = min(step.decode_context, step.decode_rows * topk)
    chosen = max(prefill_shares(setup, step, topk).visits) if step.rows else 0
    heads = -(-setup.heads // device.head_block) * device.head_block
    scored = max(scoring_shares(setup, step).visits) if step.rows and not dense else 0
    chunks = step_chunks(setup, step, max(shares.rows) if shares else 0)
    contexts = step.end if step.rows and not dense else 0

    terms = {
        "projections": bound(2 * own * (attention + plain), (attention + plain) * width, gemm),
        "experts": bound(2 * total * active, experts * touched_share(count, each, total) * width, gemm),
        "scoring": model.full_layers
        * bound(
            index_flop(setup, scored + step.decode_context),
            LOGIT_PASSES * 4 * scored + step.decode_context * setup.index_row,
            device.score,
        ),
        "index keys": model.full_layers * 2 * contexts * setup.index_row / bandwidth if setup.qchunk else 0.0,
        "attention": model.layers
        * bound(
            attend_flop(setup, chosen + chosen_decode, heads),
            (chosen + chosen_decode) * setup.latent_row,
            device.matmul * device.attend_share,
        ),
        "workspace": model.layers * sum(gather_bytes(contexts, setup.latent_row)) / bandwidth
        if setup.workspace
        else 0.0,
        "head": bound(
            2 * sampled * parts.get("head", parts["embedding"]) / tp,
            2 * parts.get("head", parts["embedding"]) / tp,
            gemm,
        ),
    }
    moved = step_traffic(setup, step)
    terms["exchange"] = moved.total / (device.link * device.link_share) + moved.exchanges * device.exchange
    launches = model.layers * LAYER_LAUNCHES + model.full_layers * CHUNK_LAUNCHES * max(1, chunks.chunks)
    terms["launches"] = launches * device.launch
    return Cost(terms)


@dataclass(frozen=True)
class Forecast:
    """Seconds. `stall`: the longest step in which prompt and decodes met; `beside`: a step of the decodes alone."""

    ttft: float
    stall: float
    beside: float | None
    terms: Mapping[str, float]
    slowest: Cost


def forecast(setup: Setup, steps: Timeline) -> Forecast:
    """Times of the whole prompt."""
    costs = [step_cost(setup, step) for step in steps.prefill]
    slowest = max(costs, key=_seconds)
    with_chunk = [cost.seconds for step, cost in zip(steps.prefill, costs, strict=True) if step.rows]
    return Forecast(
        ttft=sum(cost.seconds for cost in costs),
        stall=max(with_chunk),
        beside=None if steps.alone is None else step_cost(setup, steps.alone).seconds,
        terms=total_terms(costs),
        slowest=slowest,
    )


def total_terms(costs: Iterable[Cost]) -> dict[str, float]:
    """Seconds by term over several steps."""
    sums: dict[str, float] = {}
    for cost in costs:
        for name, seconds in cost.terms.items():
            sums[name] = sums.get(name, 0.0) + seconds
    return sums


def _seconds(cost: Cost) -> float:
    return cost.seconds
