"""R22 (vllm#55221, #53906): workspaces sized in tokens though index entries are pooled by 4: 5,036 MB at 1M positions.

rows = min(max_len * 8 * factor / kpool, requests * max_len / kpool)        bytes = rows * 132
"""

from __future__ import annotations

import json

import pytest
import torch

from attention.geometry import Geometry
from attention.indexer.qchunk import QChunk
from attention.indexer.split import legal_workspace_rows, workspace_bytes, workspace_rows
from attention.workspace_slot import Workspace
from glm_runtime.plan.__main__ import main
from glm_runtime.plan.devices import GPUS
from glm_runtime.plan.setup import Setup
from glm_runtime.plan.shapes import model
from glm_runtime.plan.size import pooled_index_rows, size
from policies.ledger.flags import LedgerFlags

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


@pytest.mark.parametrize("kpool", [1, 4])
@pytest.mark.parametrize("requests", [1, 64])
def test_the_planner_counts_the_same(kpool: int, requests: int) -> None:
    setup = Setup(
        model("glm-5.3"),
        GPUS["B200"],
        1,
        context=4096,
        weights="fp4",
        ledger=LedgerFlags(max_num_batched_tokens=8192, max_num_seqs=requests),
    )
    rule, legal = pooled_index_rows(setup, kpool)
    assert rule == 16 * MILLION // kpool and legal == min(16, requests) * MILLION // kpool
    found = size(setup)
    held = QChunk(geometry(requests, max(1, found.capacity)))
    assert found.index_rows == held.rows and found.index_buffer == workspace_bytes(held.rows)


def test_the_bytes_are_shown_with_their_formula(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "glm-5.3", "--gpus", "8xH200", "--tp", "8", "--context", str(MILLION - 1), "--json"]
    assert main([*arguments, "--max-num-seqs", "1", "--kv-cache-dtype", "fp8_e4m3", "--no-advice"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory of a rank"]
    shown = memory["index_workspace"]
    assert "min(16,777,216 = positions x 8 x 2, requests x positions, pool) x 132 B" in shown["formula"]
    pool = memory["kv_capacity_tokens"]["value"]
    assert shown["value"] <= 132 * MILLION and shown["value"] == pytest.approx(132 * pool, rel=0.02)
    assert memory["index_workspace_rule"]["value"] == 132 * 16 * MILLION
