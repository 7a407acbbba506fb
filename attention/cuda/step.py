"""One prefill step as the GPU slots see it: lengths on the host, the page table on the device, nothing read back.

    requests    | prompt: 900 rows, 40,000 keys | short: 30 rows, 500 keys | decode: 1 row, 9,000 keys | ...
    runs          gathered                        dense                      single
    rows        0                             900                        930                       931

    dense       no row sees more than topk keys: it takes them all, nothing is scored
    single      one row: it reads pages, there is nothing to reuse
    gathered    the others

The same three kinds as on a CPU (`attention.dense.page_runs`, which holds the first two together). Lengths come from
SGLang's host copies, so that planning does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.sizes import PAGE_SIZE

Kind = Literal["dense", "single", "gathered"]


@dataclass(frozen=True, eq=False)
class Step:
    """Requests of one step.

    Args:
        seq_lens: context of each request after the step, its new rows included.
        query_lens: new rows of each request.
        page_table: int32 [requests, pages] on the device; page of each 64 positions.

    Raises:
        ValueError: lists or table that do not fit together.
    """

    seq_lens: Sequence[int]
    query_lens: Sequence[int]
    page_table: Tensor

    def __post_init__(self) -> None:
        if len(self.seq_lens) != len(self.query_lens):
            raise ValueError(f"seq_lens and query_lens: {len(self.seq_lens)} and {len(self.query_lens)} requests")
        if any(not 0 <= rows <= keys for rows, keys in zip(self.query_lens, self.seq_lens, strict=True)):
            raise ValueError("seq_lens: shorter than the query rows of its request")
        table = self.page_table
        if table.dim() != 2 or table.shape[0] != len(self.seq_lens) or table.dtype != torch.int32:
            raise ValueError(f"page_table: int32 [{len(self.seq_lens)}, pages] is needed, not {list(table.shape)}")
        if max(self.seq_lens, default=0) > table.shape[1] * PAGE_SIZE:
            raise ValueError(f"page_table: {table.shape[1]} pages do not hold {max(self.seq_lens)} tokens")

    @property
    def starts(self) -> list[int]:
        """First row of each request, and the end of the last."""
        return [0, *accumulate(self.query_lens)]

    @property
    def rows(self) -> int:
        """Query rows that belong to a request; more are padding."""
        return sum(self.query_lens)

    def runs(self, topk: int, longest_single: int | None = None) -> list[tuple[Kind, int, int]]:
        """(kind, first request, stop) of consecutive requests of one kind; requests without rows are left out.

        A request of one row above `longest_single` keys counts as gathered.
        """

        def kind(r: int) -> Kind | None:
            if self.query_lens[r] == 0:
                return None
            if self.seq_lens[r] <= topk:
                return "dense"
            if self.query_lens[r] == 1 and (longest_single is None or self.seq_lens[r] <= longest_single):
                return "single"
            return "gathered"

        found: list[tuple[Kind, int, int]] = []
        for key, members in groupby(range(len(self.seq_lens)), kind):
            if key is not None:
                first, *rest = members
                found.append((key, first, (rest[-1] if rest else first) + 1))
        return found

    def seen(self, first: int, stop: int) -> NDArray[np.int32]:
        """Keys that each row of the requests [first, stop) sees, itself included: int32 [rows]."""
        pairs = zip(self.query_lens[first:stop], self.seq_lens[first:stop], strict=True)
        parts = [np.arange(keys - rows + 1, keys + 1, dtype=np.int32) for rows, keys in pairs]
        return np.concatenate([np.empty(0, dtype=np.int32), *parts])

    def context_slots(self, first: int, stop: int) -> Tensor:
        """Cache slots of the whole contexts of requests [first, stop), one after another: int64, on the device."""
        lengths = self.seq_lens[first:stop]
        device = self.page_table.device
        parts = []
        for r, length in enumerate(lengths, first):
            pages = self.page_table[r, : -(-length // PAGE_SIZE)].long()
            offsets = torch.arange(PAGE_SIZE, device=device)
            parts.append((pages[:, None] * PAGE_SIZE + offsets).flatten()[:length])
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def put(values: NDArray[np.int32], device: torch.device) -> Tensor:
    """`values` on the device; from pinned memory where that lets the host run ahead."""
    there = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.to(device)
