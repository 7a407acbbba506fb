"""R35: the prefix of a chunked prompt is matched over all its chunks, not over the first only.

prompt   | chunk 128 | chunk 128 | rest |      the second time at most one page is computed
second     cached ........................ last page
"""

from __future__ import annotations

import pytest

from tests.equality.prompts import prompt
from tests.equality.serving import Ask
from tests.equality.stage import Stage
from tests.ledger.client import Case, drained, post
from tests.ledger.client import ask as ask_server
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]

PAGE = 64


@pytest.mark.engine("chunked")
@pytest.mark.parametrize("length", [40, 128, 129, 320, 321, 1000])
def test_second_identical_prompt_computes_one_page_at_most(stage: Stage, length: int) -> None:
    running = stage.engine("chunked")
    ask = Ask(prompt(length, "R35"), 8)
    first, second = running.alone(ask), running.alone(ask)
    assert first.cached == 0
    assert 1 <= length - second.cached <= PAGE
    assert second.tokens == first.tokens


@pytest.mark.hall("narrow")
def test_under_the_ledger(hall: Hall) -> None:
    server = hall.server("narrow")
    for length in (40, 128, 129, 320, 321, 1000):
        post(server, "/flush_cache")
        case = Case(f"r35 {length}", tuple(prompt(length, "R35")), 8)
        first, second = ask_server(server, case), ask_server(server, case)
        assert first.cached == 0
        assert 1 <= length - second.cached <= PAGE
        assert second.tokens == first.tokens
    drained(server)
