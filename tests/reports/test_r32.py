"""R32 (vllm-project/vllm#54300): GLM-5.3 under decode context parallel answers well at 118 tokens, at random from 205.

Lengths of 8 to 400 tokens, both prefill slots, against an engine with one cache. That no launch can come up in that
state is the start-up check's: `tests/attention/test_shards.py` shows it pass, and fail loudly on a misplaced row.
"""

from __future__ import annotations

import pytest

from tests.parallel.dcp_engines import NEW, SWEEP, answers

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.together("dcp")]


@pytest.mark.parametrize("name", ["paged", "workspace"])
def test_every_length_answers_as_with_one_cache(name: str) -> None:
    assert SWEEP[0] == 8 and SWEEP[-1] >= 393
    different = []
    for length, one, two in zip(SWEEP, answers("one").sweep, answers(name).sweep, strict=True):
        assert len(one.tokens) == NEW
        if one.tokens != two.tokens:
            different.append(length)
    assert different == []
