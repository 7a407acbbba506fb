"""Stop conditions: strings, token ids, and patterns that cannot hold the scheduler up.

The scheduler searches each pattern in the tail of the text after every token, in its own loop. What a search may cost:

    length   characters of the longest match      the tail that is searched      <= MAX_MATCH
    paths    ways in which the pattern can match  what backtracking may try      <= MAX_PATHS

        literal, class       paths 1              a|b            paths(a) + paths(b)
        ab                   paths(a) paths(b)    a{m,n}         sum of paths(a)^k, k = m ... n

so `+`, `*` and `{n,}` need an upper bound, and `(a{1,9}){1,9}` is refused before it runs.
"""

from __future__ import annotations

import re
import warnings
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from glm_runtime.guard.kinds import text, whole
from glm_runtime.guard.limits import Limits
from glm_runtime.guard.refusal import Refusal

MAX_STRINGS = 32  # SGLang's
MAX_STRING = 1024  # characters
MAX_PATTERNS = 32  # SGLang's
MAX_PATTERN = 256  # bytes; SGLang's
MAX_MATCH = 1024
MAX_PATHS = 4096


def _several(name: str, value: Any, most: int) -> list[tuple[str, Any]]:
    if isinstance(value, str):
        return [(name, value)]
    if not isinstance(value, list | tuple):
        raise Refusal(name, value, "a string or a list of strings")
    if len(value) > most:
        raise Refusal(name, f"{len(value)} entries", f"at most {most} entries")
    return [(f"{name}[{i}]", entry) for i, entry in enumerate(value)]


def strings(name: str, value: Any, limits: Limits) -> None:
    """`stop`: one string or several, none of them empty (an empty one is found everywhere)."""
    for where, entry in _several(name, value, MAX_STRINGS):
        text(where, entry, MAX_STRING, 1)


def token_ids(name: str, value: Any, limits: Limits) -> None:
    """`stop_token_ids`: ids of the vocabulary; SGLang itself leaves out entries that are None."""
    if not isinstance(value, list | tuple | set | frozenset):
        raise Refusal(name, value, "a list of token ids")
    if len(value) > limits.flags.guard_max_list:
        raise Refusal(name, f"{len(value)} entries", f"at most {limits.flags.guard_max_list} entries")
    for i, token in enumerate(value):
        if token is not None:
            whole(f"{name}[{i}]", token, 0, limits.vocab - 1)


def patterns(name: str, value: Any, limits: Limits) -> None:
    """`stop_regex`: patterns that compile, and whose search is bounded (see above)."""
    for where, entry in _several(name, value, MAX_PATTERNS):
        text(where, entry, MAX_PATTERN, 1)
        if len(entry.encode()) > MAX_PATTERN:
            raise Refusal(where, f"{len(entry.encode())} bytes", f"at most {MAX_PATTERN} bytes")
        bounded(where, entry)


def bounded(name: str, pattern: str) -> None:
    """Raise Refusal unless `pattern` compiles, and its match length and paths are within bounds."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)
            tree = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        raise Refusal(name, pattern, f"a regular expression that compiles ({error})") from None
    if tree.getwidth()[1] > MAX_MATCH:
        raise Refusal(name, pattern, f"a match of at most {MAX_MATCH} characters (give +, * and {{n,}} an upper bound)")
    if tree.getwidth()[1] == 0:
        raise Refusal(name, pattern, "a pattern that matches at least one character")
    if paths(tree) > MAX_PATHS:
        raise Refusal(name, pattern, f"at most {MAX_PATHS} ways to match (fewer or shorter repeats)")


def paths(tree: Any) -> int:
    """Ways in which a parsed pattern can match, capped a little above `MAX_PATHS`."""
    total = 1
    for code, value in tree:
        total = min(total * _paths(code, value), MAX_PATHS + 1)
    return total


def _paths(code: Any, value: Any) -> int:
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        least, most, inner = value
        one, ways, power = paths(inner), 0, 1
        for k in range(min(int(most), MAX_PATHS) + 1):
            if k >= least:
                ways += power
            power = min(power * one, MAX_PATHS + 1)
            if ways > MAX_PATHS:
                break
        return max(ways, power if least > MAX_PATHS else 0)
    if code is codes.BRANCH:
        return sum(paths(branch) for branch in value[1])
    if code is codes.SUBPATTERN:
        return paths(value[3])
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return paths(value[1])
    if code is codes.ATOMIC_GROUP:
        return paths(value)
    if code is codes.GROUPREF_EXISTS:
        return paths(value[1]) + (paths(value[2]) if value[2] else 1)
    return 1
