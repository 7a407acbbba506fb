"""The golden sets of the arithmetic in `parallel/` and of the attention plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.__main__ import failures, load_check, read_folder

SETS = [
    "dcp_local_seq_lens",
    "indexer_chunk_metadata",
    "indexer_chunks",
    "pcp_dcp_chunk_plan",
    "pcp_layout",
    "row_shard",
    "sglang_cp_layout",
    "sparse_mla_prefill_chunks",
    "topk_index_remap",
]


@pytest.mark.parametrize("name", SETS)
def test_set(golden_dir: Path, name: str) -> None:
    cases = read_folder(golden_dir).get(name)
    if not cases:
        pytest.skip(f"no golden file of the set {name}")
    check = load_check(name)
    assert check is not None
    assert failures(check, cases) == []
