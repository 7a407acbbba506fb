"""R34: users ask for prefill context parallelism together with chunked prefill and the prefix cache.

chunks of 128 and prefix hits on two ranks under the ledger; the causal work of each chunk lies within one segment
"""

from __future__ import annotations

import pytest

from tests.parallel.pcp import CHUNK, run

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.together("pcp")]


@pytest.mark.parametrize("name", ["two", "ledger"])
def test_chunks_prefix_hits_and_ranks_together(name: str) -> None:
    one, shared = run("one"), run(name)
    assert shared.alone == one.alone
    assert shared.again == one.alone
    assert shared.hits > 6000 // 2


@pytest.mark.parametrize("name", ["two", "four", "ledger"])
def test_work_of_a_chunk_is_balanced_within_one_segment(name: str) -> None:
    shared = run(name)
    ranks = len(shared.ranks)
    chunks = [s for s in shared.ranks[0].steps if s["prefill_tokens"] == CHUNK and s["decode_rows"] == 0]
    assert len(chunks) >= 1500 // CHUNK
    for step in chunks:
        assert step["rank_rows"] == [CHUNK // ranks] * ranks
        # Rows of one segment times the keys that the last row of the chunk sees, at most.
        seen = sum(step["rank_visits"]) / CHUNK + CHUNK / 2
        mean = sum(step["rank_visits"]) / ranks
        assert max(step["rank_visits"]) - mean <= CHUNK / (2 * ranks) * seen
