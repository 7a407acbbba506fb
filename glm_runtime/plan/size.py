"""Memory of one rank: weights, the pool's bytes a token, fixed buffers, and the tokens that fit.

token    = layers x latent row / dcp + full layers x index row
W        = positions x 8 x factor             index rows       x 132 B
R        = positions x factor                 latent rows      x 1152 B        both cut to what a step can fill
logits   = min(cap, rows x keys x 4 B)
capacity = (memory x share - weights - buffers) / token, in whole pages
"""

from __future__ import annotations

from dataclasses import dataclass

from attention.indexer.split import legal_logits_bytes, legal_workspace_rows
from attention.indexer.split import workspace_bytes as index_bytes
from attention.workspace import workspace_bytes, workspace_factor, workspace_rows
from glm_runtime.plan.chunks import index_rows
from glm_runtime.plan.setup import PAGE, WEIGHT_BYTES, Setup

_PLAIN = ("embedding", "head", "norms", "router")
_PLAIN_BYTES = 2.0


@dataclass(frozen=True)
class Size:
    """Bytes of one rank. `*_rule` are rows by the factor's rule, `*_rows` what is kept after the cut."""

    weights: int
    token: float
    index_rule: int
    index_rows: int
    index_buffer: int
    prefill_rule: int
    prefill_rows: int
    prefill_buffer: int
    logits: int
    factor: int
    capacity: int

    @property
    def buffers(self) -> int:
        """Fixed buffers in all."""
        return self.index_buffer + self.prefill_buffer + self.logits


def weight_bytes(setup: Setup) -> int:
    """Weights of one rank: heads, dense layers, embedding and head cut by TP, experts by all ranks that share them."""
    parts, tp = setup.model.parameters, setup.sizes.tp
    each = WEIGHT_BYTES[setup.weights]
    total = 0.0
    for part, count in parts.items():
        width = max(each, _PLAIN_BYTES) if part in _PLAIN else each
        if part == "experts":
            total += count * width / setup.expert_ranks
        elif part in ("heads", "dense", "shared", "embedding", "head"):
            total += count * width / tp
        else:
            total += count * width
    return int(total)


def token_bytes(setup: Setup) -> float:
    """Bytes of one token of context on one rank; under DCP the latent rows are dealt out, index keys are not."""
    model = setup.model
    return model.layers * setup.latent_row / setup.sizes.dcp + model.full_layers * setup.index_row


def size(setup: Setup) -> Size:
    """Memory of one rank. The buffers are those of a pool that holds what is left."""
    room = setup.device.memory_bytes * setup.memory_share - weight_bytes(setup)
    token = token_bytes(setup)
    factor = setup.factor or workspace_factor(setup.position_limit)
    index_rule, prefill_rule = index_rows(setup), workspace_rows(setup.position_limit, factor)
    rows = setup.ledger_config().token_budget
    capacity = max(0, int(room / token) // PAGE * PAGE)
    kept: Size | None = None
    for _ in range(3):  # smaller buffers leave a larger pool, which bounds the buffers
        index_kept = setup.step_rows(index_rule, capacity) if setup.qchunk else 0
        prefill_kept = setup.step_rows(prefill_rule, capacity) if setup.gathers else 0
        kept = Size(
            weights=weight_bytes(setup),
            token=token,
            index_rule=index_rule,
            index_rows=index_kept,
            index_buffer=index_bytes(index_kept),
            prefill_rule=prefill_rule,
            prefill_rows=prefill_kept,
            prefill_buffer=workspace_bytes(prefill_kept, setup.sizes.dcp if setup.sizes.pcp > 1 else 1),
            logits=legal_logits_bytes(rows, min(setup.position_limit, capacity), setup.logits_bytes),
            factor=factor,
            capacity=capacity,
        )
        capacity = max(0, int((room - kept.buffers) / token) // PAGE * PAGE)
    assert kept is not None
    return kept if kept.capacity == capacity else _with_capacity(kept, capacity)


def _with_capacity(kept: Size, capacity: int) -> Size:
    values = {name: getattr(kept, name) for name in kept.__dataclass_fields__}
    return Size(**(values | {"capacity": capacity}))


def pooled_index_rows(setup: Setup, kpool: int) -> tuple[int, int]:
    """(rows by the rule, rows that a step can fill) where index entries are pooled by `kpool`."""
    from attention.indexer.split import workspace_rows as pooled

    factor = setup.factor or workspace_factor(setup.position_limit)
    rows = pooled(setup.position_limit, factor, kpool)
    seqs = setup.ledger_flags.max_num_seqs
    assert seqs is not None
    return rows, legal_workspace_rows(rows, setup.position_limit, seqs, kpool)
