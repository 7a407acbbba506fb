"""A ledger driven through random loads, for the tests: arrivals, aborts, sampled tokens, one or two steps in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from policies.ledger import Ledger, LedgerConfig, PagePool, Request, Status, StepPlan
from policies.ledger.blocks import BlockPool, TokenKeys
from policies.ledger.step_time import StepPacer, StepTime


@dataclass(frozen=True)
class Client:
    """One request of a load. `stop_at`: output tokens after which it stops by itself, `max_tokens` at the latest."""

    id: str
    step: int
    prompt: int
    max_tokens: int
    stop_at: int
    group: int = 0
    shared: int = 0
    priority: int = 0
    abort_step: int | None = None


@dataclass(frozen=True)
class Load:
    """Everything that two runs must have in common."""

    config: LedgerConfig
    clients: tuple[Client, ...]
    blocks: int
    block_size: int
    caching: bool = False
    paced: bool = False
    drops: bool = False  # results of a request preempted meanwhile are thrown away, as SGLang does
    seed: int = 0


def token_ids(request: Request, start: int, end: int) -> list[int]:
    """A token is what it is because of the request and its place; the shared head because of the group."""
    client: Any = request.handle
    number = int(client.id[1:])
    return [-1 - client.group * 10_000 - i if i < client.shared else number * 10_000 + i for i in range(start, end)]


@dataclass
class World:
    """One run. `record` holds a line for every step: what was decided and where everything stood afterwards."""

    load: Load
    fast: bool = True
    record: list[dict[str, Any]] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    planned: dict[Request, int] = field(default_factory=dict)  # computed tokens after the last step's rows

    def __post_init__(self) -> None:
        load = self.load
        self.pool: BlockPool | PagePool
        if load.caching:
            key = TokenKeys(load.block_size, token_ids)
            self.pool = BlockPool(load.blocks, load.block_size, key, load.config.watermark, load.config.max_model_len)
        else:
            self.pool = PagePool(load.blocks, load.block_size, load.config.watermark, load.config.max_model_len)
        self.pacer = StepPacer(20.0, 16, StepTime()) if load.paced else None
        self.ledger = Ledger(load.config, self.pool, self.pacer, fast=self.fast)
        self.outputs = {client.id: 0 for client in load.clients}
        self.ended: dict[str, str] = {}
        self.requests: dict[str, Request] = {}
        self._flying: deque[StepPlan] = deque()
        self._clock = 0

    def run(self, limit: int = 4000) -> None:
        """Until everybody has ended."""
        while len(self.ended) < len(self.load.clients):
            if self._clock >= limit:
                raise AssertionError(f"not drained after {limit} steps: {self.ledger.requests}")
            self.step()
        while self._flying:
            self._land()

    def step(self) -> StepPlan:
        """Arrivals and aborts of this step, a decision, and the result of a step before (or of this one)."""
        for client in self.load.clients:
            if client.step == self._clock:
                request = Request(
                    client.id, client.prompt, client.max_tokens, client.priority, float(client.step), handle=client
                )
                self.requests[client.id] = request
                self.ledger.add(request)
            if client.abort_step == self._clock and self.ledger.abort(client.id) is not None:
                self.ended[client.id] = "abort"
        self._clock += 1
        plan = self.ledger.schedule()
        for request, _ in plan.failed:
            self.ended[request.id] = "failed"
        self.plans.append(plan)
        self.planned = {request: request.num_computed_tokens for request in plan.tokens}
        if plan:
            self._flying.append(plan)
        while len(self._flying) > (1 if self.load.config.async_scheduling and plan else 0):
            self._land()
        self.record.append(self._state(plan))
        return plan

    def _land(self) -> None:
        """The oldest step's results come back."""
        plan = self._flying.popleft()
        counts: dict[Request, int] = {}
        finished = []
        for request in plan.tokens:
            if request in plan.chunks or request.status is Status.FINISHED:
                continue
            client: Any = request.handle
            if self.load.drops and request.status is Status.PREEMPTED:
                counts[request] = 0
                continue
            drafts = plan.drafts.get(request, 0)
            chance = Random(f"{self.load.seed}/{request.id}/{self.outputs[request.id]}")
            accepted = 0 if request in plan.admitted else chance.randint(0, drafts)
            brought = min(1 + accepted, client.stop_at - self.outputs[request.id])
            self.outputs[request.id] += brought
            if brought != 1:
                counts[request] = brought
            if self.outputs[request.id] >= client.stop_at:
                finished.append(request)
                self.ended[request.id] = "stop"
        if self.pacer is not None and plan.load is not None:
            self.pacer.observe(plan.load, 2.0 + 0.05 * plan.prefill_tokens + 0.1 * plan.decode_rows)
        self.ledger.update(plan, counts or None, finished)
        if self.load.config.num_spec_tokens:
            for request in plan.tokens:
                self.ledger.set_drafts(request, self.load.config.num_spec_tokens)

    def _state(self, plan: StepPlan) -> dict[str, Any]:
        def by_id(counts: Mapping[Request, int]) -> list[tuple[str, int]]:
            return [(request.id, count) for request, count in counts.items()]

        return {
            "tokens": by_id(plan.tokens),
            "extends": by_id(plan.extends),
            "drafts": by_id(plan.drafts),
            "chunks": [request.id for request in plan.chunks],
            "admitted": [(request.id, request.num_cached_tokens) for request in plan.admitted],
            "preempted": [request.id for request in plan.preempted],
            "failed": [request.id for request, _ in plan.failed],
            "total": plan.total_tokens,
            "load": plan.load and (plan.load.decode_rows, plan.load.decode_context, plan.load.prefill_pairs),
            "running": [request.id for request in self.ledger.running],
            "waiting": [request.id for request in self.ledger.waiting],
            "counters": {
                request.id: (request.num_computed_tokens, request.num_tokens, request.num_output_placeholders)
                for request in self.ledger.requests.values()
            },
            "free": self.free,
        }

    @property
    def free(self) -> int:
        """Blocks nobody uses."""
        return self.pool.free_blocks if isinstance(self.pool, BlockPool) else self.pool.free_pages
