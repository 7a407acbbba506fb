"""A served prefill shared among ranks: tokens and pages (to the byte) of one rank, rows where the split puts them.

The engines: `tests/parallel/pcp.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

from parallel.balance import step_shares
from tests.parallel.pcp import ENGINES, NEW, SHORT, run

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.together("pcp")]

SHARED = [name for name in ENGINES if name != "one"]
# SGLang's own forward, which unpacked weights take, rounds elsewhere than the compiled stack of "one".
STACKED = [name for name in SHARED if ENGINES[name][1].get("cpu_weight_packing", True)]


def ranks_of(name: str) -> int:
    return int(ENGINES[name][1]["prefill_context_parallel_size"])


@pytest.mark.parametrize("name", SHARED)
def test_tokens_are_those_of_one_rank(name: str) -> None:
    one, shared = run("one"), run(name)
    for length, tokens in shared.alone.items():
        assert tokens == one.alone[length], length
    assert shared.again == shared.alone
    assert shared.hits > 1500 // 2
    assert shared.together == one.together
    assert shared.late == one.late
    assert min(shared.joined[:3]) >= 6, "decoding stood still while the late prompt was prefilled"


@pytest.mark.parametrize("name", STACKED)
def test_every_rank_holds_the_pages_of_one_rank(name: str) -> None:
    """To the byte: latent rows and index keys of all layers, prompts and generated tokens."""
    one, shared = run("one"), run(name)
    assert len(one.ranks) == 1 and len(shared.ranks) == ranks_of(name)
    for rank in shared.ranks:
        for buffer, marks in one.ranks[0].marks.items():
            assert np.array_equal(rank.marks[buffer], marks), buffer
        for buffer, marks in (one.ranks[0].longer or {}).items() if rank.longer is not None else ():
            assert np.array_equal(rank.longer[buffer], marks), buffer
    # NOTE: the last page of a prompt is not kept, so short prompts take the same slots one after another.
    filled = [np.count_nonzero(one.ranks[0].marks[buffer]) for buffer in ("latent0", "index0")]
    assert filled[0] > SHORT[-1] and filled[1] > SHORT[-1] // 64


@pytest.mark.parametrize("name", SHARED)
def test_rows_lie_where_the_split_puts_them(name: str) -> None:
    """Attention's own counters on each rank against the step record, and that against the split's arithmetic."""
    shared = run(name)
    ran = [sum(rank.rows.values()) for rank in shared.ranks]
    steps = [step for step in shared.ranks[0].steps if step["rank_rows"]]
    assert ran == np.sum([step["rank_rows"] for step in steps], axis=0).tolist()
    split = shared.report["slots"]["context_parallel"]
    prefills = [step for step in steps if step["mode"] != "decode"]
    whole = [step for step in prefills if step["prefill_tokens"] == 128 and not step["decode_rows"]]
    assert len(whole) >= 500 // 128 + 1500 // 128
    for step in whole[: 500 // 128]:
        expected = step_shares(split, [128], [0], ranks_of(name))
        assert expected is not None and step["rank_rows"] == expected.rows
    assert all(step["rank_imbalance"] >= 1.0 for step in steps)


@pytest.mark.parametrize("name", SHARED)
def test_bytes_moved_are_those_of_the_formula(name: str) -> None:
    """Per layer and shared step each rank receives (P - 1) * L rows: 576 latent values, and 128 of each index key."""
    shared, ranks = run(name), ranks_of(name)
    buffers = shared.ranks[0].marks
    latent, index = (sum(buffer.startswith(kind) for buffer in buffers) for kind in ("latent", "index"))
    row = 4 * (576 * latent + 128 * index)
    split = shared.report["slots"]["context_parallel"]
    moved = gathers = 0
    for step in shared.ranks[0].steps:
        rows = step["rank_rows"]
        total = step["prefill_tokens"] + step["decode_rows"]
        if step["mode"] == "decode" or rows == [total] * ranks:
            continue
        longest = max(rows)
        length = longest if split == "zigzag" else -(-longest // ranks) * ranks
        moved += (ranks - 1) * length * row
        gathers += latent + index
    for rank in shared.ranks:
        assert rank.traffic is not None
        assert (rank.traffic["keys_gathers"], rank.traffic["keys_bytes"]) == (gathers, moved)


def test_the_report_names_the_split() -> None:
    report = run("ledger").report
    assert report["slots"]["context_parallel"] == "head-tail"
    assert report["knobs"]["prefill_context_parallel_size"] == 2
    totals = report["knobs"]["step_totals"]
    assert len(totals["rank_rows"]) == len(totals["rank_visits"]) == 2
    assert run("two").alone[NEW] != run("two").alone[NEW + 1]
