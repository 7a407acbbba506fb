"""How the indexer cuts the steps, and which cap cuts them.

chunks a layer = sum over steps of split_chunks([context at the end], [rows], W, E)
in all         = chunks a layer x layers with an indexer of their own
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attention.indexer.split import count_launches, logits_elements, split_chunks
from attention.indexer.split import workspace_rows as index_workspace_rows
from attention.workspace import workspace_factor
from glm_runtime.plan.setup import Setup
from glm_runtime.plan.timeline import Step


@dataclass(frozen=True, slots=True)
class StepChunks:
    """Chunks of one step and layer. `rows_at_once`: of the largest chunk; `binds`: "logits", "workspace" or ""."""

    chunks: int
    rows_at_once: int
    binds: str


def index_rows(setup: Setup) -> int:
    """W by the factor's rule, in index rows."""
    factor = setup.factor or workspace_factor(setup.position_limit)
    return index_workspace_rows(setup.position_limit, factor)


def step_chunks(setup: Setup, step: Step, rows: int | None = None) -> StepChunks:
    """Cut of one step; `rows` in place of the step's, where a rank owns a part of them."""
    own = step.rows if rows is None else rows
    topk = setup.model["index_topk"]
    if own < 1 or step.end <= topk:
        return StepChunks(0, 0, "")  # dense: nothing is scored
    room = index_rows(setup)
    cut = split_chunks([step.end], [own], room, setup.logits_bytes, strict_cap=setup.strict)
    most = max(chunk.query_stop - chunk.query_start for chunk in cut)
    binds = "workspace" if step.end > room else "logits" if own * step.end > logits_elements(setup.logits_bytes) else ""
    return StepChunks(count_launches(cut), most, binds)


def layer_chunks(setup: Setup, steps: Iterable[Step]) -> int:
    """Chunks of one layer over all steps."""
    return sum(step_chunks(setup, step).chunks for step in steps)
