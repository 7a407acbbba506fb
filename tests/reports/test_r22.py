"""R22 (vllm#55221, #53906): workspaces sized in tokens though index entries are pooled by 4: 5,036 MB at 1M positions.

rows = min(max_len * 8 * factor / kpool, requests * max_len / kpool)        bytes = rows * 132
"""

from __future__ import annotations

import pytest
import torch

from attention.geometry import Geometry
from attention.indexer.qchunk import QChunk
from attention.indexer.split import legal_workspace_rows, workspace_bytes, workspace_rows
from attention.workspace_slot import Workspace

MILLION = 1 << 20


@pytest.mark.parametrize("kpool", [1, 4])
def test_rows_are_counted_in_pooled_entries(kpool: int) -> None:
    rows = workspace_rows(MILLION, 2, kpool)
    assert rows == 16 * MILLION // kpool
    assert workspace_bytes(rows) == 16 * MILLION // kpool * 132
    for requests in (1, 3, 64):
        legal = legal_workspace_rows(rows, MILLION, requests, kpool)
        assert legal == min(16, requests) * MILLION // kpool


def geometry(requests: int, pool: int) -> Geometry:
    return Geometry(
        max_model_len=MILLION,
        max_requests=requests,
        pool_tokens=pool,
        topk=2048,
        index_heads=32,
        index_dim=128,
        dtype=torch.bfloat16,
        index_kind="fp8",
        latent_kind="fp8_packed",
    )


@pytest.mark.parametrize(("requests", "pool", "rows"), [(1, 1 << 30, MILLION), (64, MILLION + 64, MILLION + 64)])
def test_buffers_are_no_larger_than_a_step_can_fill(requests: int, pool: int, rows: int) -> None:
    """Of 16M and 2M rows by the factor rule; the bytes are told."""
    indexer, prefill = QChunk(geometry(requests, pool)), Workspace(geometry(requests, pool))
    assert (indexer.rows, prefill.rows) == (rows, rows)
    assert indexer.facts()["indexer_workspace_bytes"] == rows * (256 + 4)
    assert prefill.facts()["prefill_workspace_bytes"] == rows * 1152
