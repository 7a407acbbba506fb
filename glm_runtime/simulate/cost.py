"""The planner's cost model for steps of many prompts.

Shares of a step are taken as even: scoring over the TP ranks where the row shard is on, all prompt work over PCP ranks.
Bytes and collectives grow with the rows as in a full step of one prompt. Source: glm_runtime/plan/cost.py.
"""

from __future__ import annotations

from attention.indexer.split import logits_elements
from glm_runtime.plan.cost import CostModel, Load
from glm_runtime.plan.ranks import shard_least_rows
from glm_runtime.plan.setup import Setup
from glm_runtime.plan.timeline import Step
from glm_runtime.plan.traffic import step_traffic
from glm_runtime.simulate.shape import Shape


class PlannedCost:
    """Seconds of a simulated step by the planner's model of a launch."""

    def __init__(self, setup: Setup) -> None:
        self._model = CostModel(setup)
        self._pcp = setup.sizes.pcp
        self._tp = setup.sizes.tp
        budget = setup.ledger_config().token_budget
        typical = Step(0, setup.model["index_topk"], budget, 0, 0)
        moved = step_traffic(setup, typical)
        self._moved = moved.total / budget
        self._exchanges = moved.exchanges
        self._decode_exchanges = step_traffic(setup, Step(0, 0, 0, 1, 1)).exchanges
        least, _ = shard_least_rows(setup, typical)
        self._least = max(least, self._tp) if least is not None else None
        self._logits = logits_elements(setup.logits_bytes)

    def __call__(self, shape: Shape) -> float:
        """Seconds of a step."""
        own = -(-shape.prefill_rows // self._pcp)
        scored: float = 0.0
        chunks = 0
        if shape.contexts:
            scored = shape.prefill_pairs / self._pcp
            if self._least is not None and shape.prefill_rows >= self._least:
                scored /= self._tp
            chunks = max(1, -(-own * shape.contexts // (self._logits * shape.chunks)))
        load = Load(
            rows=own + shape.decode_rows,
            total=shape.tokens,
            sampled=shape.decode_rows + shape.chunks,
            scored=scored,
            decode_context=shape.decode_context,
            chosen=shape.chosen / self._pcp + shape.decode_chosen,
            contexts=shape.contexts,
            chunks=chunks,
            moved=self._moved * shape.tokens,
            exchanges=self._exchanges if shape.prefill_rows else self._decode_exchanges,
        )
        return sum(self._model.terms(load).values())
