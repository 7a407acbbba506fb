"""Bytes that one rank receives from others in one step.

    reduce      2 a layer     2 (t-1)/t x rows x hidden x 2 B            ring over t ranks: attention, experts
    top-k ids   a full layer  rows x topk x 4 B less the own part         only where the row shard is on
    latent      a layer       (P-1) x padded rows x 1152 B                bf16, before it is quantised; PCP
    index keys  a full layer  (P-1) x padded rows x 256 B                 bf16; PCP
    hidden      once          (P-1) x padded rows x hidden x 2 B          PCP, behind the last layer
    dispatch    a MoE layer   rows x experts a token x hidden x 1 B       fp8; only with EP and (DP > 1 or PCP > 1)
    combine     a MoE layer   the same x 2 B                              bf16
    shards      a layer       (W-1)/W x context x 1152 B                  DCP: the context's rows, for prefill

Source: prefill facts, sections 4 to 6 and 10.
"""

from __future__ import annotations

from dataclasses import dataclass

from glm_runtime.plan.ranks import prefill_shares, scoring_shares, shard_least_rows
from glm_runtime.plan.setup import Setup
from glm_runtime.plan.timeline import Step
from parallel.dcp import LATENT_ROW_BYTES, gather_rank_bytes
from parallel.row_shard import exchange_bytes
from parallel.tables import gather_bytes

HIDDEN_BYTES = 2
INDEX_KEY_BYTES = 2


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one step by kind, all layers; `exchanges` counts the collectives."""

    reduce: int = 0
    topk: int = 0
    latent: int = 0
    index_keys: int = 0
    hidden: int = 0
    dispatch: int = 0
    combine: int = 0
    shards: int = 0
    exchanges: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return (
            self.reduce
            + self.topk
            + self.latent
            + self.index_keys
            + self.hidden
            + self.dispatch
            + self.combine
            + self.shards
        )


def uses_all_to_all(setup: Setup) -> bool:
    """Whether experts get their rows by dispatch and combine; else every rank has them and the sums are reduced."""
    return setup.ep > 1 and (setup.sizes.dp > 1 or setup.sizes.pcp > 1)


def ring_bytes(rows: int, hidden: int, ranks: int) -> int:
    """Bytes that a rank receives in a ring all-reduce of bf16 [rows, hidden]."""
    return 2 * (ranks - 1) * rows * hidden * HIDDEN_BYTES // ranks


def dispatch_bytes(rows: int, experts_a_token: int, hidden: int, value_bytes: int) -> int:
    """Bytes of rows sent once to each of their experts."""
    return rows * experts_a_token * hidden * value_bytes


def step_traffic(setup: Setup, step: Step) -> Traffic:
    """Traffic of one rank in one step."""
    model, sizes = setup.model, setup.sizes
    hidden = model["hidden_size"]
    pcp, tp, dcp = sizes.pcp, sizes.tp, sizes.dcp
    own = step.decode_rows + (max(prefill_shares(setup, step).rows) if step.rows else 0)
    exchanges = 0
    reduce = latent = keys = restored = dispatch = combine = shards = topk = 0
    all_to_all = uses_all_to_all(setup)
    if tp > 1:
        reduce += ring_bytes(own, hidden, tp) * model.layers
        exchanges += model.layers
    if all_to_all:
        each = model["num_experts_per_tok"]
        dispatch = dispatch_bytes(own, each, hidden, 1) * model.moe_layers
        combine = dispatch_bytes(own, each, hidden, HIDDEN_BYTES) * model.moe_layers
        exchanges += 2 * model.moe_layers
    elif tp * pcp > 1:
        reduce += ring_bytes(own * pcp, hidden, tp * pcp) * model.layers
        exchanges += model.layers
    if step.rows and pcp > 1:
        latent = gather_bytes(own, pcp, LATENT_ROW_BYTES) * model.layers
        keys = gather_bytes(own, pcp, model["index_head_dim"] * INDEX_KEY_BYTES) * model.full_layers
        restored = gather_bytes(own, pcp, hidden * HIDDEN_BYTES)
        exchanges += model.layers + model.full_layers + 1
    if step.rows and dcp > 1:
        shard = -(-step.end // dcp)
        shards = (dcp - 1) * gather_rank_bytes(shard) * model.layers
        exchanges += model.layers
    least, _ = shard_least_rows(setup, step)
    if step.rows and least is not None and step.rows >= max(least, tp):
        parts = scoring_shares(setup, step).rows
        topk = exchange_bytes(step.rows, model["index_topk"], parts, int(min(range(tp), key=parts.__getitem__)))[1]
        topk *= model.full_layers
        exchanges += model.full_layers
    return Traffic(reduce, topk, latent, keys, restored, dispatch, combine, shards, exchanges)
