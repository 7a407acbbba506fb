"""Greedy tokens under the ledger equal those of `--policy sglang`, float32, SGLang's strict memory checks on.

| server  | budget | pool   | overlap | decode first | what                                            |
|---------|--------|--------|---------|--------------|-------------------------------------------------|
| wide    |  2,048 | 16,384 |   on    |     on       | crowd, crowd again (prefix hits), features      |
| narrow  |    128 |  7,168 |   on    |     on       | crowd, features: chunks, mixed steps            |
| plain   |     32 |  7,168 |   off   |     off      | crowd: a budget below the page                  |
| storm   |    128 |  1,024 |   on    |     on       | storm: preemptions, penalties; aborts           |
| storm32 |     32 |  1,024 |   off   |     off      | storm without penalties; aborts                 |
| tp2     |    128 |  7,168 |   on    |     on       | crowd, on two ranks                             |
"""

from __future__ import annotations

import random
import time

import pytest

from tests.ledger.cases import CROWD, FEATURES, STORM, penalised
from tests.ledger.client import Case, Reply, drained, post, together, totals
from tests.ledger.hall import SERVERS, Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]

PAGE = 64


def on(*names: str) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.hall(name)) for name in names]


def budget(name: str) -> int:
    flags = SERVERS[name]
    return int(flags[flags.index("--max-num-batched-tokens") + 1])


def assert_same(found: dict[str, Reply], expected: dict[str, Reply], cases: list[Case]) -> None:
    """Tokens and finish equal; logprobs within 1e-5 and of the same number."""
    for case in cases:
        ours, theirs = found[case.name], expected[case.name]
        assert (ours.tokens, ours.finish) == (theirs.tokens, theirs.finish), case
        if case.logprobs:
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5), case.name
            assert len(ours.prompt_logprobs) == len(case.ids) - 1
            assert ours.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=1e-5), case.name


@pytest.mark.parametrize("name", on("wide", "narrow", "plain", "tp2"))
def test_crowd(hall: Hall, expected: dict[str, Reply], name: str) -> None:
    server = hall.server(name)
    post(server, "/flush_cache")
    assert_same(together(server, CROWD), expected, CROWD)
    facts = drained(server)
    assert facts["most_tokens_in_a_step"] <= budget(name)
    assert all(sum(step["rows"].values()) <= budget(name) for step in hall.steps(name))


@pytest.mark.parametrize("name", on("wide"))
def test_crowd_again_starts_from_the_prefix_cache(hall: Hall, expected: dict[str, Reply], name: str) -> None:
    server = hall.server(name)
    post(server, "/flush_cache")
    together(server, CROWD)
    again = together(server, CROWD)
    assert_same(again, expected, CROWD)
    for case in CROWD:
        assert again[case.name].cached == (len(case.ids) - 1) // PAGE * PAGE, case.name
    drained(server)


@pytest.mark.parametrize("name", on("wide", "narrow"))
def test_features(hall: Hall, expected: dict[str, Reply], name: str) -> None:
    """Logprobs (in mixed steps too), penalties, minimum length, grammars, stop strings, no output at all."""
    server = hall.server(name)
    post(server, "/flush_cache")
    before = totals(server)["steps"]
    assert_same(together(server, FEATURES), expected, FEATURES)
    drained(server)
    asked = {case.name for case in FEATURES if case.logprobs}
    mixed = [step for step in hall.steps(name, before) if step["mode"] == "mixed"]
    assert any(asked & set(step["rows"]) for step in mixed), "no mixed step had a request with logprobs"


@pytest.mark.parametrize("name", on("wide"))
def test_several_answers_to_one_prompt(hall: Hall, expected: dict[str, Reply], name: str) -> None:
    from tests.ledger.cases import MANY

    answers = hall.server(name).post("/generate", MANY.body())
    assert [list(answer["output_ids"]) for answer in answers] == hall.many()
    assert len(answers) == 3


@pytest.mark.parametrize("name", on("storm", "storm32"))
def test_storm(hall: Hall, expected: dict[str, Reply], name: str) -> None:
    """More KV wanted than there is: requests are preempted and resume, their penalties with them.

    Without the overlap schedule SGLang's own penalties count other tokens, so those cases are left out there.
    """
    server = hall.server(name)
    cases = [case for case in STORM if name == "storm" or not penalised(case)]
    before = totals(server)
    assert_same(together(server, cases), expected, cases)
    facts = drained(server)
    assert facts["preempted"] - before["preempted"] >= 20
    assert facts["recomputed_tokens"] > before["recomputed_tokens"]
    assert facts["failed"] == 0


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", on("storm", "storm32"))
def test_aborts_at_random_times(hall: Hall, expected: dict[str, Reply], name: str, seed: int) -> None:
    """Aborted wherever they are: waiting, half way, decoding, preempted. The others do not notice."""
    server = hall.server(name)
    draw = random.Random(seed)
    cases = [case for case in STORM if not penalised(case)][:20]
    victims = draw.sample([case.name for case in cases], 8)
    first = totals(server)["steps"]

    def strike() -> None:
        for victim in victims:
            until = totals(server)["steps"] + draw.randint(1, 8)
            end = time.monotonic() + 5
            while totals(server)["steps"] < until and time.monotonic() < end:
                time.sleep(0.01)
            post(server, "/abort_request", {"rid": f"{victim}-{seed}"})

    asked = [Case(f"{case.name}-{seed}", case.ids, 48, sampling=case.sampling) for case in cases]
    found = together(server, asked, strike)
    for case in cases:
        reply, whole = found[f"{case.name}-{seed}"], expected[case.name].tokens[:48]
        if case.name in victims and reply.finish["type"] != "length":
            assert reply.finish["type"] in ("abort", "error")
            assert reply.tokens == whole[: len(reply.tokens)]
        else:
            assert reply.tokens == whole, case.name
    assert any(found[f"{victim}-{seed}"].finish["type"] != "length" for victim in victims), "nobody was hit"
    assert drained(server)["steps"] > first
