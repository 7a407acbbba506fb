"""What a smaller cache costs: mean error of prompt logprobs against transformers in float32, in nats.

    error(model dtype, cache dtype) = mean over tokens of |logprob - logprob of transformers, float32|

| model \\ cache | auto                               | bfloat16        | fp8_e4m3 (packed 656-byte rows) |
|---------------|------------------------------------|-----------------|---------------------------------|
| float32       | zero but for single top-k flips    | stated, bounded | stated, bounded                 |
| bfloat16      | 1.2 x transformers' own at most    | equal to auto   | stated, bounded                 |

R27: every cell serves, and any other cache dtype is refused at start.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import oracle
from tests.equality.prompts import prompt
from tests.equality.serving import Ask, Serving, StartError
from tests.equality.stage import FLAGS, Stage

pytestmark = [pytest.mark.slow, pytest.mark.server]

SCORED = (100, 200, 300, 400, 500, 700)


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[list[float]]:
    """transformers' logprobs of every prompt token but the first, float32."""
    return [oracle.score(folder, prompt(length, "score")) for length in SCORED]


def mean_error(reference: list[list[float]], scored: list[list[float]]) -> float:
    """Mean absolute difference over all tokens of all prompts."""
    gaps = [abs(a - b) for r, s in zip(reference, scored, strict=True) for a, b in zip(r, s, strict=True)]
    return sum(gaps) / len(gaps)


def scores(stage: Stage, engine: str) -> list[list[float]]:
    """The engine's logprobs of the same tokens, each prompt alone."""
    replies = [stage.alone(engine, Ask(prompt(length, "score"), 1, start=0)) for length in SCORED]
    assert all(reply.prompt_logprobs[0] is None for reply in replies)
    return [[float(value) for value in reply.prompt_logprobs[1:] if value is not None] for reply in replies]


@pytest.mark.engine("bfloat16-auto")
def test_bfloat16_is_as_near_as_transformers(
    stage: Stage, folder: Path, reference: list[list[float]], record_property: pytest.RecordProperty
) -> None:
    ours = mean_error(reference, scores(stage, "bfloat16-auto"))
    theirs = mean_error(reference, [oracle.score(folder, prompt(n, "score"), "bfloat16") for n in SCORED])
    record_property("mean_error", ours)
    record_property("mean_error_transformers", theirs)
    print(f"mean logprob error, bfloat16: {ours:.5f}; transformers in bfloat16: {theirs:.5f}")
    assert ours <= 1.2 * theirs


@pytest.mark.engine("bfloat16-bfloat16")
def test_bfloat16_cache_named_is_the_automatic_one(stage: Stage) -> None:
    assert scores(stage, "bfloat16-bfloat16") == scores(stage, "bfloat16-auto")


@pytest.mark.parametrize(
    ("engine", "bound"),
    [
        pytest.param(engine, bound, marks=pytest.mark.engine(engine))
        for engine, bound in (
            ("plain", 0.001),
            ("float32-bfloat16", 0.3),
            ("float32-fp8_e4m3", 1.0),
            ("bfloat16-fp8_e4m3", 1.0),
        )
    ],
)
def test_error_of_other_cells(
    stage: Stage,
    reference: list[list[float]],
    record_property: pytest.RecordProperty,
    engine: str,
    bound: float,
) -> None:
    ours = mean_error(reference, scores(stage, engine))
    record_property("mean_error", ours)
    print(f"mean logprob error, {engine}: {ours:.5f}")
    assert ours <= bound


def test_other_cache_dtypes_are_refused() -> None:
    with pytest.raises(StartError, match=r"--kv-cache-dtype fp8_e5m2 .*auto .*bfloat16 .*fp8_e4m3"):
        Serving(**FLAGS["plain"] | {"kv_cache_dtype": "fp8_e5m2"}).close()
