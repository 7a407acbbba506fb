"""What a stop pattern may cost is known before it runs."""

from __future__ import annotations

import re
import time
from re import _parser as parser  # type: ignore[attr-defined]

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_runtime.guard.refusal import Refusal
from glm_runtime.guard.stops import MAX_MATCH, MAX_PATHS, bounded, paths

COUNTED = [
    ("abc", 1),
    ("[a-z]", 1),
    ("a|b|cd", 3),
    ("a?", 2),
    ("a{2,5}", 4),
    (r"\d{5}", 1),
    ("(ab|cd){1,3}", 2 + 4 + 8),
    ("(a?){2}", 4),
    ("a{0,9}b{0,9}", 100),
    ("(?=a)b", 1),
    ("(?:ab|cd)(?P<x>c?)", 4),
]


@pytest.mark.parametrize(("pattern", "count"), COUNTED)
def test_paths(pattern: str, count: int) -> None:
    assert paths(parser.parse(pattern)) == count
    bounded("stop_regex", pattern)


@pytest.mark.parametrize(
    "pattern", ["a*", "a+", "a{3,}", ".*x", "(a+)+", "(a|a?)+", "(a{1,9}){1,9}", "a?" * 20, "(", "^", "", r"(a)\1*"]
)
def test_refused(pattern: str) -> None:
    with pytest.raises(Refusal):
        bounded("stop_regex", pattern)


pieces = st.sampled_from(["a", "b", "[ab]", ".", "a?", "b{0,3}", "a{2,4}", "(a|b)", "(a|ab){1,2}", "(?:a?b?){1,2}"])


@settings(max_examples=150, deadline=None)
@given(st.lists(pieces, min_size=1, max_size=12))
def test_what_passes_is_searched_quickly(parts: list[str]) -> None:
    """No pattern that passes needs more than a moment for the text that fits it almost everywhere."""
    pattern = "".join(parts) + "c"
    try:
        bounded("stop_regex", pattern)
    except Refusal:
        return
    started = time.process_time()
    re.search(pattern, "ab" * (MAX_MATCH // 2))
    # NOTE: MAX_MATCH starts times MAX_PATHS ways, at some 20 million tries a second; a pattern gone wild needs years.
    assert time.process_time() - started < MAX_MATCH * MAX_PATHS / 4e5
