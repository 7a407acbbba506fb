"""Every combination of scheduler, indexer and prefill-KV slot gives the tokens of transformers, float32.

Per engine: one prompt alone, prompts of 1 to 6,000 tokens at once, the same again (prefix hits), and long prompts that
join decoding ones. The stock combination (sglang, ragged, paged) is in `tests/equality`, the context-parallel slot with
more than one rank in `tests/parallel`. In bfloat16 with an fp8 cache the stock slots' tokens and logprobs are the
measure, also for two prefill ranks.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.equality.prompts import LENGTHS, NEW, crowd, prompt
from tests.equality.serving import Ask, Reply
from tests.slots.engines import ENGINES, STEPS, Engines

pytestmark = [pytest.mark.slow, pytest.mark.server]

FLOAT32 = [name for name, flags in ENGINES.items() if flags["dtype"] == "float32"]
PAGE = 64
TOPK = 64  # index_topk of the embedded model


def on(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slots(name)) for name in names]


def compared(*names: str) -> list[Any]:
    """Engines whose replies are held against each other: one worker runs them."""
    both = {name: (pytest.mark.slots(name), pytest.mark.together("slots-compared")) for name in names}
    return [pytest.param(name, marks=marks) for name, marks in both.items()]


@pytest.mark.parametrize("name", on(*FLOAT32))
def test_tokens(engines: Engines, expected: dict[int, list[int]], name: str) -> None:
    running = engines.get(name)
    assert running.alone(Ask(prompt(500), NEW)).tokens == expected[500]
    running.fresh()
    asks = [Ask(prompt(length), NEW) for length in LENGTHS]
    assert {n: r.tokens for n, r in zip(LENGTHS, running.together(asks), strict=True)} == expected
    again = running.together(asks)
    assert {n: r.tokens for n, r in zip(LENGTHS, again, strict=True)} == expected
    assert sum(reply.cached for reply in again) > 6000 // 2


@pytest.mark.parametrize("name", on("both", "mixed", "vllm-ledger", "tp2"))
def test_long_prompts_join_decoding_ones(engines: Engines, expected: dict[int, list[int]], name: str) -> None:
    early = [n for n in LENGTHS if n < 1000]
    late = [n for n in LENGTHS if n >= 1000]
    asks = [Ask(prompt(n), NEW) for n in early] + [Ask(prompt(n), NEW, after=(0, 4)) for n in late]
    replies = engines.get(name).together(asks)
    assert {n: r.tokens for n, r in zip(early + late, replies, strict=True)} == expected


@pytest.mark.parametrize("name", on(*FLOAT32))
def test_the_engine_says_what_it_runs_and_did(engines: Engines, name: str) -> None:
    """Slots, buffers within their caps, and that each slot really took the rows it is for."""
    running = engines.get(name)
    before = running.report()["knobs"]["attention"]
    running.together([Ask(prompt(40, "short"), 4), Ask(prompt(1500, "long"), 4)])
    report = running.report()
    flags, after = ENGINES[name], report["knobs"]["attention"]
    rows = {kind: after["rows"][kind] - before["rows"][kind] for kind in ("dense", "sparse")}
    assert rows["dense"] >= 40 + 3 and rows["sparse"] >= 1500 - TOPK
    ledger = flags.get("policy") == "vllm-ledger"
    indexer = "qchunk" if ledger else flags.get("indexer", "ragged")
    prefill = "workspace" if ledger else flags.get("prefill_kv", "paged")
    assert (report["slots"]["indexer"], report["slots"]["prefill_kv"]) == (indexer, prefill)
    assert ("indexer_logits_bytes" in after, "prefill_workspace_bytes" in after) == (
        indexer == "qchunk",
        prefill == "workspace",
    )
    if indexer == "qchunk":
        assert after["indexer_logits_bytes"] <= flags.get("sparse_indexer_max_logits_mb", 64) << 20
        done = {kind: after["indexer_rows"][kind] - before["indexer_rows"][kind] for kind in after["indexer_rows"]}
        assert done["gathered"] >= 1500 - TOPK
        assert done["sharded"] == (done["gathered"] if name == "tp2" else 0)
        assert after["indexer_work"]["gathers"] > before["indexer_work"]["gathers"]
    if prefill == "workspace":
        factor = flags.get("sparse_mla_prefill_workspace_factor", 5)
        assert after["prefill_workspace_rows"] == min(factor * 8192, 12288 + PAGE)
        assert after["prefill_workspace_bytes"] == after["prefill_workspace_rows"] * 576 * 4
        assert after["prefill_rows"]["gathered"] - before["prefill_rows"]["gathered"] >= 1500 - TOPK


@pytest.mark.parametrize("name", on("vllm-ledger"))
def test_the_step_record_tells_dense_rows(engines: Engines, name: str) -> None:
    """A prompt of 40 and its 3 decoding rows never leave the branch; of one of 100 in one step no row takes it."""
    running = engines.get(name)
    past = len(STEPS.read_text().splitlines())
    before = running.report()["knobs"]["attention"]["rows"]
    running.alone(Ask(prompt(40, "steps"), 4))
    running.alone(Ask(prompt(100, "steps"), 4))
    after = running.report()["knobs"]["attention"]["rows"]
    steps = [json.loads(line) for line in STEPS.read_text().splitlines()[past:]]
    assert [step["dense_rows"] for step in steps] == [40, 1, 1, 1, 0, 0, 0, 0]
    assert {kind: after[kind] - before[kind] for kind in after} == {"dense": 43, "sparse": 103}


KEPT: dict[str, list[Reply]] = {}


@pytest.mark.parametrize("name", compared("fp8-stock", "fp8", "fp8-pcp2"))
def test_fp8_cache_equals_the_stock_slots_to_the_bit(engines: Engines, name: str) -> None:
    """Tokens and logprobs of eight at once and of long prompts; the fp8 rows are up-converted, the keys quantised."""
    asks = [Ask(ids, NEW, start=0) for ids in crowd()] + [Ask(prompt(n), NEW, start=0) for n in (500, 1500, 6000)]
    KEPT[name] = engines.get(name).together(asks)
    if name != "fp8-stock":
        for ask, ours, stock in zip(asks, KEPT[name], KEPT["fp8-stock"], strict=True):
            assert ours.tokens == stock.tokens, len(ask.ids)
            assert ours.logprobs == stock.logprobs, len(ask.ids)
            assert ours.prompt_logprobs == stock.prompt_logprobs, len(ask.ids)
