"""R29: SGLang documents zigzag as not usable for DeepSeek V3.2 and GLM-5.x; here prefills are shared head and tail.

ranks 2 and 4 over gloo, prompts of 1 to 33 tokens: below 2P tokens some segments are empty, below P some ranks are
"""

from __future__ import annotations

import pytest

from glm_runtime.cli import Options
from glm_runtime.config import ConfigError
from glm_runtime.prepare import request_for
from parallel.flags import ParallelFlags
from tests.parallel.pcp import run

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.together("pcp")]


@pytest.mark.parametrize("name", ["two", "four"])
def test_tokens_are_those_of_one_rank_at_every_length(name: str) -> None:
    one, shared = run("one"), run(name)
    assert shared.report["slots"]["context_parallel"] == "head-tail"
    for length in range(1, 34):
        assert shared.alone[length] == one.alone[length], length
    empty = [step for step in shared.ranks[0].steps if step["mode"] == "extend" and 0 in step["rank_rows"]]
    assert empty, "no step left a rank without rows"


@pytest.mark.parametrize("split", ["zigzag", "head-tail"])
def test_on_a_gpu_it_is_refused_with_the_reason_and_the_way_out(split: str) -> None:
    words = f"--cp-split {split} with --prefill-context-parallel-size 2 .*interleave; add --cp-split interleave"
    with pytest.raises(ConfigError, match=words):
        request_for(Options(cp_split=split, parallel=ParallelFlags(2)), "accelerator", 1)
