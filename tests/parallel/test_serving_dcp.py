"""Decode context parallel in running engines: the tokens, logprobs and cache rows of an engine without it."""

from __future__ import annotations

import pytest
import torch

from attention.layouts import unpack_latent
from parallel.dcp import local_index, owner
from parallel.dcp_merge import context_bytes, partial_bytes, query_bytes
from tests.equality.serving import Reply
from tests.parallel.dcp_engines import LONG, PAGES, SCORED, SHORT, answers

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.together("dcp")]

SHARED = [pytest.param(name, id=name) for name in ("paged", "workspace", "both")]
RANKS, LAYERS, HEADS = 2, 8, 4


def tokens(replies: list[Reply]) -> list[list[int]]:
    return [reply.tokens for reply in replies]


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("asked", ["pages", "short", "long", "again", "crowd"])
def test_tokens_are_those_of_one_cache(name: str, asked: str) -> None:
    """Lengths of 1 to 40 at once, 100 to 1,500, prefix hits, long prompts that join a decoding crowd."""
    want, got = tokens(getattr(answers("one"), asked)), tokens(getattr(answers(name), asked))
    assert len(got) == {"pages": len(PAGES), "short": len(SHORT), "long": len(LONG), "again": 5, "crowd": 10}[asked]
    assert got == want


@pytest.mark.parametrize("name", SHARED)
def test_prefixes_hit_by_whole_pages(name: str) -> None:
    found = answers(name)
    page = found.report["attention"]["shards"]["page_tokens"]
    assert page == {"paged": 64, "workspace": 128, "both": 64}[name]
    assert [reply.cached for reply in found.again] == [(n - 1) // page * page for n in LONG] + [300 // page * page] * 2


@pytest.mark.parametrize("name", ["paged", "fp8"])
def test_each_rank_holds_its_rows_of_the_whole_cache(name: str) -> None:
    """Row for row: the same requests take the same slots, and a rank has a row for each slot that it owns."""
    whole, shares = answers("fp8 one" if name == "fp8" else "one").pools[0], answers(name).pools
    run = 4 if name == "fp8" else 1
    assert len(shares) == RANKS
    for rank, share in enumerate(shares):
        for layer, rows in enumerate(whole["latent"]):
            slots = torch.arange(len(rows)).numpy()
            mine = slots[owner(slots, RANKS, run) == rank]
            want, got = rows[torch.from_numpy(mine)], share["latent"][layer]
            assert len(got) == len(want) == len(rows) // RANKS
            placed = got[torch.from_numpy(local_index(mine, RANKS, run))]
            used = (want.flatten(1) != 0).any(1)
            assert int(used.sum()) >= sum(n // 64 * 64 for n in PAGES) // RANKS  # what the prefix cache holds at least
            assert not placed[~used].any(), "a row of a slot that nobody uses was written"
            if name == "fp8":
                # Values that lie between two codes go either way, more of them in later layers; another row is 1.4 off.
                one, two = (unpack_latent(rows[used].flatten(1)) for rows in (want, placed))
                apart = (one - two).norm(dim=1) / one.norm(dim=1)
                assert float(apart.max()) < (0.1 if layer else 1e-5), f"layer {layer}: {float(apart.max())}"
            else:
                torch.testing.assert_close(placed[used], want[used], rtol=0, atol=2e-3)
        for layer, keys in enumerate(whole["index"]):
            assert share["index"][layer].shape == keys.shape, "index keys are whole on every rank"


def test_fp8_logprobs_are_those_of_one_cache() -> None:
    """Prompt and generated tokens; single bytes of the cache round to the neighbour and move some by a little."""
    gaps = []
    for one, two in zip(answers("fp8 one").scored, answers("fp8").scored, strict=True):
        gaps += [abs(a - b) for a, b in zip(one.prompt_logprobs[1:], two.prompt_logprobs[1:], strict=True)]
    assert len(gaps) == sum(SCORED) - len(SCORED)
    assert sum(gaps) / len(gaps) < 0.05, sum(gaps) / len(gaps)


@pytest.mark.parametrize("name", [*SHARED, "fp8"])
def test_memory_and_bytes_are_those_of_the_formulas(name: str) -> None:
    facts = answers(name).report["attention"]
    shards, moved = facts["shards"], facts["shards"]["received_bytes"]
    row = 656 if name == "fp8" else 2304
    assert shards["latent_bytes"] == (12288 + shards["page_tokens"]) // RANKS * row * LAYERS
    assert answers(name).report["max_total_num_tokens"] == 12288
    assert shards["merged_rows"] > 0
    # Tensor-parallel ranks have half the heads each; prefill ranks have all, and so no queries to gather.
    heads = HEADS if name == "both" else HEADS // RANKS
    assert moved["queries"] == (0 if name == "both" else query_bytes(RANKS, shards["merged_rows"], heads, 4))
    assert moved["partials"] == partial_bytes(RANKS, shards["merged_rows"], heads, 4)
    gathered = 0 if name == "paged" else facts["prefill_work"]["workspace_rows"]
    assert moved["contexts"] == context_bytes(RANKS, gathered // RANKS, 4)
    assert (gathered > 0) == (name != "paged")
