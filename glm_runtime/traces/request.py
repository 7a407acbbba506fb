"""One line of a trace, and the error that names one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class TraceError(ValueError):
    """A trace that cannot be used; one line naming the file, and the row where there is one."""

    def __init__(self, path: object, line: int | None, text: str) -> None:
        super().__init__(f"{path}:{line}: {text}" if line else f"{path}: {text}")


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a trace.

    Attributes:
        arrival_s: seconds after the start of the trace.
        prompt_tokens, output_tokens: at least 1 each.
        block_ids: names of the prompt's blocks of `block_size` tokens, from its start. An equal name stands for an
            equal block after equal blocks. The last block may be a part of one; blocks may be missing at the end, and
            such tokens are nobody else's.
        block_size: tokens a block; 0 where the trace knows no blocks.
        rid: its name in the trace, if it had one.
        text: the prompt's text, if it was recorded.

    Raises:
        ValueError: naming the field.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_size: int = 0
    rid: str | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_s < 1e12:
            raise ValueError(f"arrival {self.arrival_s} s is no time after the start")
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        if self.block_ids:
            if self.block_size < 1:
                raise ValueError("blocks are named, but block_size is not")
            most = -(-self.prompt_tokens // self.block_size)
            if len(self.block_ids) > most:
                raise ValueError(
                    f"{len(self.block_ids)} blocks of {self.block_size} tokens are named, "
                    f"a prompt of {self.prompt_tokens} has {most}"
                )


def by_arrival(requests: Iterable[Request]) -> list[Request]:
    """In order of arrival; ties stay as they are."""
    return sorted(requests, key=_arrival)


def _arrival(request: Request) -> float:
    return request.arrival_s
