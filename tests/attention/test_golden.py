"""The golden sets of cache layouts and of the indexer's arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.__main__ import failures, load_check, read_folder


@pytest.mark.parametrize("name", ["fp8_layouts", "indexer_numerics"])
def test_set(golden_dir: Path, name: str) -> None:
    cases = read_folder(golden_dir).get(name)
    if not cases:
        pytest.skip(f"no golden file of the set {name}")
    check = load_check(name)
    assert check is not None
    assert failures(check, cases) == []
