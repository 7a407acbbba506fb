"""Greedy tokens equal transformers', token for token, in float32, however the work is cut.

| engine  | alone | all at once | prefix hits | long prompts join decoding ones |
|---------|-------|-------------|-------------|---------------------------------|
| plain   |   x   |      x      |      x      |                                 |
| chunked |   x   |      x      |             |   (overlap schedule off)        |
| mixed   |   x   |      x      |             |                x                |
| tp2     |   x   |      x      |             |                                 |
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import oracle
from tests.equality.prompts import LENGTHS, NEW, prompt
from tests.equality.serving import Ask
from tests.equality.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.server]

ENGINES = [pytest.param(name, marks=pytest.mark.engine(name)) for name in ("plain", "chunked", "mixed", "tp2")]
PAGE = 64


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("length", LENGTHS)
def test_alone(stage: Stage, expected: dict[int, list[int]], engine: str, length: int) -> None:
    assert stage.alone(engine, Ask(prompt(length), NEW)).tokens == expected[length]


@pytest.mark.parametrize("engine", ENGINES)
def test_all_at_once(stage: Stage, expected: dict[int, list[int]], engine: str) -> None:
    replies = stage.together(engine, [Ask(prompt(length), NEW) for length in LENGTHS])
    assert {n: r.tokens for n, r in zip(LENGTHS, replies, strict=True)} == expected


@pytest.mark.engine("plain")
def test_the_same_prompts_again_hit_the_prefix_cache(stage: Stage, expected: dict[int, list[int]]) -> None:
    running = stage.engine("plain")
    asks = [Ask(prompt(length), NEW) for length in LENGTHS]
    running.together(asks)
    for length, reply in zip(LENGTHS, running.together(asks), strict=True):
        assert reply.cached == (length - 1) // PAGE * PAGE, length
        assert reply.tokens == expected[length], length


@pytest.mark.engine("plain")
@pytest.mark.parametrize("shared", [70, 128, 300])
def test_shared_prefix_hits_the_cache(stage: Stage, folder: Path, shared: int) -> None:
    running = stage.engine("plain")
    running.alone(Ask(prompt(500)[: shared + 5], 1))
    ids = prompt(500)[:shared] + prompt(100, f"tail/{shared}")
    reply = running.alone(Ask(ids, NEW))
    assert reply.cached == shared // PAGE * PAGE > 0
    assert reply.tokens == oracle.greedy(folder, ids, NEW).tokens


@pytest.mark.engine("plain")
@pytest.mark.parametrize("length", [100, 500, 1500])
def test_logprobs_are_transformers(stage: Stage, folder: Path, length: int) -> None:
    """Of prompt and generated tokens. Beyond index_topk a near-tie among index scores may move a single one further."""
    reply = stage.alone("plain", Ask(prompt(length), 16, start=0))
    answer = oracle.greedy(folder, prompt(length), NEW)
    ours = [*reply.prompt_logprobs[1:], *reply.logprobs]
    theirs = [*answer.prompt_logprobs, *answer.logprobs[:16]]
    errors = sorted(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    assert sum(errors) / len(errors) < 1e-3
    assert errors[len(errors) * 9 // 10] < 1e-4


@pytest.mark.engine("mixed")
def test_decoding_requests_go_on_while_long_prompts_prefill(stage: Stage, expected: dict[int, list[int]]) -> None:
    """Nine requests decode; when the first has 4 tokens, two long prompts come: 59 chunks of 128 tokens."""
    early = [n for n in LENGTHS if n < 1000]
    late = [n for n in LENGTHS if n >= 1000]
    asks = [Ask(prompt(n), NEW) for n in early] + [Ask(prompt(n), NEW, after=(0, 4)) for n in late]
    replies = stage.together("mixed", asks)
    assert {n: r.tokens for n, r in zip(early + late, replies, strict=True)} == expected
    joined = min(replies[len(early) :], key=lambda reply: reply.during)
    grown = [joined.during[i] - joined.before[i] for i in range(len(early))]
    # Twelve chunks of the shorter long prompt. Without mixing, decoding would stand still: 0 to 2 tokens in flight.
    assert min(grown) >= 6, f"tokens out while a prompt of {late[0]} was prefilled: {grown}"
