"""R19 (sglang#35201, #39095, #40217): float32 index logits outside every memory budget.

512 rows over 4,096 keys are 8 MiB of logits, 32 heads unfused 256 MiB. Under a budget of 1 MiB the slots' measured peak
stays below it, does not depend on the heads, and the ids are those of the unsplit computation, ties included (the
property tests of `tests/attention/test_qchunk.py` make ties).
"""

from __future__ import annotations

import pytest

from tests.reports.scratch_peak import measure

BUDGET = 1 << 20
NOISE = 1 << 18  # the plan's own lists and what the interpreter takes meanwhile


@pytest.mark.slow
@pytest.mark.parametrize("slot", ["ragged", "qchunk"])
@pytest.mark.parametrize("heads", [4, 32])
def test_measured_peak_is_within_the_budget(slot: str, heads: int) -> None:
    found = measure(slot=slot, rows=512, keys=4096, heads=heads, budget=BUDGET)
    assert found["equal"]
    assert found["peak"] <= BUDGET + NOISE
    assert found["scratch_peak"] <= BUDGET


@pytest.mark.slow
def test_the_measure_sees_what_is_taken() -> None:
    """With a budget of 16 MiB ragged takes the 8 MiB that the unsplit logits are."""
    found = measure(slot="ragged", rows=512, keys=4096, heads=4, budget=16 << 20)
    assert found["equal"]
    assert found["peak"] > 6 << 20
