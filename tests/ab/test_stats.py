"""Paired intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from glm_runtime.ab.slo import Slo
from glm_runtime.ab.stats import Sample, paired
from tests.ab.made import reply


@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 0.99, 1.0])
def test_quantiles_of_drawn_requests(q: float) -> None:
    rng = np.random.default_rng(3)
    groups = [list(rng.random(size)) for size in (3, 0, 1, 7, 4)]
    sample = Sample(groups)
    counts = np.array([2.0, 1.0, 0.0, 1.0, 3.0])
    drawn = [value for group, times in zip(groups, counts, strict=True) for _ in range(int(times)) for value in group]
    assert sample.quantile(q, counts) == pytest.approx(np.quantile(drawn, q))
    assert sample.mean(counts) == pytest.approx(np.mean(drawn))
    assert sample.quantile(q) == pytest.approx(np.quantile([v for group in groups for v in group], q))


def test_nothing_to_draw_from() -> None:
    empty = Sample([[], []])
    assert math.isnan(empty.quantile(0.5)) and math.isnan(empty.mean())
    assert math.isnan(Sample([[1.0], []]).quantile(0.5, np.array([0.0, 2.0])))


def test_pairing_cancels_what_requests_have_in_common() -> None:
    """Requests differ by a factor of 100; the second arm takes 0.8 of each: the interval is narrow all the same."""
    rng = np.random.default_rng(1)
    base = rng.uniform(1, 100, 60)
    one = paired(
        Sample([[v] for v in base]),
        Sample([[0.8 * v * rng.uniform(0.99, 1.01)] for v in base]),
        lambda sample, counts: sample.mean(counts),
    )
    assert one.value == pytest.approx(0.8, abs=0.01)
    assert 0.78 < one.low < one.value < one.high < 0.82 and one.clear


def test_equal_arms_leave_one_inside() -> None:
    rng = np.random.default_rng(2)
    base = rng.uniform(1, 100, 80)
    one = paired(
        Sample([[v] for v in base]),
        Sample([[v * rng.uniform(0.8, 1.25)] for v in base]),
        lambda sample, counts: sample.quantile(0.5, counts),
    )
    assert one.low <= 1 <= one.high and not one.clear


def test_unpaired_arms_are_refused_and_one_request_has_no_interval() -> None:
    mean = lambda sample, counts: sample.mean(counts)  # noqa: E731
    with pytest.raises(ValueError, match="2 requests in one arm, 1 in the other"):
        paired(Sample([[1.0], [2.0]]), Sample([[1.0]]), mean)
    one = paired(Sample([[2.0]]), Sample([[1.0]]), mean)
    assert one.value == 0.5 and math.isnan(one.low)


def test_limits() -> None:
    quick = reply(0.0, 0.02, [1] * 11)
    assert Slo(60.0, 25.0).met(quick) == {"ttft": True, "itl": True}
    assert Slo(40.0, 19.0).met(quick) == {"ttft": False, "itl": False}
    quick.error = "gone"
    assert Slo(60.0, 25.0).met(quick) == {"ttft": False, "itl": False}
    assert not Slo() and Slo(1.0)
