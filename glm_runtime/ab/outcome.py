"""Everything that a comparison found, computed once for table, page and files.

runs ─> noise (same arm, different rounds) ─> equality of each arm with the first
     ─> figures and ratios, settings, the run of each arm that is drawn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from glm_runtime.ab import compare, figures, settings
from glm_runtime.ab.asks import Workload
from glm_runtime.ab.compare import Equality, Noise
from glm_runtime.ab.runs import Run, by_arm
from glm_runtime.ab.settings import Setting
from glm_runtime.ab.slo import Slo
from glm_runtime.ab.stats import Ratio


@dataclass(frozen=True)
class Outcome:
    """What was found.

    Attributes:
        workload: what was asked.
        runs: arm -> its rounds; the first arm is what the others are held against.
        noise: what equal arms differed by. repeated: whether any arm ran more than once.
        equalities: each run of another arm against the first arm's first round.
        figures: arm -> figures over all rounds. each: arm -> figures of each round.
        kinds: arm -> kind of request -> figures.
        ratios: arm -> statistic -> arm over the first arm, without the first arm.
        settings: of all arms.
        slo: limits of goodput. machine: where it ran. command: how to run it again.
    """

    workload: Workload
    runs: dict[str, list[Run]]
    noise: Noise
    repeated: bool
    equalities: tuple[Equality, ...]
    figures: dict[str, dict[str, Any]]
    each: dict[str, list[dict[str, Any]]]
    kinds: dict[str, dict[str, dict[str, float]]]
    ratios: dict[str, dict[str, Ratio]]
    settings: list[Setting]
    slo: Slo
    machine: dict[str, Any]
    command: str

    @property
    def arms(self) -> list[str]:
        """Names of the arms."""
        return list(self.runs)

    @property
    def real(self) -> int:
        """Answers that differ for no other reason than the arm."""
        return sum(one.real for one in self.equalities)

    @property
    def failed(self) -> int:
        """Requests without an answer, over all runs."""
        return sum(bool(reply.error) for runs in self.runs.values() for run in runs for reply in run.replies)

    @property
    def first_error(self) -> str:
        """Why the first request without an answer had none."""
        replies = (reply for runs in self.runs.values() for run in runs for reply in run.replies)
        return next((reply.error for reply in replies if reply.error), "")


def outcome(
    runs: Sequence[Run],
    workload: Workload,
    tokenizer: Any,
    slo: Slo,
    tolerance: float,
    machine: dict[str, Any],
    command: str,
    seed: int = 0,
) -> Outcome:
    """Work everything out. The first arm of `runs` is the base."""
    arms = by_arm(runs)
    base = next(iter(arms.values()))
    pairs = [pair for group in _alike(arms) for pair in combinations(group, 2)]
    floor = compare.noise((a.answers, b.answers) for a, b in pairs)
    first = base[0]
    equalities = tuple(
        compare.compare(first.name, first.answers, run.name, run.answers, floor, tolerance)
        for run in runs
        if sorted(run.flags) != sorted(first.flags)
    )
    others = list(arms.items())[1:]
    return Outcome(
        workload=workload,
        runs=arms,
        noise=floor,
        repeated=bool(pairs),
        equalities=equalities,
        figures={name: figures.figures(own, workload.asks, tokenizer, slo) for name, own in arms.items()},
        each={
            name: [figures.figures([run], workload.asks, tokenizer, slo) for run in own] for name, own in arms.items()
        },
        kinds={name: figures.by_kind(own, workload.asks) for name, own in arms.items()},
        ratios={name: figures.ratios(base, own, seed) for name, own in others},
        settings=settings.table([own[-1].policy for own in arms.values()], [own[-1].server for own in arms.values()]),
        slo=slo,
        machine=machine,
        command=command,
    )


def _alike(arms: dict[str, list[Run]]) -> list[list[Run]]:
    """Runs with the same flags: rounds of one arm, and arms that were given twice under two names (A/A)."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for own in arms.values():
        for run in own:
            groups.setdefault(tuple(sorted(run.flags)), []).append(run)
    return [group for group in groups.values() if len(group) > 1]
