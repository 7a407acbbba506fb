"""Threads of each rank and the cores they are bound to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_runtime.cli import Options
from glm_runtime.config import ConfigError
from glm_runtime.prepare import resolve_threads
from glm_runtime.threads import binding, threads_per_rank, usable_cores


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (8, 1, 7), (8, 2, 3), (9, 2, 4), (64, 8, 7)]
)
def test_one_core_is_left_to_the_front(cores: int, ranks: int, threads: int) -> None:
    assert threads_per_rank(cores, ranks) == threads


@pytest.mark.parametrize(("cores", "ranks"), [(0, 1), (1, 0), (-1, 1)])
def test_nonsense_is_refused(cores: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        threads_per_rank(cores, ranks)


@given(st.integers(1, 128), st.integers(1, 16))
def test_binding_names_usable_cores_for_every_rank(cores: int, ranks: int) -> None:
    ids = list(range(100, 100 + cores))
    threads = threads_per_rank(cores, ranks)
    groups = [[int(core) for core in group.split(",")] for group in binding(ids, ranks, threads).split("|")]
    assert len(groups) == ranks
    assert all(set(group) <= set(ids) and len(set(group)) == len(group) for group in groups)
    if ranks * threads <= cores:
        taken = [core for group in groups for core in group]
        assert len(set(taken)) == ranks * threads


def test_the_drawing() -> None:
    assert binding(list(range(8)), 2, 3) == "0,1,2|3,4,5"
    assert binding([4, 6], 2, 1) == "4|6"
    assert binding([4], 2, 1) == "4|4"


def test_order_of_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert resolve_threads(Options(cpu_threads=3), 1) == 3
    assert resolve_threads(Options(), 1) == 5
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert resolve_threads(Options(), 1) == threads_per_rank(len(usable_cores()), 1)
    for bad in ("0", "-2", "all", "1.5"):
        monkeypatch.setenv("OMP_NUM_THREADS", bad)
        with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
            resolve_threads(Options(), 1)
