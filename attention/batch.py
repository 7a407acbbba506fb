"""The plan of one forward pass: which query rows belong to which request, and where its context lies.

    query rows   | request 0 | request 1 |  ...      row i of request r: start = query_start[r], stop = query_start[r+1]
    context      [0 .......... seq_lens[r])            position(i) = seq_lens[r] - (stop - i)
    pages        page_table[r] = [7, 2, 9, ...]        slot(p)     = page_table[r, p // 64] * 64 + p % 64

Where prefill ranks share a step, each has a batch of its own rows, and knows whose part it is (`Part`).

A decode step is R requests of one row each, a prefill is one request of many rows, a mixed batch is both; the
functions of ``attention`` do not ask which it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.sizes import PAGE_SIZE


@dataclass(frozen=True)
class AttentionBatch:
    """Requests of one forward pass; all tensors int32, contiguous, on the CPU.

    Args:
        query_start: [R + 1], ascending from 0; rows past ``query_start[R]`` are padding.
        seq_lens: [R], context length of each request after this pass, new rows included.
        page_table: [R, max_pages], physical page of each 64 positions; entries past the context are not read.
        page_size: tokens a page, 64.
        of: the step that this is one prefill rank's part of; None: the step itself.

    Raises:
        ValueError: naming the field, for a wrong dtype, shape, order or a context that the table does not cover.
    """

    query_start: Tensor
    seq_lens: Tensor
    page_table: Tensor
    page_size: int = PAGE_SIZE
    of: Part | None = None

    def __post_init__(self) -> None:
        if self.page_size != PAGE_SIZE:
            raise ValueError(f"page_size: {self.page_size}; only {PAGE_SIZE} is supported")
        for name, dims in (("query_start", 1), ("seq_lens", 1), ("page_table", 2)):
            value: Tensor = getattr(self, name)
            if value.dtype != torch.int32 or value.dim() != dims or not value.is_contiguous() or value.is_cuda:
                raise ValueError(f"{name}: a contiguous int32 CPU tensor of {dims} dimension(s) is needed")
        requests = self.seq_lens.shape[0]
        if self.query_start.shape[0] != requests + 1:
            raise ValueError(f"query_start: {self.query_start.shape[0]} entries for {requests} requests")
        if self.page_table.shape[0] != requests:
            raise ValueError(f"page_table: {self.page_table.shape[0]} rows for {requests} requests")
        if int(self.query_start[0]) != 0:
            raise ValueError("query_start: must start at 0")
        if requests == 0:
            return
        queries = self.query_start.diff()
        if int(queries.min()) < 0:
            raise ValueError("query_start: must not descend")
        if bool((self.seq_lens < queries).any()):
            raise ValueError("seq_lens: shorter than the query rows of its request")
        if int(self.seq_lens.max()) > self.page_table.shape[1] * self.page_size:
            raise ValueError(
                f"page_table: {self.page_table.shape[1]} pages do not hold {int(self.seq_lens.max())} tokens"
            )

    @property
    def requests(self) -> int:
        """Number of requests R."""
        return self.seq_lens.shape[0]

    @property
    def rows(self) -> int:
        """Number of query rows that belong to a request."""
        return int(self.query_start[-1])

    def part(self, first: int, stop: int) -> AttentionBatch:
        """Rows ``first`` to ``stop`` as a batch of their own: a query chunk, or one rank's share.

        Requests without rows there are left out; a request that is cut ends at its last row kept. A row's results have
        the same bits in the part as in the whole. Raises ``ValueError`` for a range outside the rows.
        """
        if not 0 <= first <= stop <= self.rows:
            raise ValueError(f"rows: {first} to {stop} of {self.rows}")
        bounds = self.query_start.clamp(first, stop)
        kept = bounds.diff() > 0
        ends = self.seq_lens - (self.query_start[1:] - bounds[1:])
        starts = torch.cat([bounds[:1] * 0, bounds.diff()[kept].cumsum(0, dtype=torch.int32)])
        return AttentionBatch(starts, ends[kept], self.page_table[kept], self.page_size)

    def row_requests(self) -> Tensor:
        """Request of each row, int64 [rows]."""
        return torch.repeat_interleave(torch.arange(self.requests), self.query_start.diff().long())

    def row_positions(self) -> Tensor:
        """Absolute position of each row, int64 [rows]."""
        owner = self.row_requests()
        return self.seq_lens.long()[owner] - self.query_start.long()[1:][owner] + torch.arange(self.rows)

    def context_slots(self, request: int) -> Tensor:
        """Cache slots of positions 0 to ``seq_lens[request] - 1``, int64."""
        return self.slots_of(request, torch.arange(int(self.seq_lens[request])))

    def slots_of(self, request: int, position: Tensor) -> Tensor:
        """Cache slots of a request's positions, int64 of their shape."""
        return self.page_table[request].long()[position // self.page_size] * self.page_size + position % self.page_size


@dataclass(frozen=True)
class Part:
    """Where a prefill rank's batch comes from.

    Args:
        whole: the step, the same on all ranks.
        requests: int64 [R], its request that each of the rank's entries belongs to.
        everywhere: bool [requests of the step], those whose rows every rank runs.
    """

    whole: AttentionBatch
    requests: Tensor
    everywhere: Tensor
