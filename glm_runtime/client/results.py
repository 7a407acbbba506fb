"""What a client gives back, and what it raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class ClientError(RuntimeError):
    """Whatever ends a request otherwise than by its result."""


class Refused(ClientError):
    """The server refused the request.

    Attributes:
        code: kind, as docs/zmq-protocol.md lists them. field, value, bound: what is wrong, where it is one field.
    """

    def __init__(self, message: Mapping[str, Any]) -> None:
        super().__init__(str(message.get("message")))
        self.code = str(message.get("code"))
        self.field, self.value, self.bound = message.get("field"), message.get("value"), message.get("bound")


class Aborted(ClientError):
    """The request was aborted."""


class Lost(ClientError):
    """No sign of the server, or the connection broke while the answer was half here."""


class TooLate(ClientError, TimeoutError):
    """The request made no progress for `timeout` seconds; it has been aborted."""


@dataclass(frozen=True)
class Delta:
    """A piece of a stream.

    Attributes:
        text: new text. output_ids: its tokens. index: which choice, with n > 1.
        logprobs: SGLang's lists of the new tokens by name, where asked for.
    """

    text: str
    output_ids: list[int]
    index: int = 0
    logprobs: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Delta:
        """From a `delta`."""
        known = ("type", "id", "text", "output_ids", "index")
        rest = {name: value for name, value in message.items() if name not in known}
        return cls(message["text"], message["output_ids"], message.get("index", 0), rest)


@dataclass(frozen=True)
class Choice:
    """One finished sequence; `finish_reason` and `meta_info` are SGLang's."""

    text: str
    output_ids: list[int]
    finish_reason: dict[str, Any]
    meta_info: dict[str, Any]

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Choice:
        """From a `done`, or an entry of its choices."""
        return cls(message["text"], message["output_ids"], message["finish_reason"], message["meta_info"])


@dataclass(frozen=True)
class Result:
    """A finished request; the properties are those of the first choice."""

    choices: list[Choice]

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Result:
        """From a `done`."""
        return cls([Choice.of(entry) for entry in message.get("choices") or [message]])

    @property
    def text(self) -> str:
        """Its text."""
        return self.choices[0].text

    @property
    def output_ids(self) -> list[int]:
        """Its tokens."""
        return self.choices[0].output_ids

    @property
    def finish_reason(self) -> dict[str, Any]:
        """Why it ended."""
        return self.choices[0].finish_reason

    @property
    def meta_info(self) -> dict[str, Any]:
        """Token counts, logprobs and times, as SGLang names them."""
        return self.choices[0].meta_info
