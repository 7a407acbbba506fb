"""Grammars as far as they can be judged without compiling: size, depth, JSON, one of them only.

    json_schema     JSON text of an object or a boolean, or SGLang's "$$ANY$$"     depth <= MAX_DEPTH
    regex           text that Python's own parser reads                             repeats <= MAX_REPEAT
    ebnf            text
    structural_tag  JSON text of an object                                          depth <= MAX_DEPTH

Whether it compiles is for the compiler to say (`compiler.py`), outside of the scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from glm_runtime.guard.kinds import text
from glm_runtime.guard.limits import Limits
from glm_runtime.guard.refusal import Refusal

NAMES = ("json_schema", "regex", "ebnf", "structural_tag")
MAX_DEPTH = 64
ANY_JSON = "$$ANY$$"


def only_one(params: Mapping[str, Any]) -> None:
    """At most one grammar a request."""
    given = [name for name in NAMES if params.get(name)]
    if len(given) > 1:
        raise Refusal(given[1], "given", f"only one grammar ({given[0]} is given, too)")


def plain(name: str, value: Any, limits: Limits) -> None:
    """Text of at most `limits.grammar_bytes` bytes."""
    text(name, value, limits.grammar_bytes)
    size = len(value.encode())
    if size > limits.grammar_bytes:
        raise Refusal(name, f"{size} bytes", f"at most {limits.grammar_bytes} bytes")
    if "\0" in value:
        raise Refusal(name, value, "text without NUL")


def regex(name: str, value: Any, limits: Limits) -> None:
    """A regular expression; whether the grammar compiler takes it is tried later."""
    plain(name, value, limits)


def depth(value: Any, most: int) -> bool:
    """Whether a JSON value nests at most `most` deep. Walks without recursion."""
    stack = [(value, 1)]
    while stack:
        entry, level = stack.pop()
        if level > most:
            return False
        if isinstance(entry, dict):
            stack.extend((part, level + 1) for part in entry.values())
        elif isinstance(entry, list):
            stack.extend((part, level + 1) for part in entry)
    return True


def _json(name: str, value: str) -> Any:
    try:
        found = json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(name, value, f"valid JSON ({error})") from None
    if not depth(found, MAX_DEPTH):
        raise Refusal(name, value, f"JSON nested at most {MAX_DEPTH} deep")
    return found


def _no_constant(found: str) -> Any:
    raise ValueError(f"{found} is no JSON")


def json_schema(name: str, value: Any, limits: Limits) -> None:
    """A JSON schema as text."""
    plain(name, value, limits)
    if not value or value == ANY_JSON:
        return
    if not isinstance(_json(name, value), dict | bool):
        raise Refusal(name, value, "a JSON schema: an object, true or false")


def structural_tag(name: str, value: Any, limits: Limits) -> None:
    """A structural tag as text."""
    plain(name, value, limits)
    if value and not isinstance(_json(name, value), dict):
        raise Refusal(name, value, "a structural tag: a JSON object")


def of(obj: Any) -> list[tuple[str, str]]:
    """Grammars of a request: (name, text), each once."""
    params = getattr(obj, "sampling_params", None)
    found: dict[tuple[str, str], None] = {}
    for entry in params if isinstance(params, list | tuple) else [params or {}]:
        for name in NAMES:
            if entry.get(name):
                found[name, entry[name]] = None
    return list(found)


def named(obj: Any) -> str | None:
    """Name of the request's grammar field, None where it has none."""
    try:
        found = of(obj)
    except AttributeError:
        return None
    return found[0][0] if found else None
