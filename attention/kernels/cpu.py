"""The compiled CPU kernels: what ``attention.kernels`` serves by default.

    cpu_select -> score (page by page), topk (threshold), cpu_slices (rows longer than the scratch)
    cpu_attend -> sparse (64 rows at a time)                     cpu_gather -> sparse
    all built from vector (LLVM IR)

One thread, no GIL. A row's bits depend on its own query, context and ids, never on the batch, the cut or the scratch.
Importing compiles the loops (about 7 s), or loads them (0.5 s) from numba's cache: ``NUMBA_CACHE_DIR``, else beside the
sources or in the user's cache folder.
"""

from __future__ import annotations

from attention.kernels.cpu_attend import attend
from attention.kernels.cpu_gather import gather
from attention.kernels.cpu_select import select

__all__ = ["attend", "gather", "select"]
