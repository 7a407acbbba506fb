"""R62: where prompt logprobs start decides what the prefix cache may skip, and what the first entry means.

start s    entries of positions s, s + 1, ... ; entry 0 is None (`docs/logprobs.md`)
cached     whole pages before s: start 0 computes the prompt anew, start -1 (generated tokens only) uses all pages
"""

from __future__ import annotations

import pytest

from tests.equality.prompts import prompt
from tests.equality.serving import Ask
from tests.equality.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.server]

PAGE = 64
LENGTH = 300


@pytest.mark.engine("chunked")
@pytest.mark.parametrize("start", [0, 1, 63, 64, 100, 128, 256, 270, LENGTH - 1])
def test_start(stage: Stage, start: int) -> None:
    ids = prompt(LENGTH, "R62")
    whole = stage.alone("chunked", Ask(ids, 4, start=0))
    assert whole.prompt_logprobs[0] is None
    assert None not in whole.prompt_logprobs[1:]
    running = stage.engine("chunked")
    running.alone(Ask(ids, 4))
    reply = running.alone(Ask(ids, 4, start=start))
    assert reply.cached == start // PAGE * PAGE
    assert reply.prompt_logprobs[0] is None
    assert reply.prompt_logprobs[1:] == whole.prompt_logprobs[start + 1 :]
    assert (reply.tokens, reply.logprobs) == (whole.tokens, whole.logprobs)


@pytest.mark.engine("chunked")
def test_generated_only(stage: Stage) -> None:
    ids = prompt(LENGTH, "R62")
    whole = stage.alone("chunked", Ask(ids, 4, start=0))
    running = stage.engine("chunked")
    running.alone(Ask(ids, 4))
    reply = running.alone(Ask(ids, 4, start=-1))
    assert reply.cached == (LENGTH - 1) // PAGE * PAGE
    assert reply.prompt_logprobs == []
    assert reply.logprobs == whole.logprobs
