"""What is simulated: a policy with its settings on a pool, run over a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from glm_runtime.simulate.fleet import requests_of, run_fleet
from glm_runtime.simulate.ledger_side import LedgerSide
from glm_runtime.simulate.metrics import report
from glm_runtime.simulate.replica import Overlap, Side, StepCost
from glm_runtime.simulate.shape import Plan
from glm_runtime.simulate.stock import StockConfig, StockSide
from glm_runtime.simulate.tree import PrefixTree
from glm_runtime.traces import Request
from policies.ledger.flags import LedgerFlags

POLICIES = ("sglang", "vllm-ledger")
PAGE = 64


@dataclass(frozen=True)
class Arm:
    """One simulation. `settings`: LedgerFlags with both budgets filled in for `vllm-ledger`, else StockConfig."""

    name: str
    settings: LedgerFlags | StockConfig

    def side(self, tree: PrefixTree, positions: int, topk: int, overlap: Overlap, record: bool) -> Side:
        """A scheduler over an empty pool. ValueError for settings that contradict each other."""
        if isinstance(self.settings, StockConfig):
            return StockSide(self.settings, tree, topk, record)
        seqs = self.settings.max_num_seqs
        if seqs is None:
            raise ValueError("max_num_seqs must be resolved before the simulation")
        config = self.settings.config(positions, seqs, tree.page, overlap != "off")
        return LedgerSide(config, tree, topk, seqs, self.settings.pacer(tree.page), record)

    def with_setting(self, name: str, value: Any) -> Arm:
        """The same with one setting changed. ValueError naming one that it does not have."""
        if name not in {field.name for field in fields(self.settings)}:
            raise ValueError(f"--sweep {name}: not a setting of {self.name}")
        settings: Any = self.settings
        change = {name: value}
        if isinstance(settings, LedgerFlags) and name == "max_num_batched_tokens":
            change["max_num_seqs"] = min(settings.max_num_seqs or value, value)
        return Arm(f"{self.name} {name}={value}", replace(settings, **change))


@dataclass(frozen=True)
class Machine:
    """What all arms have in common."""

    cost: StepCost
    pool_tokens: int
    positions: int
    topk: int
    overlap: Overlap
    replicas: int = 1
    router: str = "round-robin"

    @property
    def pages(self) -> int:
        """Pages of one replica's pool."""
        return self.pool_tokens // PAGE


def simulate(
    arm: Arm,
    machine: Machine,
    trace: Sequence[Request],
    on_step: Callable[[Plan, float, float], None] | None = None,
) -> dict[str, Any]:
    """Figures of one arm over the trace (see metrics.report). `on_step`: each step with its start and end.

    Raises ValueError for settings that contradict each other, RuntimeError where the line cannot move.
    """
    requests, refused = requests_of(trace, machine.positions, machine.pages * PAGE, PAGE)

    def make() -> Side:
        tree = PrefixTree(machine.pages, PAGE)
        return arm.side(tree, machine.positions, machine.topk, machine.overlap, on_step is not None)

    runs = run_fleet(requests, make, machine.cost, machine.overlap, machine.replicas, machine.router, on_step)
    return report(runs, machine.pages, len(refused))
