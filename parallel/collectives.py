"""Exchanges between the ranks of a group, on torch.distributed. gloo on a CPU, NCCL on GPUs.

rank 0   [ a a a | . | . . ]          [ a a a | b | c c ]
rank 1   [ . . . | b | . . ]    -->   [ a a a | b | c c ]      sizes 3, 1, 2
rank 2   [ . . . | . | c c ]          [ a a a | b | c c ]

all_gather_equal   x_r [n, ...]      -->  [x_0, x_1, ...]               the same on every rank
all_to_all         parts_r[to]       -->  [parts_0[r], parts_1[r], ...]
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


def all_gather_equal(rows: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None) -> torch.Tensor:
    """Tensors of one shape from every rank: [ranks, *rows.shape], in the type of `rows`, rank 0 first.

    `out`, contiguous and of as many values, is filled where it is given.
    """
    shape = (dist.get_world_size(group), *rows.shape)
    gathered = torch.empty(shape, dtype=rows.dtype, device=rows.device) if out is None else out.view(shape)
    dist.all_gather(list(gathered.unbind(0)), rows.contiguous(), group=group)
    return gathered


def all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send `parts[to]` [ranks, ...] to each rank; what came back, in the order of the senders, of the same shape."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


def sub_group(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """The part of `group` with this rank, cut into parts of `size` neighbours; a collective call of all processes.

    Raises ValueError where `size` does not divide the group.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) % size:
        raise ValueError(f"size: {size} does not divide the group of {len(ranks)} ranks")
    if len(ranks) == size:
        return group
    parts = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    made = [dist.new_group(members, backend=dist.get_backend(group)) for members in parts]
    own = made[ranks.index(dist.get_rank()) // size]
    assert isinstance(own, dist.ProcessGroup)
    return own


def first_ranks(value: float, group: dist.ProcessGroup | None) -> float:
    """`value` as the group's first rank has it, on every rank of a CPU group; `value` itself without a group."""
    if group is None:
        return value
    told = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(told, dist.get_global_rank(group, 0), group=group)
    return float(told[0])
