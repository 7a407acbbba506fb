"""The kinds of values: each check raises `Refusal` naming the field, or returns.

    whole  an int, no bool, in a range        flag   a bool              text  a str that UTF-8 can carry
    real   a finite number in a range         ids    a list of token ids

A float is never a whole number here, a string never a number, a bool never an int.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from glm_runtime.guard.refusal import Refusal

Check = Callable[[str, Any], None]


def whole(name: str, value: Any, least: int, most: int) -> None:
    """An int from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise Refusal(name, value, f"a whole number from {least} to {most}")


def real(
    name: str, value: Any, least: float, most: float, *, above: bool = False, most_said: str | None = None
) -> None:
    """A finite number from `least` (or above it) to `most`."""
    fits = type(value) in (int, float) and math.isfinite(value)
    if not fits or not least <= value <= most or (above and value == least):
        said = f"a number above {least:g}" if above else f"a number from {least:g}"
        raise Refusal(name, value, f"{said} {'up ' if above else ''}to {most_said or f'{most:g}'}")


def flag(name: str, value: Any) -> None:
    """A bool."""
    if type(value) is not bool:
        raise Refusal(name, value, "true or false")


def text(name: str, value: Any, most: int, least: int = 0) -> None:
    """A string of `least` to `most` characters without lone surrogates, which nothing downstream can encode."""
    if not isinstance(value, str):
        raise Refusal(name, value, "a string")
    if not least <= len(value) <= most:
        what = "a string that is not empty" if len(value) < least and least == 1 else f"at most {most} characters"
        raise Refusal(name, value if len(value) < least else f"{len(value)} characters", what)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Refusal(name, value, "text without lone surrogates") from None


def sequence(name: str, value: Any, most: int, of: str) -> Sequence[Any]:
    """A list (or tuple) of at most `most` entries."""
    if not isinstance(value, list | tuple):
        raise Refusal(name, value, f"a list of {of}")
    if len(value) > most:
        raise Refusal(name, f"{len(value)} entries", f"at most {most} entries")
    return value


def ids(name: str, value: Any, vocab: int, most: int, *, empty: bool = True) -> None:
    """A list of token ids from 0 to `vocab` - 1. A long list costs a few microseconds a thousand ids."""
    sequence(name, value, most, "token ids")
    if not value:
        if not empty:
            raise Refusal(name, "empty", "at least one token id")
        return
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < vocab:
        return
    for i, token in enumerate(value):
        whole(f"{name}[{i}]", token, 0, vocab - 1)


def optional(check: Check) -> Check:
    """Accepts None, too."""

    def checked(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return checked


def absent(why: str) -> Check:
    """Only None: the field is not for clients."""

    def checked(name: str, value: Any) -> None:
        if value is not None:
            raise Refusal(name, value, f"no value ({why})")

    return checked
