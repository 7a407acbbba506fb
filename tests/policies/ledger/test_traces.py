"""vLLM's recorded steps, replayed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.golden.sets.scheduler_traces import check


def test_open_traces(golden_dir: Path) -> None:
    cases = json.loads((golden_dir / "scheduler_traces_open.json").read_text())["cases"]
    differing = {case["id"]: reason for case in cases if (reason := check(case)) is not None}
    assert cases and not differing
