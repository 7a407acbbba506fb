"""Exchanges between the ranks of a group, on torch.distributed. gloo on a CPU, NCCL on GPUs.

rank 0   [ a a a | . | . . ]          [ a a a | b | c c ]
rank 1   [ . . . | b | . . ]    -->   [ a a a | b | c c ]      sizes 3, 1, 2
rank 2   [ . . . | . | c c ]          [ a a a | b | c c ]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def all_gather_rows(rows: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
    """Variable all-gather along the first dimension, in place; every rank sends exactly its own rows.

    Args:
        rows: [sum(sizes), ...], contiguous; this rank's rows are filled in, the others are overwritten.
        sizes: rows of each rank, the same on all of them.

    Raises:
        ValueError: sizes that are not one a rank or do not add up to the rows, or rows that are not contiguous.
    """
    if len(sizes) != dist.get_world_size(group) or sum(sizes) != rows.shape[0] or min(sizes) < 0:
        raise ValueError(
            f"sizes: {list(sizes)} for {rows.shape[0]} rows on {dist.get_world_size(group)} ranks; they must add up"
        )
    if not rows.is_contiguous():
        raise ValueError("rows: a contiguous tensor is needed")
    pending = []
    start = 0
    for rank, size in enumerate(sizes):
        if size:
            source = dist.get_global_rank(group, rank)
            pending.append(dist.broadcast(rows[start : start + size], source, group=group, async_op=True))
        start += size
    for work in pending:
        if work is not None:  # None: this rank is not in the group
            work.wait()
