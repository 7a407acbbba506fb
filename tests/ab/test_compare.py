"""Equality: the first difference, its gaps, and what noise explains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_runtime.ab.compare import Answer, Noise, compare, divergence, first_difference, noise

TOKENS = st.lists(st.integers(0, 3), max_size=12)


@given(TOKENS, TOKENS)
def test_first_difference(a: list[int], b: list[int]) -> None:
    place = first_difference(a, b)
    if place is None:
        assert a == b
    else:
        assert a[:place] == b[:place] and a[place : place + 1] != b[place : place + 1]


def answer(tokens: list[int], other: int | None = None, gap: float = 0.5, shift: float = 0.0) -> Answer:
    """Each token ahead of `other` (None: of token 99) by `gap`."""
    runner = 99 if other is None else other
    logprobs = [-0.25 + shift] * len(tokens)
    return Answer(tokens, logprobs, [[(-0.25 + shift, token), (-0.25 + shift - gap, runner)] for token in tokens])


def test_both_tokens_and_gaps() -> None:
    found = divergence(4, answer([1, 2, 3], other=7, gap=0.5), answer([1, 2, 7], other=3, gap=0.125))
    assert found is not None
    assert (found.request, found.position, found.a, found.b) == (4, 2, 3, 7)
    assert (found.gap_a, found.gap_b, found.least_a) == (0.5, 0.125, False)


def test_a_token_that_is_not_among_the_top_ones() -> None:
    found = divergence(0, answer([1]), answer([2]))
    assert found is not None and found.least_a and found.gap_a == 0.5


def test_a_shorter_answer_and_one_that_failed() -> None:
    short = divergence(0, answer([1, 2]), answer([1]))
    assert short is not None and (short.position, short.a, short.b) == (1, 2, None)
    failed = divergence(0, Answer([], error="400: too long"), answer([1]))
    assert failed is not None and "400" in failed.error
    both = compare("a", [Answer([], error="x")], "b", [Answer([], error="x")], Noise())
    assert (both.asked, both.divergences) == (0, ())


def test_noise_of_equal_arms() -> None:
    floor = noise([([answer([1, 2]), answer([3])], [answer([1, 2], shift=0.01), answer([3])])])
    assert (floor.pairs, floor.tokens, floor.divergences) == (2, 3, 0)
    assert floor.logprob == pytest.approx(0.01) and floor.explains == pytest.approx(0.02)
    parted = noise([([answer([1, 2], other=5, gap=0.03)], [answer([1, 5], other=2, gap=0.04)])])
    assert (parted.divergences, parted.explains, parted.unstable) == (1, pytest.approx(0.04), {0: 1})


@pytest.mark.parametrize(("gap", "explained"), [(0.015, True), (0.0199, True), (0.0201, False)])
def test_a_gap_is_explained_up_to_twice_the_noise(gap: float, explained: bool) -> None:
    floor = Noise(pairs=1, tokens=10, logprob=0.01)
    found = compare("a", [answer([3], other=7, gap=gap)], "b", [answer([7], other=3, gap=0.0)], floor)
    assert (found.explained, found.real) == ((1, 0) if explained else (0, 1))


def test_without_noise_every_divergence_is_real() -> None:
    found = compare("a", [answer([3], other=7, gap=1e-6)], "b", [answer([7], other=3, gap=1e-6)], Noise())
    assert found.real == 1
    assert compare("a", [answer([3], 7, 1e-6)], "b", [answer([7], 3, 1e-6)], Noise(), tolerance=1e-5).real == 0


def test_unknown_gaps_are_never_explained_but_unstable_requests_are() -> None:
    a, b = Answer([1, 2]), Answer([1, 3])
    assert compare("a", [a], "b", [b], Noise(logprob=9.0)).real == 1
    assert compare("a", [a], "b", [b], Noise(unstable={0: 1})).real == 0
    assert compare("a", [a], "b", [b], Noise(unstable={0: 2})).real == 1
