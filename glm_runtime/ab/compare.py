"""Do two runs answer the same, token for token? And where not: is it noise? Pure.

    tokens of A   17 4 4 9 | 23 ...        the first position that differs, and how close the call was in each run:
    tokens of B   17 4 4 9 | 61 ...            gap(A) = logprob_A(23) - logprob_A(61)

Noise is what runs of one and the same arm differ by (A/A): the largest difference of a logprob after equal tokens, and
the gaps at which such runs diverged themselves. A divergence is explained where no gap of it exceeds twice that
difference (either logit may move by it) or the largest A/A gap, or where equal arms part at that request no later.
Otherwise it is real.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """Of one request. `logprobs`: of its tokens; `top`: for each position the most likely (logprob, id)."""

    tokens: Sequence[int]
    logprobs: Sequence[float] = ()
    top: Sequence[Sequence[tuple[float, int]]] = ()
    error: str = ""


@dataclass(frozen=True)
class Divergence:
    """The first difference of two answers.

    Attributes:
        request: place in the workload.
        position: of the first differing token; the shorter length where one answer is a beginning of the other.
        a, b: the tokens there; None past the end, or where the request failed.
        gap_a, gap_b: by how much each run preferred its own token over the other's, in logprob; None where unknown.
        least_a, least_b: whether a gap is only known to be at least that: the other token was not among the top ones.
        error: text of the failure, where one run has no answer.
        explained: whether noise explains it.
    """

    request: int
    position: int
    a: int | None
    b: int | None
    gap_a: float | None = None
    gap_b: float | None = None
    least_a: bool = False
    least_b: bool = False
    error: str = ""
    explained: bool = False


@dataclass(frozen=True)
class Noise:
    """What equal arms differ by.

    Attributes:
        pairs: pairs of answers compared. tokens: positions with equal tokens before.
        logprob: largest difference of the chosen token's logprob, in nats.
        gap: largest gap at which equal arms diverged.
        divergences: how many pairs of answers diverged.
        unstable: request -> first position at which equal arms diverged.
    """

    pairs: int = 0
    tokens: int = 0
    logprob: float = 0.0
    gap: float = 0.0
    divergences: int = 0
    unstable: Mapping[int, int] = field(default_factory=dict)

    @property
    def explains(self) -> float:
        """Largest gap that noise can close, in nats."""
        return max(2 * self.logprob, self.gap)


@dataclass(frozen=True)
class Equality:
    """Two runs compared. `equal`: requests with the same tokens; `asked`: requests that either run answered."""

    a: str
    b: str
    asked: int
    equal: int
    divergences: tuple[Divergence, ...]

    @property
    def explained(self) -> int:
        """Divergences that noise explains."""
        return sum(one.explained for one in self.divergences)

    @property
    def real(self) -> int:
        """Divergences that it does not."""
        return len(self.divergences) - self.explained

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"explained": self.explained, "real": self.real}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Position of the first token that differs, None for equal sequences."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def gap(answer: Answer, position: int, other: int | None) -> tuple[float | None, bool]:
    """By how much `answer` preferred its token at `position` over `other`, and whether that is only a lower bound."""
    if position >= len(answer.tokens) or position >= len(answer.top) or other is None:
        return None, False
    top = answer.top[position]
    own = answer.logprobs[position]
    for value, token in top:
        if token == other:
            return own - value, False
    if not top:
        return None, False
    return own - min(value for value, _ in top), True


def divergence(request: int, a: Answer, b: Answer) -> Divergence | None:
    """The first difference of two answers to one request, None where they are equal."""
    if a.error or b.error:
        text = a.error if a.error == b.error else " / ".join(error or "answered" for error in (a.error, b.error))
        return Divergence(request, 0, None, None, error=text)
    place = first_difference(a.tokens, b.tokens)
    if place is None:
        return None
    x = a.tokens[place] if place < len(a.tokens) else None
    y = b.tokens[place] if place < len(b.tokens) else None
    gap_a, least_a = gap(a, place, y)
    gap_b, least_b = gap(b, place, x)
    return Divergence(request, place, x, y, gap_a, gap_b, least_a, least_b)


def noise(pairs: Iterable[tuple[Sequence[Answer], Sequence[Answer]]]) -> Noise:
    """The noise floor of pairs of runs that are of the same arm."""
    count = tokens = diverged = 0
    most = widest = 0.0
    unstable: dict[int, int] = {}
    for run_a, run_b in pairs:
        for request, (a, b) in enumerate(zip(run_a, run_b, strict=True)):
            if a.error or b.error:
                continue
            count += 1
            found = divergence(request, a, b)
            same = len(a.tokens) if found is None else found.position
            tokens += same
            differences = (abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs[:same], strict=False))
            most = max(most, max(differences, default=0.0))
            if found is not None:
                diverged += 1
                unstable[request] = min(found.position, unstable.get(request, found.position))
                widest = max(widest, *(value for value in (found.gap_a, found.gap_b, 0.0) if value is not None))
    return Noise(count, tokens, most, widest, diverged, unstable)


def compare(
    a: str, run_a: Sequence[Answer], b: str, run_b: Sequence[Answer], floor: Noise, tolerance: float = 0.0
) -> Equality:
    """Two runs of one workload.

    Args:
        a, b: their names.
        floor: noise of equal arms.
        tolerance: nats that are taken for noise in any case.
    """
    allowed = max(floor.explains, tolerance)
    found: list[Divergence] = []
    asked = equal = 0
    for request, (x, y) in enumerate(zip(run_a, run_b, strict=True)):
        if x.error and y.error:
            continue
        asked += 1
        one = divergence(request, x, y)
        if one is None:
            equal += 1
            continue
        gaps = [value for value in (one.gap_a, one.gap_b) if value is not None]
        close = len(gaps) == 2 and not (one.least_a or one.least_b) and max(gaps) <= allowed
        explained = close or (not one.error and floor.unstable.get(request, one.position + 1) <= one.position)
        found.append(Divergence(**asdict(one) | {"explained": explained}))
    return Equality(a, b, asked, equal, tuple(found))
