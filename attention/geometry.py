"""What a slot implementation is told when it is made, once in a scheduler process.

model and pool --Geometry--> QChunk(geometry), Workspace(geometry)      fixed buffers are sized here, never later
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attention.sizes import step_rows

if TYPE_CHECKING:  # the planner loads this module without torch
    import torch

    from attention.shards import Shards

    Exchange = Callable[[torch.Tensor, Sequence[int]], None]


@dataclass(frozen=True)
class Geometry:
    """Sizes of one rank's attention.

    Attributes:
        max_model_len: positions that a request may have.
        max_requests: requests of one step at most.
        pool_tokens: token slots of the cache.
        topk: ids a query row. index_heads: query heads of the indexer. index_dim: values an index key.
        dtype: of the model's activations, float32 or bfloat16.
        index_kind, latent_kind: cache layouts, as `attention.layouts` names them.
        knobs: effective settings by name (`attention.flags`).
        ranks, rank: tensor-parallel group. exchange: fills an int32 [rows, topk] of which this rank has its own part,
            given the rows of each rank; None with one rank.
        free_bytes: memory free when the slots are made; None: unknown.
        shards: how the ranks share the latent cache; None: each holds all of it.
    """

    max_model_len: int
    max_requests: int
    pool_tokens: int
    topk: int
    index_heads: int
    index_dim: int
    dtype: torch.dtype
    index_kind: str
    latent_kind: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    rank: int = 0
    exchange: Exchange | None = None
    free_bytes: int | None = None
    shards: Shards | None = None

    @property
    def context_rows(self) -> int:
        """Rows of one context of `max_model_len` positions at most; under decode context parallel whole rounds."""
        return self.max_model_len if self.shards is None else self.shards.rounds(self.max_model_len)

    def afford(self, nbytes: int, what: str, flag: str) -> None:
        """Raises ValueError, naming what is asked for and the way out, where `nbytes` exceed the free memory."""
        if self.free_bytes is not None and nbytes > self.free_bytes:
            raise ValueError(
                f"{what} needs {nbytes / 2**20:.0f} MiB, {self.free_bytes / 2**20:.0f} MiB are free; "
                f"lower {flag} or --max-total-tokens"
            )

    def step_rows(self, rows: int) -> int:
        """`rows` of a workspace, cut to what a step can fill (`attention.sizes.step_rows`)."""
        return step_rows(rows, self.max_requests, self.context_rows, self.pool_tokens)
