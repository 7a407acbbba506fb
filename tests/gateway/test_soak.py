"""A minute of the soak (benchmarks/soak.py has the long form: 200 clients, 5,000 requests)."""

from __future__ import annotations

import pytest

from benchmarks import soak
from tests.gateway.conftest import Live

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.together("gateway")]


def test_soak(live: Live) -> None:
    made = soak.run(live.server, live.ipc, clients=40, requests=600, seed=7, message_limit=1 << 20)
    assert made.wrong == [] and made.failed == []
    assert sum(made.counts[kind] for kind in ("ordinary", "abort", "vanish")) == 600
    assert made.counts["hostile"] > 500
    assert (made.in_flight, made.kv_lost) == (0, 0)
    assert made.growth_mb < 64
    live.server.raw("/health")
