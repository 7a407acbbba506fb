"""Short contexts: a row that sees no more than topk keys attends all of them, so nothing is scored.

    request  context  index_topk 64      scored   ids of a row at position p
    0           40                         no     0 1 ... p            dense: plain causal attention
    1          500                         yes    the 64 best

Judged request by request, new rows and decoding ones alike. Index keys are stored all the same: a later step of the
request may need them. The ids are what the indexer would return, and attention sums the same rows in the same order, so
a request that outgrows the branch half way has the bits of one that never took it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attention.batch import AttentionBatch


def dense_requests(batch: AttentionBatch, topk: int) -> Tensor:
    """Bool [R]: requests none of whose rows sees more than ``topk`` keys."""
    return batch.seq_lens <= topk


def dense_rows(batch: AttentionBatch, topk: int) -> int:
    """Query rows of the requests that take the branch."""
    return int(batch.query_start.diff()[dense_requests(batch, topk)].sum())


def page_runs(batch: AttentionBatch, topk: int) -> Iterator[tuple[bool, int, int]]:
    """(reads pages, first, stop) of consecutive requests of one kind, in order.

    A gather pays by reuse. Requests of one row have none, and dense requests need no scores; both read pages.
    """
    rows, dense = batch.query_start.diff().tolist(), dense_requests(batch, topk).tolist()
    paged = [n <= 1 or short for n, short in zip(rows, dense, strict=True)]
    first = 0
    for r in range(1, len(paged) + 1):
        if r == len(paged) or paged[r] != paged[first]:
            yield paged[first], first, r
            first = r


def causal_ids(batch: AttentionBatch, topk: int, rows: int) -> Tensor:
    """Int32 [rows, topk]: 0 to the row's position, then -1; padding rows are -1.

    Raises ValueError where a row sees more than ``topk`` keys, or ``rows`` are fewer than the batch has.
    """
    if rows < batch.rows:
        raise ValueError(f"rows: {rows}, the batch has {batch.rows}")
    if not bool(dense_requests(batch, topk).all()):
        raise ValueError(f"topk: {int(batch.seq_lens.max())} keys are visible, {topk} ids do not name them all")
    ids = torch.full((rows, topk), -1, dtype=torch.int32)
    columns = torch.arange(topk, dtype=torch.int32)
    position = batch.row_positions().unsqueeze(1)
    ids[: batch.rows] = torch.where(columns <= position, columns, columns.new_tensor(-1))
    return ids
