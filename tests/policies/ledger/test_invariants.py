"""What must hold for every load: budgets, KV books, conserved tokens, bounded waiting, and the clock's exactness."""

from __future__ import annotations

import os
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings

from policies.ledger import LedgerConfig, Request, Status
from policies.ledger.blocks import BlockPool
from policies.ledger.budgets import PAGE_LOSS
from tests.policies.ledger.loads import loads
from tests.policies.ledger.world import Client, Load, World

EXAMPLES = int(os.environ.get("GLM_RUNTIME_EXAMPLES", "60"))
common = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@common
@given(load=loads(num_spec_tokens=0))
def test_fast_is_plain(load: Load) -> None:
    """Leaving steady decodes to the clock changes no decision and no counter."""
    plain, fast = World(load, fast=False), World(load)
    plain.run()
    fast.run()
    for step, (wanted, seen) in enumerate(zip(plain.record, fast.record, strict=True)):
        assert seen == wanted, step


@common
@given(load=loads())
def test_everybody_ends_with_all_tokens(load: Load) -> None:
    """No load hangs; preemption loses and doubles no token; the pool is whole afterwards."""
    world = World(load)
    world.run()
    for client in load.clients:
        request = world.requests[client.id]
        assert request.status is Status.FINISHED
        assert request.num_tokens == client.prompt + world.outputs[client.id]
        if world.ended[client.id] == "stop":
            assert world.outputs[client.id] == client.stop_at
    assert world.free == load.blocks
    assert not world.ledger.running and not len(world.ledger.waiting) and not world.ledger.roster.loose
    assert world.ledger.roster.steady.count == world.ledger.roster.steady.context == 0


@common
@given(load=loads())
def test_every_step_keeps_the_books(load: Load) -> None:
    """Budgets hold, admissions skip a step that preempted, and every page is free or held by somebody running."""
    world, config = World(load), load.config
    while len(world.ended) < len(load.clients):
        plan = world.step()
        assert plan.total_tokens == sum(plan.tokens.values()) <= config.token_budget
        assert plan.total_tokens + config.draft_slots * len(plan.tokens) <= config.max_num_batched_tokens
        assert all(rows > 0 for rows in plan.tokens.values())
        assert len(world.ledger.running) <= config.active_seqs
        assert not (plan.preempted and plan.admitted)
        assert plan.prefill_tokens == sum(plan.extends.values())
        assert sum(request.is_prefill_chunk for request in plan.tokens) >= sum(
            request.status is Status.RUNNING for request in plan.chunks
        )
        for request in plan.chunks:
            beyond, took = world.planned[request] % config.chunk_align, plan.tokens[request]
            assert beyond == 0 or (not config.chunk_align_strict and beyond * PAGE_LOSS > took)
        for request in world.ledger.running:
            assert request.num_computed_tokens <= request.num_tokens_with_spec + config.num_spec_tokens
        _check_pages(world)


