"""Small simulated worlds for the tests, with their books checked after every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from glm_runtime.simulate.ledger_side import LedgerSide
from glm_runtime.simulate.metrics import Metrics
from glm_runtime.simulate.replica import Overlap, Replica
from glm_runtime.simulate.req import Req
from glm_runtime.simulate.shape import Plan, Shape
from glm_runtime.simulate.stock import StockConfig, StockSide
from glm_runtime.simulate.tree import Node, PrefixTree
from glm_runtime.traces import Request
from policies.ledger import LedgerConfig

TOPK = 64


def cost(shape: Shape) -> float:
    """Seconds of a step: some of everything."""
    return 0.004 + 2e-5 * shape.prefill_rows + 1e-8 * shape.prefill_pairs + 1e-4 * shape.decode_rows


def trace(seed: int, count: int = 60, longest: int = 700, most_output: int = 60, pace: float = 0.02) -> list[Request]:
    """Requests in clusters that share prefixes of 16-token blocks."""
    chance = random.Random(seed)
    found = []
    now = 0.0
    for number in range(count):
        now += chance.expovariate(1 / pace)
        prompt = chance.randint(1, longest)
        blocks = -(-prompt // 16)
        shared = chance.randint(0, blocks)
        group = chance.randint(0, 3)
        ids = [1000 * group + i for i in range(shared)]
        ids += [1_000_000 * (seed + 1) + 1000 * number + i for i in range(shared, blocks)]
        found.append(Request(now, prompt, chance.randint(1, most_output), tuple(ids), 16))
    return found


def ledger(tree: PrefixTree, overlap: Overlap, record: bool = True, **config: object) -> LedgerSide:
    """The server's settings over a pool."""
    values: dict[str, object] = {
        "max_num_batched_tokens": 256,
        "max_num_seqs": 16,
        "max_model_len": 4097,
        "decode_first": True,
        "chunk_align": tree.page,
        "fail_unfit": True,
        "async_scheduling": overlap != "off",
    }
    made = LedgerConfig(**(values | config))  # type: ignore[arg-type]
    return LedgerSide(made, tree, TOPK, made.max_num_seqs, record=record)


def stock(tree: PrefixTree, record: bool = True, **config: object) -> StockSide:
    """SGLang's scheduler over a pool."""
    values: dict[str, object] = {"chunked_prefill_size": 256, "max_running_requests": 16}
    return StockSide(StockConfig(**(values | config)), tree, TOPK, record)  # type: ignore[arg-type]


@dataclass
class World:
    """One replica over a trace, every step kept."""

    side: LedgerSide | StockSide
    overlap: Overlap
    plans: list[Plan] = field(default_factory=list)

    def run(self, requests: list[Req]) -> Metrics:
        """Serve all of them."""
        self.metrics = Metrics()
        replica = Replica(self.side, cost, self.overlap, self.metrics, self._step)
        for req in requests:
            replica.send(req)
        replica.run()
        return self.metrics

    def _step(self, made: Plan, start: float, end: float) -> None:
        self.plans.append(made)
        assert end > start
        check(self.side.tree)


def check(tree: PrefixTree) -> None:
    """The tree's counters are what its nodes say."""
    unlocked = locked = 0
    stack: list[Node] = [*tree.root.children.values()]
    while stack:
        node = stack.pop()
        assert node.pages and node.parent is not None and node.refs >= 0
        if node.refs:
            locked += len(node.pages)
            assert node.parent.refs >= 1
        else:
            unlocked += len(node.pages)
        for first, child in node.children.items():
            assert child.pages[0] == first and child.parent is node
            stack.append(child)
    assert unlocked == tree.evictable
    assert tree.free >= 0 and tree.free + unlocked + locked <= tree.pages
