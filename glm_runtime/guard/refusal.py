"""`Refusal`: why a request is not served, as data."""

from __future__ import annotations

import json
import math
from typing import Any

SHOWN = 80  # characters of a value that an error repeats


def shown(value: object) -> Any:
    """`value` as it may stand in a JSON answer: short, finite, valid UTF-8.

    Numbers, booleans and None stay what they are where JSON can carry them; everything else becomes text, cut at
    `SHOWN` characters.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple | dict | set | bytes):
        text = f"{type(value).__name__} of {len(value)}"
    elif isinstance(value, str):
        text = value[: SHOWN + 1]
    elif isinstance(value, int):
        text = f"{'-' if value < 0 else ''}{value.bit_length()}-bit number"
    else:
        text = repr(value)[: SHOWN + 1]
    text = text if len(text) <= SHOWN else text[: SHOWN - 4] + " ..."
    return text.encode("utf-8", "replace").decode()


class Refusal(ValueError):
    """A request, or one field of it, that the guard does not let through.

    Attributes:
        field: name of the field as the client wrote it, with an index where it is an entry of a list; None: not known.
        value: what was given, fit for JSON (see `shown`).
        bound: what is allowed, in words.
        status_code: of the HTTP answer.
    """

    def __init__(self, field: str | None, value: object, bound: str, *, said: str = "", status_code: int = 400) -> None:
        self.field = field
        self.value = shown(value)
        self.bound: str | None = bound or None
        self.status_code = status_code
        given = f'"{self.value}"' if isinstance(self.value, str) else json.dumps(self.value)
        super().__init__(said or f"{field}: {bound} is needed, not {given}")

    @classmethod
    def because(cls, said: str, field: str | None = None, value: object = None, status_code: int = 400) -> Refusal:
        """A refusal in somebody else's words."""
        return cls(field, value, "", said=" ".join(said.split()), status_code=status_code)

    def as_dict(self) -> dict[str, Any]:
        """{"error": {"message", "field", "value", "bound"}}: JSON values only."""
        message = str(self).encode("utf-8", "replace").decode()
        return {"error": {"message": message, "field": self.field, "value": self.value, "bound": self.bound}}
