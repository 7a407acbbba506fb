"""The step-time model and its pacer: fit, target, floor, outliers."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.ledger import Ledger, LedgerConfig, PagePool, Request
from policies.ledger.plan import StepLoad
from policies.ledger.step_time import StepPacer, StepTime, pairs, rows_within

TRUE = (4.0, 0.05, 2e-5, 0.3, 1e-4)


def real_ms(load: StepLoad) -> float:
    """A device whose steps follow the model's form."""
    values = (1.0, load.prefill_rows, load.prefill_pairs, load.decode_rows, load.decode_context)
    return sum(c * x for c, x in zip(TRUE, values, strict=True))


@given(context=st.integers(0, 10**6), rows=st.integers(0, 300))
def test_pairs_counts_every_key(context: int, rows: int) -> None:
    assert pairs(context, rows) == sum(context + i for i in range(1, rows + 1))


@given(
    ms=st.one_of(st.floats(-5, 0), st.floats(1e-3, 500)),
    context=st.integers(0, 10**6),
    per_row=st.one_of(st.just(0.0), st.floats(1e-6, 1)),
    per_pair=st.one_of(st.just(0.0), st.floats(1e-9, 1e-3)),
    most=st.integers(0, 5000),
)
def test_rows_within_is_the_largest(ms: float, context: int, per_row: float, per_pair: float, most: int) -> None:
    def cost(n: int) -> float:
        return per_row * n + per_pair * pairs(context, n)

    n = rows_within(ms, context, per_row, per_pair, most)
    assert 0 <= n <= most
    assert n == 0 or cost(n) <= ms * (1 + 1e-6)
    if n < most:
        assert ms <= 0 or cost(n + 1) >= ms * (1 - 1e-6)


def test_learns_a_device_and_shrugs_off_pauses() -> None:
    random, model = Random(3), StepTime(memory=0.995)
    for i in range(600):
        rows, context = random.randrange(0, 600), random.randrange(0, 50_000)
        decodes = random.randrange(0, 64)
        load = StepLoad(rows, pairs(context, rows), decodes, decodes * random.randrange(100, 9000))
        pause = 12.0 if i % 40 == 5 else 1.0
        model.observe(load, real_ms(load) * pause)
    for rows, context, decodes in ((256, 0, 8), (64, 40_000, 8), (512, 20_000, 60)):
        load = StepLoad(rows, pairs(context, rows), decodes, decodes * 3000)
        assert model.predict(load) == pytest.approx(real_ms(load), rel=0.12)
    assert all(c >= 0 for c in model.coefficients)


def run(pacer: StepPacer, prompt: int, decodes: int) -> list[tuple[int, float]]:
    """A long prompt beside decodes: (prefill rows, real time) of every step until it is through."""
    config = LedgerConfig(max_num_batched_tokens=2048, max_num_seqs=decodes + 1, max_model_len=10**6, decode_first=True)
    ledger = Ledger(config, PagePool(10**5, 64), pacer)
    for i in range(decodes):
        ledger.add(Request(f"d{i}", 1000))
    while ledger.waiting or any(request.is_prefill_chunk for request in ledger.running):
        plan = ledger.schedule()
        assert plan.load is not None
        pacer.observe(plan.load, real_ms(plan.load))
        ledger.update(plan)
    long = Request("long", prompt)
    ledger.add(long)
    steps = []
    while not long.num_output_tokens:
        plan = ledger.schedule()
        assert plan.load is not None and plan.decode_rows == decodes
        ms = real_ms(plan.load)
        steps.append((plan.tokens[long], ms))
        pacer.observe(plan.load, ms)
        ledger.update(plan)
    return steps


def test_steps_stay_within_the_target_and_dear_context_gets_fewer_rows() -> None:
    pacer = StepPacer(target_step_ms=30.0, floor=16)
    steps = run(pacer, prompt=30_000, decodes=8)
    times = [ms for _, ms in steps]
    assert max(times[5:]) <= 30.0 * 1.05
    full = [rows for rows, ms in steps[5:-1]]
    assert full[-1] < full[0] / 2
    assert pacer.model.error < 0.2


def test_the_floor_bounds_the_steps_of_a_prompt_that_never_fits() -> None:
    pacer = StepPacer(target_step_ms=0.5, floor=32)
    steps = run(pacer, prompt=3200, decodes=4)
    assert len(steps) == 3200 // 32
    assert {rows for rows, _ in steps} == {32}


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match="target_step_ms"):
        StepPacer(0.0, 16)
    with pytest.raises(ValueError, match="floor"):
        StepPacer(10.0, 0)
    with pytest.raises(ValueError, match="ms"):
        StepTime().observe(StepLoad(), float("nan"))
    config = LedgerConfig(
        max_num_batched_tokens=256, max_num_seqs=4, max_model_len=512, chunk_align=64, chunk_align_strict=True
    )
    with pytest.raises(ValueError, match="floor"):
        Ledger(config, PagePool(10, 64), StepPacer(10.0, 32))
