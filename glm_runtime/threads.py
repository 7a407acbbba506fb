"""How many OpenMP threads each rank gets, and on which cores.

    cores      0 1 2 3 4 5 6 7        tp 2, 8 cores: one core is left to the HTTP, tokenizer and detokenizer processes,
    rank 0     0 1 2                  the rest is divided evenly: 3 threads a rank.
    rank 1           3 4 5
    front                  6 7

OpenMP threads that outnumber cores spin against each other: measured up to 40x slower steps on two cores. Pure.
"""

from __future__ import annotations

import os

from glm_runtime.config import ConfigError

OMP_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


def given_threads() -> int | None:
    """The operator's OMP_NUM_THREADS; None where it is not set. To be asked before OpenMP reads it, which complains."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if not given:
        return None
    if not given.isdigit() or int(given) < 1:
        raise ConfigError(f"OMP_NUM_THREADS={given!r} is not a positive whole number")
    return int(given)


def usable_cores() -> list[int]:
    """Core ids that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def threads_per_rank(cores: int, ranks: int) -> int:
    """Threads for each of `ranks` ranks on `cores` cores: an even share of all but one core, at least 1."""
    if cores < 1 or ranks < 1:
        raise ValueError(f"cores and ranks must be positive, got {cores} and {ranks}")
    return max(1, (cores - 1) // ranks)


def binding(cores: list[int], ranks: int, threads: int) -> str:
    """SGLang's SGLANG_CPU_OMP_THREADS_BIND value: core lists of the ranks, "|" between ranks.

    Ranks take disjoint cores while there are enough; past that they share round-robin.
    """
    groups = []
    for rank in range(ranks):
        ids = [cores[(rank * threads + i) % len(cores)] for i in range(threads)]
        groups.append(",".join(str(i) for i in dict.fromkeys(ids)))
    return "|".join(groups)
