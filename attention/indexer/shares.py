"""How many rows of a step each tensor-parallel rank scores: vLLM's balanced ranges, from where they pay.

    rows * (1 - 1/tp) * (keys * s_key - topk * 4 / B)  >  latency       s_key = heads * dim / products a second

The machine's three rates are the caller's; --indexer-tp-shard-min-rows, where given, stands in for the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attention.geometry import Geometry
from parallel.row_shard import break_even_rows, row_shard


@dataclass(frozen=True, slots=True)
class Rates:
    """Multiply-adds of scoring a second and rank, bytes of ids exchanged a second, seconds of an empty exchange."""

    products_per_second: float
    bytes_per_second: float
    latency_seconds: float


GPU = Rates(1.5e14, 2e11, 3e-5)
"""Of the order of an H200 on NVLink; assumed, not measured."""


def rank_sizes(geometry: Geometry, ends: Sequence[int], rows: Sequence[int], rates: Rates) -> list[int] | None:
    """Rows of each rank for requests of contexts `ends` and new `rows`; None where every rank scores all."""
    if geometry.ranks == 1 or geometry.exchange is None:
        return None
    least = geometry.knobs.get("indexer_tp_shard_min_rows")
    if least is None:
        visits = sum(n * (2 * end - n + 1) // 2 for n, end in zip(rows, ends, strict=True))
        per_visit = geometry.index_heads * geometry.index_dim / rates.products_per_second
        keys = visits / max(1, sum(rows))
        least = break_even_rows(
            keys, geometry.topk, geometry.ranks, per_visit, rates.bytes_per_second, rates.latency_seconds
        )
    return None if least is None else row_shard(ends, rows, geometry.ranks, least)
