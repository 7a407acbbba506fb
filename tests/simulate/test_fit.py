"""Fitted step costs: known ones come back, from a log as a server writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm_runtime.simulate.fit import NAMES, Fitted, LogError, features, fit, logged, read_log
from glm_runtime.simulate.fleet import requests_of
from glm_runtime.simulate.shape import Shape
from glm_runtime.simulate.tree import PrefixTree
from tests.simulate.worlds import TOPK, World, ledger, stock, trace

KNOWN = (0.004, 2e-5, 1e-8, 1e-4, 0.0, 0.0)


def records(made: World) -> list[dict[str, object]]:
    """Step records of a simulated run, in which steps take what KNOWN says."""
    at, found = 10.0, []
    admitted: set[int] = set()
    for plan in made.plans:
        seconds = sum(c * x for c, x in zip(KNOWN, features(plan.shape), strict=True))
        rows = {str(index): count for index, count in plan.rows.items()}
        new = {index for index in plan.rows if index not in admitted}
        admitted |= new
        found.append(
            {
                "number": plan.number,
                "at": at,
                "ms": 1e3 * (seconds - 0.0005),
                "mode": plan.mode,
                "rows": rows,
                "hits": {},
                "prefill_tokens": plan.shape.prefill_rows,
                "decode_rows": plan.shape.decode_rows,
            }
        )
        at += seconds
    return found


@pytest.mark.parametrize("make", [ledger, stock])
def test_known_costs_come_back(make: object, tmp_path: Path) -> None:
    tree = PrefixTree(400, 64)
    side = ledger(tree, "off") if make is ledger else stock(tree)
    lines = [line.__class__(line.arrival_s, line.prompt_tokens, line.output_tokens) for line in trace(2)]
    world = World(side, "off")
    world.run(requests_of(lines, 4096, 400 * 64, 64)[0])
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(step) + "\n" for step in records(world)))
    steps = read_log(path, TOPK)
    for plan, step in zip(world.plans, steps, strict=True):  # the work is read back as it was
        assert features(step.shape) == features(plan.shape)
        assert (step.shape.chosen, step.shape.contexts) == (plan.shape.chosen, plan.shape.contexts)
    found = fit(steps)
    assert found.error < 1e-3 and min(found.coefficients) >= 0
    assert found.coefficients[:4] == pytest.approx(KNOWN[:4], rel=0.02)


def test_a_pause_of_the_machine_does_not_count() -> None:
    tree = PrefixTree(400, 64)
    world = World(ledger(tree, "off"), "off")
    lines = [line.__class__(line.arrival_s, line.prompt_tokens, line.output_tokens) for line in trace(2)]
    world.run(requests_of(lines, 4096, 400 * 64, 64)[0])
    steps = records(world)
    for step in steps[20:]:
        step["at"] += 5.0  # type: ignore[operator]
    steps[19]["ms"] += 5000.0  # type: ignore[operator]
    assert fit(logged(steps, TOPK)).coefficients[:4] == pytest.approx(KNOWN[:4], rel=0.05)


def test_costs_are_never_negative() -> None:
    steps = []
    for i in range(1, 40):
        shape = Shape()
        shape.add_prompt(0, i, TOPK)
        steps.append(_logged(i, 0.1 - 0.001 * i, shape))
    found = fit(steps)
    assert isinstance(found, Fitted) and min(found.coefficients) == 0.0 and len(found.coefficients) == len(NAMES)


def _logged(number: int, seconds: float, shape: Shape) -> object:
    from glm_runtime.simulate.fit import Logged

    return Logged(number, 0.0, seconds, shape, "extend", {}, {})


@pytest.mark.parametrize(("text", "what"), [("{", ":1:"), ("[]", ":1:"), ('{"rows": {}, "at": 1}', ":1:")])
def test_a_bad_line_is_named(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "log"
    path.write_text(text + "\n")
    with pytest.raises(LogError, match=what):
        read_log(path, TOPK)
    with pytest.raises(LogError, match="No such file"):
        read_log(tmp_path / "none", TOPK)
    with pytest.raises(ValueError, match="too short"):
        fit([])
