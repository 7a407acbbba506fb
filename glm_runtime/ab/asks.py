"""What is asked of every arm: the same prompts at the same times. Pure.

asks   t=0.0 [#### prompt] 64 new   t=0.0 [##] 64 new   t=1.5 [################] 8 new   ...
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        at: seconds after the start.
        prompt: token ids, or text.
        new: tokens to produce.
        kind: what it is in the workload ("stream", "long"), for figures by kind; "" where all are alike.
        prompt_tokens: length of the prompt.
    """

    at: float
    prompt: tuple[int, ...] | str
    new: int
    kind: str = ""
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            object.__setattr__(self, "prompt_tokens", len(self.prompt))


@dataclass(frozen=True)
class Workload:
    """Asks in order of arrival.

    Attributes:
        name: as given on the command line.
        text: what it is, for the report.
        reuse: share of prompt tokens that the workload itself shares with earlier prompts; None where unknown.
    """

    name: str
    text: str
    asks: tuple[Ask, ...]
    reuse: float | None = None
    kinds: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.asks:
            raise ValueError(f"--workload {self.name}: there are no requests in it")
        object.__setattr__(self, "kinds", tuple(dict.fromkeys(ask.kind for ask in self.asks if ask.kind)))

    @property
    def fingerprint(self) -> str:
        """Equal for equal prompts, lengths and arrivals."""
        rows = [[round(ask.at, 6), ask.prompt, ask.new] for ask in self.asks]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all asks."""
        return sum(ask.prompt_tokens for ask in self.asks)


def in_order(asks: Sequence[Ask]) -> tuple[Ask, ...]:
    """In order of arrival from second 0; ties stay as they are."""
    first = min((ask.at for ask in asks), default=0.0)
    moved = [Ask(round(ask.at - first, 6), ask.prompt, ask.new, ask.kind, ask.prompt_tokens) for ask in asks]
    return tuple(sorted(moved, key=lambda ask: ask.at))
