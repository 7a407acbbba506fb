"""How a step's rows and key visits fall on the ranks.

pcp > 1   head-tail, interleave or zigzag over the prefill ranks
tp  > 1   the indexer's row shard, from --indexer-tp-shard-min-rows or from where the cost rule says that it pays:
          rows (1 - 1/tp) (keys s_key - 4 topk / link) > latency       s_key = 2 heads dim / score rate
dcp > 1   each rank keeps its part of every context's latent rows
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention.indexer.shares import GPU, Rates
from glm_runtime.plan.setup import Setup
from glm_runtime.plan.timeline import Step
from parallel.balance import imbalance, step_shares, whole_shares
from parallel.dcp import local_lengths
from parallel.row_shard import break_even_rows, row_shard


@dataclass(frozen=True)
class Shares:
    """Rows and visited keys of each rank, and the largest visits over their mean."""

    rows: tuple[int, ...]
    visits: tuple[int, ...]
    why: str = ""

    @property
    def imbalance(self) -> float:
        """1.0 is perfect."""
        return imbalance(self.visits)


def prefill_shares(setup: Setup, step: Step, limit: int | None = None) -> Shares:
    """Rows and visits over the prefill ranks; `limit` keys a row at most (sparse attention)."""
    ranks, rows, start = setup.sizes.pcp, [step.rows], [step.start]
    shares = None
    if ranks > 1:
        shares = step_shares(setup.split, rows, start, ranks, limit, setup.sizes.dcp)
    shares = shares or whole_shares(rows, start, ranks, limit)
    return Shares(tuple(shares.rows), tuple(shares.visits))


def shard_least_rows(setup: Setup, step: Step) -> tuple[int | None, str]:
    """(rows from which the TP ranks share the scoring, why); None: they never do."""
    tp = setup.sizes.tp
    if tp == 1:
        return None, "one TP rank"
    if setup.sizes.dcp > 1 or setup.sizes.pcp > 1:
        return None, "off beside context parallelism"
    if not setup.qchunk:
        return None, "the ragged indexer has no row shard"
    given = setup.attention.indexer_tp_shard_min_rows
    if given is not None:
        return given, "--indexer-tp-shard-min-rows"
    if not step.rows:
        return None, "no prefill rows"
    model, device = setup.model, setup.device
    rates = Rates(device.score / 2, device.link, device.exchange) if device.is_cpu else GPU
    per_visit = model["index_n_heads"] * model["index_head_dim"] / rates.products_per_second
    least = break_even_rows(
        step.visits / step.rows, model["index_topk"], tp, per_visit, rates.bytes_per_second, rates.latency_seconds
    )
    return least, "cost rule"


def scoring_shares(setup: Setup, step: Step) -> Shares:
    """Rows and visits of the indexer's scoring on the TP ranks of one prefill rank (the busiest one's)."""
    least, why = shard_least_rows(setup, step)
    if setup.sizes.pcp > 1:
        shares = prefill_shares(setup, step)
        return Shares(shares.rows, shares.visits, why)
    sizes = None if least is None else row_shard([step.end], [step.rows], setup.sizes.tp, least)
    if sizes is None:
        ranks = setup.sizes.tp
        return Shares((step.rows,) * ranks, (step.visits,) * ranks, f"every rank scores all rows ({why})")
    stops = np.cumsum(sizes) + step.start
    starts = stops - sizes
    visits = (starts + 1 + stops) * (stops - starts) // 2
    return Shares(tuple(sizes), tuple(visits.tolist()), why)


def dcp_tokens(setup: Setup, context: int) -> list[int]:
    """Latent rows of a context of so many tokens on each decode-context rank."""
    sizes = setup.sizes
    return [int(local_lengths([context], sizes.dcp, rank, sizes.interleave)[0]) for rank in range(sizes.dcp)]
