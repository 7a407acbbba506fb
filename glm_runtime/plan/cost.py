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


@dataclass(frozen=True, slots=True)
class Load:
    """Work of one step on the busiest rank.

    Attributes:
        rows: that it projects. total: of the step, which the experts share. sampled: that the head sees.
        scored: keys visited by its share of the index scoring, decode rows left out. decode_context: theirs.
        chosen: keys that its rows attend to, decode rows among them.
        contexts: tokens gathered for scored prompts. chunks: pieces of scoring in a layer.
        moved, exchanges: bytes received, and collectives.
    """

    rows: int
    total: int
    sampled: int
    scored: float
    decode_context: int
    chosen: float
    contexts: int
    chunks: int
    moved: float
    exchanges: int


class CostModel:
    """Times of the steps of one launch; all that does not depend on the step is worked out once."""

    def __init__(self, setup: Setup) -> None:
        model, device, tp = setup.model, setup.device, setup.sizes.tp
        parts = model.parameters
        width = WEIGHT_BYTES[setup.weights]
        self.setup = setup
        self.topk = model["index_topk"]
        self._bandwidth = device.bandwidth * device.memory_share
        self._gemm = (device.matmul_fp8 if setup.weights in ("fp4", "fp8") else device.matmul) * device.gemm_share
        self._projected = (
            parts["heads"] / tp
            + parts["latent"]
            + parts.get("indexer", 0)
            + (parts.get("dense", 0) + parts.get("shared", 0)) / tp
        )
        self._width = width
        experts = parts.get("experts", 0) / setup.expert_ranks
        self._count = int(model.config.get("n_routed_experts") or 0)
        self._each = int(model.config.get("num_experts_per_tok") or 0)
        self._experts = experts
        self._active = experts * self._each / self._count if self._count else 0.0
        self._heads = -(-setup.heads // device.head_block) * device.head_block
        self._head = parts.get("head", parts["embedding"]) / tp
        self._visit_flop = index_flop(setup, 1)
        self._chosen_flop = attend_flop(setup, 1, self._heads)
        self._attend = device.matmul * device.attend_share
        self._link = device.link * device.link_share
        self._layers, self._full, self._row = model.layers, model.full_layers, setup.latent_row
        self._index_row, self._gathers = setup.index_row, setup.gathers

    def _bound(self, work: float, nbytes: float, rate: float) -> float:
        return max(work / rate, nbytes / self._bandwidth)

    def terms(self, load: Load) -> dict[str, float]:
        """Seconds by term."""
        setup, device = self.setup, self.setup.device
        layers, full, row = self._layers, self._full, self._row
        touched = touched_share(self._count, self._each, load.total)
        scored = load.scored + load.decode_context
        index_bytes = LOGIT_PASSES * 4 * load.scored + load.decode_context * self._index_row
        gathered = sum(gather_bytes(load.contexts, row)) / self._bandwidth if self._gathers else 0.0
        launches = layers * LAYER_LAUNCHES + full * CHUNK_LAUNCHES * max(1, load.chunks)
        return {
            "projections": self._bound(2 * load.rows * self._projected, self._projected * self._width, self._gemm),
            "experts": self._bound(2 * load.total * self._active, self._experts * touched * self._width, self._gemm),
            "scoring": full * self._bound(self._visit_flop * scored, index_bytes, device.score),
            "index keys": full * 2 * load.contexts * self._index_row / self._bandwidth if setup.qchunk else 0.0,
            "attention": layers * self._bound(self._chosen_flop * load.chosen, load.chosen * row, self._attend),
            "workspace": layers * gathered,
            "head": self._bound(2 * load.sampled * self._head, 2 * self._head, self._gemm),
            "exchange": load.moved / self._link + load.exchanges * device.exchange,
            "launches": launches * device.launch,
        }


def load_of(setup: Setup, step: Step) -> Load:
    """A planned step's work, with its rows and keys on the busiest rank."""
    topk = setup.model["index_topk"]
    shares = prefill_shares(setup, step) if step.rows else None
    own = max(shares.rows) if shares else 0
    scored = step.rows > 0 and step.end > topk
    moved = step_traffic(setup, step)
    chosen = max(prefill_shares(setup, step, topk).visits) if step.rows else 0
    return Load(
        rows=own + step.decode_rows,
        total=step.tokens,
        sampled=step.decode_rows + 1,
        scored=max(scoring_shares(setup, step).visits) if scored else 0,
        decode_context=step.decode_context,
        chosen=chosen + min(step.decode_context, step.decode_rows * topk),
        contexts=step.end if scored else 0,
        chunks=step_chunks(setup, step, own).chunks,
        moved=moved.total,
        exchanges=moved.exchanges,
    )


def step_cost(setup: Setup, step: Step, model: CostModel | None = None) -> Cost:
    """Time of one step on the busiest rank."""
    return Cost((model or CostModel(setup)).terms(load_of(setup, step)))


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
    model = CostModel(setup)
    costs = [step_cost(setup, step, model) for step in steps.prefill]
    slowest = max(costs, key=_seconds)
    with_chunk = [cost.seconds for step, cost in zip(steps.prefill, costs, strict=True) if step.rows]
    return Forecast(
        ttft=sum(cost.seconds for cost in costs),
        stall=max(with_chunk),
        beside=None if steps.alone is None else step_cost(setup, steps.alone, model).seconds,
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
