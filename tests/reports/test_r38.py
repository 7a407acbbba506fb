"""R38: prompt logprobs of a prompt whose prefix is cached are those of the first time."""

from __future__ import annotations

import pytest

from tests.equality.prompts import prompt
from tests.equality.serving import Ask
from tests.equality.stage import Stage
from tests.ledger.client import Case, drained, post
from tests.ledger.client import ask as ask_server
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.mark.engine("chunked")
@pytest.mark.parametrize("length", [33, 65, 130, 300])
def test_second_answer_equals_the_first(stage: Stage, length: int) -> None:
    running = stage.engine("chunked")
    ask = Ask(prompt(length, "R38"), 8, start=0)
    first, second = running.alone(ask), running.alone(ask)
    assert len(first.prompt_logprobs) == length
    assert second.prompt_logprobs == first.prompt_logprobs
    assert (second.tokens, second.logprobs) == (first.tokens, first.logprobs)


@pytest.mark.engine("chunked")
@pytest.mark.parametrize("length", [33, 130, 300])
def test_cached_without_logprobs_then_asked_with(stage: Stage, length: int) -> None:
    ask = Ask(prompt(length, "R38"), 8, start=0)
    fresh = stage.alone("chunked", ask)
    running = stage.engine("chunked")
    plain = running.alone(Ask(ask.ids, ask.new))
    after = running.alone(ask)
    assert after.prompt_logprobs == fresh.prompt_logprobs
    assert after.tokens == plain.tokens == fresh.tokens


@pytest.mark.hall("narrow")
def test_under_the_ledger(hall: Hall) -> None:
    server = hall.server("narrow")
    for length in (33, 65, 130, 300):
        post(server, "/flush_cache")
        plain = ask_server(server, Case(f"r38 {length}", tuple(prompt(length, "R38")), 8))
        case = Case(f"r38 {length}", tuple(prompt(length, "R38")), 8, logprobs=True)
        after, again = ask_server(server, case), ask_server(server, case)
        assert len(after.prompt_logprobs) == length - 1
        assert after.prompt_logprobs == pytest.approx(again.prompt_logprobs, abs=1e-5)
        assert after.tokens == again.tokens == plain.tokens
    drained(server)
