"""R32 (vllm-project/vllm#54300): GLM-5.3 under decode context parallel answers well at 118 tokens, at random from 205.

Lengths of 8 to 400 tokens, both prefill slots, against an engine with one cache; and a launch whose ranks write rows
where others are read from token 128 on: short prompts would answer well, so the start-up check has to find it.
"""

from __future__ import annotations

import pytest

from tests.equality.serving import StartError
from tests.parallel.dcp_engines import ENGINES, NEW, SWEEP, answers
from tests.parallel.misplaced import Misplaced

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.together("dcp")]


@pytest.mark.parametrize("name", ["paged", "workspace", "both"])
def test_every_length_answers_as_with_one_cache(name: str) -> None:
    assert (min(SWEEP), max(SWEEP)) == (8, 400)
    different = []
    for length, one, two in zip(SWEEP, answers("one").sweep, answers(name).sweep, strict=True):
        assert len(one.tokens) == NEW
        if one.tokens != two.tokens:
            different.append(length)
    assert different == []


def test_a_launch_that_misplaces_rows_does_not_serve() -> None:
    with pytest.raises(StartError, match=r"decode context parallel: keys merged .* in a context of \d+ tokens"):
        Misplaced(**ENGINES["paged"]).close()