def _check_pages(world: World) -> None:
    pool, config = world.pool, world.load.config
    size = world.load.block_size
    running = list(world.ledger.running)
    if isinstance(pool, BlockPool):
        tables = {request: pool._table[request] for request in running}
        assert set(pool._table) == set(running)
        used = {block for table in tables.values() for block in table}
        assert len(used) + pool.free_blocks == pool.blocks
        for block in range(pool.blocks):
            assert pool._users[block] == sum(table.count(block) for table in tables.values())
        held = {request: len(table) for request, table in tables.items()}
    else:
        assert set(pool.held) == set(running)
        assert sum(pool.held.values()) + pool.free_pages == pool.pages
        held = dict(pool.held)
    for request in running:
        most = min(request.num_computed_tokens + 2 * config.num_spec_tokens + 1, config.max_model_len)
        assert -(-request.num_computed_tokens // size) <= held[request] <= -(-(most + size) // size)


@common
@given(load=loads())
def test_nobody_is_left_out_or_visited_twice(load: Load) -> None:
    """A running decode without rows has a reason: the budgets, a preemption, its model's or its own end."""
    world, config = World(load), load.config
    while len(world.ended) < len(load.clients):
        before: dict[Request, bool] = {
            request: request.is_prefill_chunk
            or request.num_tokens_with_spec - request.num_computed_tokens > 1 + request.spec
            for request in world.ledger.running
        }
        started = {request: request.num_computed_tokens for request in before}
        ending = {
            request
            for request in before
            if request.num_output_placeholders
            and request.num_computed_tokens + 2 - request.num_output_placeholders
            >= request.num_prompt_tokens + request.max_tokens
        }
        plan = world.step()
        assert len(set(plan.preempted)) == len(plan.preempted)
        spent = plan.total_tokens + config.draft_slots * (len(plan.tokens) + 1)
        full = plan.total_tokens >= config.token_budget or spent >= config.max_num_batched_tokens
        for request, prefill in before.items():
            ended = request.status is not Status.RUNNING
            if request not in plan.tokens and not ended and not prefill and request not in ending:
                assert full or plan.preempted or started[request] >= config.max_model_len - 1


@common
@given(load=loads(decode_first=True, fail_unfit=True))
def test_decodes_never_wait_under_decode_first(load: Load) -> None:
    """The stated bound is zero steps: a running decode gets its row whenever the budget reaches all decodes."""
    world, config = World(load), load.config
    row = 1 + config.num_spec_tokens
    while len(world.ended) < len(load.clients):
        decodes = [
            request
            for request in world.ledger.running
            if not request.is_prefill_chunk
            and request.num_tokens + request.num_output_placeholders - request.num_computed_tokens == 1
            and not (request.num_output_placeholders and world.outputs[request.id] + 1 >= request.max_tokens)
        ]
        plan = world.step()
        tokens, charged = len(decodes) * row, len(decodes) * (row + config.draft_slots)
        if tokens <= config.token_budget and charged <= config.max_num_batched_tokens and not plan.preempted:
            for request in decodes:
                assert request in plan.tokens or request.status is Status.FINISHED


def test_a_short_prompt_overtakes_a_long_one() -> None:
    """With a cap on long prefills a short prompt waits neither for the long one before it nor for the next."""
    config = LedgerConfig(
        max_num_batched_tokens=64, max_num_seqs=8, max_model_len=20_000, max_long_partial_prefills=1, decode_first=True
    )
    clients = (
        Client("r0", 0, 6400, 1, 1),
        Client("r1", 1, 6400, 1, 1),
        Client("r2", 2, 30, 3, 3),
        Client("r3", 3, 60, 3, 3),
    )
    world = World(Load(config, clients, 2000, 16))
    ended: dict[str, int] = {}
    for step in range(400):
        plan = world.step()
        assert sum(request.num_prompt_tokens > 64 for request in plan.chunks) <= 1
        for id in world.ended:
            ended.setdefault(id, step)
        if len(ended) == 4:
            break
    assert ended["r2"] <= 6 and ended["r3"] <= 8
    assert ended["r0"] < ended["r1"] <= 2 * 6400 // 64 + 12


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_fast_is_plain_in_a_crowd(seed: int, overlap: bool) -> None:
    """Eighty requests over a pool for a dozen of them: steady decodes, long prompts and preemptions at once."""
    random = Random(seed)
    config = LedgerConfig(
        max_num_batched_tokens=random.choice([96, 256]),
        max_num_seqs=64,
        max_model_len=512,
        long_prefill_token_threshold=random.choice([0, 40]),
        scheduling_policy=random.choice(["fcfs", "priority"]),
        scheduler_reserve_full_isl=random.random() < 0.5,
        decode_first=random.random() < 0.5,
        max_long_partial_prefills=random.choice([0, 2]),
        chunk_align=16,
        async_scheduling=overlap,
    )
    clients = []
    for i in range(80):
        tokens = random.randint(1, 120)
        prompt = random.choice([random.randint(1, 40), random.randint(100, 380)])
        abort = random.randint(5, 300) if random.random() < 0.1 else None
        clients.append(
            Client(
                f"r{i}",
                random.randint(0, 60),
                prompt,
                tokens,
                stop_at=random.choice([tokens, random.randint(1, tokens)]),
                group=random.randint(0, 2),
                shared=random.choice([0, prompt // 2]),
                priority=random.randint(0, 3),
                abort_step=abort,
            )
        )
    load = Load(config, tuple(clients), blocks=150, block_size=16, caching=seed % 2 == 0, drops=overlap, seed=seed)
    plain, fast = World(load, fast=False), World(load)
    plain.run()
    fast.run()
    assert fast.record == plain.record
    assert sum(len(plan.preempted) for plan in plain.plans) > 0
    assert any(len(plan.tokens) > 2 * len(plan.singles) > 0 for plan in fast.plans)  # most rows were the clock's
