"""A request's answer does not depend on its company: equal tokens, and logprobs equal in every bit.

    logprob(request alone) == logprob(among seven others) == logprob(cut in chunks) == logprob(after a prefix hit)

Tokens alone would hide small differences; a float compared with == does not. Why it holds: `docs/batch-invariance.md`.
"""

from __future__ import annotations

import pytest

from tests.equality.prompts import CROWD_NEW, crowd, prompt
from tests.equality.serving import Ask, Reply
from tests.equality.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.server]

LONG = (100, 500, 1500)
NEW = 16


def differences(left: Reply, right: Reply) -> dict[str, str]:
    """Where two replies differ, by field: how many entries, and the first."""
    found: dict[str, str] = {}
    for field in ("tokens", "logprobs", "prompt_logprobs"):
        a, b = getattr(left, field), getattr(right, field)
        if a != b:
            apart = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y] or [min(len(a), len(b))]
            at = apart[0]
            found[field] = f"{len(apart)} of {len(a)} and {len(b)}; at {at}: {a[at : at + 1]} and {b[at : at + 1]}"
    return found


def company() -> list[Ask]:
    """The eight requests that run side by side."""
    return [Ask(ids, CROWD_NEW, start=-1) for ids in crowd()]


@pytest.mark.engine("plain")
def test_alone_equals_among_seven_others(stage: Stage) -> None:
    for ask, reply in zip(company(), stage.together("plain", company()), strict=True):
        alone = stage.alone("plain", ask)
        assert len(alone.logprobs) == len(alone.tokens) == CROWD_NEW
        assert not differences(alone, reply), f"prompt of {len(ask.ids)}"


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=pytest.mark.engine(name))
        for name in ("chunked", "mixed", "tp2", "bfloat16-auto", "bfloat16-fp8_e4m3", "float32-fp8_e4m3")
    ],
)
def test_alone_equals_in_company_elsewhere(stage: Stage, engine: str) -> None:
    """Same claim, fewer tokens: chunked and mixed prefill, two ranks, bfloat16, packed fp8 rows."""
    asks = [Ask(ids, NEW, start=-1) for ids in crowd()]
    for ask, reply in zip(asks, stage.together(engine, asks), strict=True):
        assert not differences(stage.alone(engine, ask), reply), f"prompt of {len(ask.ids)}"


@pytest.mark.engine("chunked")
@pytest.mark.parametrize("length", LONG)
def test_chunks_of_128_equal_one_piece(stage: Stage, length: int) -> None:
    """Prompt logprobs too. The chunked engine also runs without the overlap schedule."""
    asks = {n: Ask(prompt(n), NEW, start=0) for n in LONG}
    whole = {n: stage.alone("plain", ask) for n, ask in asks.items()}  # all, so that its engine starts once
    assert len(whole[length].prompt_logprobs) == length
    assert not differences(whole[length], stage.alone("chunked", asks[length]))


@pytest.mark.engine("plain")
@pytest.mark.parametrize("length", LONG)
def test_prefix_hit_equals_fresh(stage: Stage, length: int) -> None:
    running = stage.engine("plain")
    ask = Ask(prompt(length), NEW, start=-1)
    fresh, hit = running.alone(ask), running.alone(ask)
    assert fresh.cached == 0 < hit.cached
    assert not differences(fresh, hit)


@pytest.mark.engine("mixed")
@pytest.mark.parametrize("logprobs", [True, False])
def test_mixed_equals_unmixed(stage: Stage, logprobs: bool) -> None:
    """R07: a long prompt joins eight decoding requests.

    NOTE: stock scheduling does not mix steps in which logprobs were asked; without them it does, and tokens tell.
    """
    start = -1 if logprobs else None
    asks = [*(Ask(ids, 2 * NEW, start) for ids in crowd()), Ask(prompt(1500), NEW, start, after=(0, 2))]
    mixed = stage.together("mixed", asks)
    unmixed = stage.together("plain", company()) + [stage.alone("plain", Ask(prompt(1500), NEW, start=0))]
    for ask, left, right in zip(asks, unmixed, mixed, strict=True):
        assert right.tokens == left.tokens[: ask.new], f"prompt of {len(ask.ids)}"
        assert right.logprobs == (left.logprobs[: ask.new] if logprobs else []), f"prompt of {len(ask.ids)}"
