"""The arithmetic of attention, one module a way of doing it, and the choice between them.

select(batch, q, head_weights, cache, topk, scratch, out)                  indexer scores and top-k
attend(batch | None, q_nope, q_rope, cache, ids, scale, scratch, out, lse) sparse MLA
gather(cache, slots, out)                                                  latent rows in one float type

cpu        compiled; bounded scratch; the same bits for a row in whatever batch it runs
reference  plain torch; what the others are measured against
triton     for tensors on a GPU, chosen by the device of the call; not yet run on one
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from torch import Tensor

from attention.batch import AttentionBatch
from attention.layouts import IndexCache, LatentCache
from attention.scratch import Scratch

NAMES = ("cpu", "reference")
GPU = "triton"


class Kernels(Protocol):
    """What a kernel module offers. Arguments are checked by the caller; ``out`` and ``lse`` are filled in whole."""

    def select(
        self,
        batch: AttentionBatch,
        q: Tensor,
        head_weights: Tensor,
        cache: IndexCache,
        topk: int,
        scratch: Scratch,
        out: Tensor,
    ) -> None: ...

    def attend(
        self,
        batch: AttentionBatch | None,
        q_nope: Tensor,
        q_rope: Tensor,
        cache: LatentCache,
        ids: Tensor,
        scale: float,
        scratch: Scratch,
        out: Tensor,
        lse: Tensor,
    ) -> None: ...

    def gather(self, cache: LatentCache, slots: Tensor, out: Tensor) -> None: ...


_active: Kernels | None = None


def import_kernels(name: str) -> Kernels:
    """The named module. Raises ``ValueError`` for an unknown name."""
    known = (*NAMES, GPU)
    if name not in known:
        raise ValueError(f"kernels: {name!r} is unknown; known: {', '.join(known)}")
    return cast(Kernels, import_module(f"attention.kernels.{name}"))


def use(name: str) -> Kernels:
    """Make the named module the active one and return it. Raises ``ValueError`` for an unknown name."""
    global _active
    _active = import_kernels(name)
    return _active


def active(near: Tensor | None = None) -> Kernels:
    """The module in use, ``cpu`` until ``use`` is called; ``triton`` for a call with a tensor ``near`` on a GPU."""
    if near is not None and near.is_cuda:
        return import_kernels(GPU)
    return _active or use("cpu")
