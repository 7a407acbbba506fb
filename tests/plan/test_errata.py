"""The corrected figures of the prefill facts' section 10, each by the planner or by the function that it calls.

The numbers of the tests are those of the table's rows. Rows about vLLM's structures, or without a figure, have none
here: 17, 27, 36, 37, 38, 45, 46, 47.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attention.indexer.metadata import chunk_metadata
from attention.indexer.split import count_launches, legal_logits_bytes, split_chunks, workspace_bytes, workspace_rows
from attention.workspace import gather_bytes, plan_groups
from attention.workspace import workspace_bytes as latent_bytes
from attention.workspace import workspace_rows as latent_rows
from glm_runtime.plan.chunks import index_rows, layer_chunks, step_chunks
from glm_runtime.plan.cost import attend_flop, index_flop
from glm_runtime.plan.devices import GPUS
from glm_runtime.plan.ranks import Shares, prefill_shares, scoring_shares, shard_least_rows
from glm_runtime.plan.setup import Setup
from glm_runtime.plan.shapes import PlanError, model
from glm_runtime.plan.size import size
from glm_runtime.plan.timeline import Step, Timeline, timeline
from glm_runtime.plan.traffic import dispatch_bytes, ring_bytes, step_traffic, uses_all_to_all
from parallel.balance import halves_visits, imbalance
from parallel.head_tail import head_tail, shards_decode
from parallel.limits import Sizes, check_sizes
from parallel.row_shard import VLLM_MIN_ROWS, exchange_bytes
from parallel.tables import gather_bytes as all_gather_bytes
from policies.ledger import Ledger, LedgerConfig, PagePool, Request
from policies.ledger.budgets import prefill_threshold
from policies.ledger.flags import LedgerFlags

MILLION = 1 << 20
CHUNK = 16384


def million(**change: Any) -> Setup:
    """GLM-5.3 on eight H200, a prompt of 1,048,576 tokens in steps of 16,384."""
    ledger = LedgerFlags(max_num_batched_tokens=CHUNK, max_num_seqs=256)
    base = Setup(
        model("glm-5.3"), GPUS["H200"], 8, Sizes(tp=8), context=MILLION, ledger=ledger, kv="fp8_e4m3", workspace=False
    )
    return replace(base, **change)


@pytest.fixture(scope="module")
def steps() -> Timeline:
    return timeline(million())


def chunk(number: int, rows: int = CHUNK) -> Step:
    """The number-th chunk, counted from 1."""
    return Step(number, (number - 1) * rows, rows, 0, 0)


def test_row_1_chunks_of_the_whole_prompt(steps: Timeline) -> None:
    assert layer_chunks(million(), steps.prefill) == 4217
    assert 4217 * million().model.full_layers == 88_557
    some = {c: step_chunks(million(), steps.prefill[c - 1]).chunks for c in (1, 2, 3, 4, 8, 16, 32, 63, 64)}
    assert list(some.values()) == [2, 4, 7, 8, 16, 32, 64, 127, 128]
    halved = million(ledger=LedgerFlags(max_num_batched_tokens=8192, max_num_seqs=256))
    # The same sum of slices by another cut: chunks of 8,192 rows need half the slices, twice as often.
    assert layer_chunks(halved, timeline(halved).prefill) == 4217


def test_row_2_the_last_step_alone(steps: Timeline) -> None:
    last = step_chunks(million(), steps.prefill[-1]).chunks
    assert last * million().model.full_layers == 128 * 21 == 2688 < 88_557
    decimal = Step(0, 1_000_000 - CHUNK, CHUNK, 0, 0)
    assert step_chunks(million(), decimal).chunks * 21 == 123 * 21 == 2583


def test_row_3_rows_at_once(steps: Timeline) -> None:
    exact = step_chunks(million(), steps.prefill[-1])
    assert (exact.rows_at_once, exact.chunks) == (128, 128)
    decimal = step_chunks(million(), Step(0, 1_000_000 - CHUNK, CHUNK, 0, 0))
    assert (decimal.rows_at_once, decimal.chunks) == (134, 123)


def test_row_4_two_workspaces_of_unlike_rows_and_like_bytes() -> None:
    assert index_rows(million()) == 16 * MILLION == 16_777_216
    assert latent_rows(MILLION) == 2 * MILLION == 2_097_152
    assert workspace_bytes(index_rows(million())) / 2**30 == pytest.approx(2.06, abs=0.005)
    assert latent_bytes(latent_rows(MILLION)) / 2**30 == pytest.approx(2.25, abs=0.005)


def test_row_5_one_entry_a_key() -> None:
    made = chunk_metadata(split_chunks([700, 300], [4, 2], 10_000, 1 << 20), [700, 300], [4, 2])
    assert made[0] is not None and len(made[0].group.token_to_seq) == 1000 != 6


def test_row_6_row_shard_is_off_by_vllms_default_and_on_by_the_cost_rule(steps: Timeline) -> None:
    from attention.flags import AttentionFlags

    vllm = million(attention=AttentionFlags(indexer_tp_shard_min_rows=VLLM_MIN_ROWS))
    assert VLLM_MIN_ROWS == 65_536
    last = steps.prefill[-1]
    assert scoring_shares(vllm, last).visits == (last.visits,) * 8
    least, why = shard_least_rows(million(), last)
    assert least is not None and least < CHUNK and why == "cost rule"
    assert max(scoring_shares(million(), last).visits) < last.visits / 7


def test_row_7_work_of_the_indexer(steps: Timeline) -> None:
    visits = sum(step.visits for step in steps.prefill)
    flop = index_flop(million(), visits) * 21
    assert flop / 1e15 == pytest.approx(94.6, abs=0.05)
    assert flop / 300e12 == pytest.approx(315, abs=0.5)
    assert flop / 300e12 / 8 == pytest.approx(39, abs=0.5)


def test_row_8_one_piece() -> None:
    piece = index_flop(million(), 134_000_000)
    assert piece / 1e12 == pytest.approx(1.098, abs=0.001)
    assert [round(piece / rate * 1e3) for rate in (60e12, 30e12)] == [18, 37]
    layer = [123 * piece / rate for rate in (60e12, 30e12)]
    assert layer == pytest.approx([2.25, 4.5], abs=0.01)


def test_row_9_where_the_work_lies(steps: Timeline) -> None:
    late = sum(step.visits for step in steps.prefill[32:])
    assert late / sum(step.visits for step in steps.prefill) == pytest.approx(0.75, abs=0.001)
    last = steps.prefill[-1]
    assert last.end / last.start - 1 == pytest.approx(0.016, abs=0.0005)
    shares = scoring_shares(million(), last)
    assert (shares.rows[0], shares.rows[-1]) == (2062, 2034)
    assert scoring_shares(million(), chunk(1)).rows == (5792, 2399, 1841, 1553, 1367, 1236, 1137, 1059)


def test_row_10_the_step_table(steps: Timeline) -> None:
    assert [step.number for step in steps.prefill] == list(range(1, 65))
    assert (steps.prefill[62].start, steps.prefill[63].start) == (1_015_808, 1_032_192)
    assert steps.prefill[63].rows == CHUNK and steps.first_decode == 65


def test_row_11_the_step_after_the_prompt_is_a_plain_decode() -> None:
    ledger = Ledger(million().ledger_config(), PagePool(MILLION // 64 + 2, 64))
    prompt = Request("prompt", MILLION)
    ledger.add(prompt)
    for _ in range(64):
        ledger.update(ledger.schedule())
    plan = ledger.schedule()
    assert plan.total_tokens == 1 and plan.decode_rows == 1 and not plan.extends


def test_row_12_a_prompt_as_long_as_the_model_is_refused() -> None:
    refused = million().refused
    assert refused is not None and "1,048,576" in refused
    with pytest.raises(PlanError, match="--context 1048576 leaves no room"):
        million(max_model_len=MILLION)
    assert million(context=MILLION - 1).refused is None


def running(**config: Any) -> tuple[Ledger, list[Request]]:
    """A prompt of 100 half way, behind it a decode; 16 tokens a step."""
    defaults: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "max_model_len": 4096}
    ledger = Ledger(LedgerConfig(**(defaults | config)), PagePool(64, 16))
    line = [Request("prompt", 100), Request("decode", 1)]
    ledger.add(line[0])
    ledger.update(ledger.schedule())
    ledger.roster.enter(line[1])  # a full hit admitted behind it
    ledger.requests[line[1].id] = line[1]
    line[1].status = line[0].status
    line[1].tokens, line[1].computed = 2, 1
    ledger.kv.admit(line[1], 0, 2, 0, 0, False)
    return ledger, line


def test_row_13_order_of_admission_may_starve_a_decode() -> None:
    for first, rows in ((False, 0), (True, 1)):
        ledger, (_, decode) = running(decode_first=first)
        assert ledger.schedule().tokens.get(decode, 0) == rows


def test_row_14_the_threshold_spares_the_only_request() -> None:
    config = LedgerConfig(256, 8, 4096, long_prefill_token_threshold=64)
    assert (prefill_threshold(config, 1), prefill_threshold(config, 2)) == (0, 64)
    # It compares what is left: a prompt above it with 40 tokens to go takes all 40.
    ledger = Ledger(config, PagePool(64, 16))
    prompt, other = Request("prompt", 104), Request("other", 4)
    ledger.add(prompt)
    ledger.add(other)
    assert [plan_rows(ledger, prompt) for _ in range(2)] == [64, 40]


def plan_rows(ledger: Ledger, request: Request) -> int:
    plan = ledger.schedule()
    ledger.update(plan)
    return plan.tokens.get(request, 0)


def test_row_15_draft_slots_are_charged_a_request() -> None:
    ledger = Ledger(LedgerConfig(20, 8, 4096, draft_slots=2), PagePool(64, 16))
    requests = [Request(f"r{i}", 8) for i in range(3)]
    for request in requests:
        ledger.add(request)
    # 20 = (8 + 2) + (8 + 2); the third finds nothing left. Charged once a step it would get 2 rows.
    assert list(ledger.schedule().tokens.values()) == [8, 8]


def test_row_16_waiting_requests_preempt_nobody() -> None:
    ledger = Ledger(LedgerConfig(64, 8, 4096), PagePool(4, 16))
    first, second = Request("first", 33), Request("second", 40)
    ledger.add(first)
    ledger.update(ledger.schedule())
    ledger.add(second)  # 3 pages for all of it, 1 is free: admission asks for the whole prompt
    plan = ledger.schedule()
    assert not plan.preempted and second not in plan.tokens and len(ledger.waiting) == 1


def test_row_18_hits_are_whole_pages() -> None:
    found = timeline(million(cached=100_000))
    assert (found.hit, MILLION - found.hit) == (99_968, 948_608)
    assert found.prefill[0].start == 99_968


def test_row_19_rows_and_pages() -> None:
    packed = million(kv="fp8_e4m3")
    assert packed.latent_row == 656 and 64 * packed.latent_row == 41_984
    assert million(device=GPUS["B200"]).latent_row == 576 and 64 * 576 == 36_864
    assert 64 * million().index_row == 8448


def test_rows_20_to_22_who_reads_pages() -> None:
    """bf16 pages in place, fp8 with 8 heads a rank in place, with 32 through the workspace, on B200 in place."""
    one = Sizes(tp=2, dp=4)
    assert million(kv="bfloat16", workspace=True).reads == ("pages", "bfloat16 rows need no up-conversion")
    few = million(workspace=True).reads
    assert few[0] == "pages" and "8 heads a rank" in few[1]
    assert million(sizes=one, workspace=True).gathers
    assert not million(sizes=one, workspace=True, device=GPUS["B200"]).gathers
    assert size(million(workspace=True)).prefill_buffer == 0 < size(million(sizes=one, workspace=True)).prefill_buffer


def test_row_23_a_gather_reads_each_context_row_once() -> None:
    read, written = gather_bytes(MILLION, million(kv="fp8_e4m3").latent_row)
    assert (read / 1e9, written / 1e9) == pytest.approx((0.69, 1.21), abs=0.005)
    assert (read + written) / GPUS["H200"].bandwidth * 1e3 == pytest.approx(0.4, abs=0.01)
    kernel = CHUNK * million().model["index_topk"] * million(kv="bfloat16").latent_row
    assert kernel / 1e9 == pytest.approx(38.7, abs=0.05)


def test_rows_24_and_25_the_workspace_holds_two_whole_contexts() -> None:
    rows = latent_rows(MILLION)
    assert [group.rows for group in plan_groups([MILLION, MILLION], rows)] == [rows]
    assert plan_groups([500_000, 500_000], rows)[0].rows == pytest.approx(rows / 2, rel=0.05)
    with pytest.raises(ValueError, match="context"):
        plan_groups([rows + 1], rows)
    # A chunk of 16,384 rows behind a hit: its whole context counts.
    found = timeline(million(cached=100_000)).prefill[0]
    assert found.end == 99_968 + CHUNK


def test_row_26_a_model_of_131072_positions() -> None:
    short = million(model=model("glm-5.3"), max_model_len=131_072, context=131_071)
    assert index_rows(short) == 5_242_880 and latent_rows(131_072) == 655_360


def test_row_28_tables_of_seven_tokens_on_two_ranks() -> None:
    layout = head_tail([7], [0], [True], 2)
    tables = layout.tables()
    assert layout.rank_rows.tolist() == [3, 4]
    assert tables.hidden_restore_idx.tolist() == [0, 1, 4, 5, 6, 7, 2]
    assert tables.padded_gather_idx.tolist() == [0, 1, 6, 0, 2, 3, 4, 5]
    assert tables.gathered_kv_write_mask.astype(int).tolist() == [1, 1, 1, 0, 1, 1, 1, 1]


def test_row_29_short_prefills_are_cut_without_dcp() -> None:
    assert head_tail([3], [0], [True], 4, dcp_size=1).rank_rows.tolist() == [1, 1, 1, 0]
    assert head_tail([3], [0], [True], 4, dcp_size=4).replicated.tolist() == [True]


def test_row_30_decodes_are_dealt_out_without_dcp() -> None:
    assert shards_decode(4, 1) and not shards_decode(4, 4) and not shards_decode(1, 1)


def test_row_31_and_44_bytes_of_a_prefill_context_step() -> None:
    four = million(sizes=Sizes(tp=2, pcp=4))
    moved = step_traffic(four, chunk(64))
    rows = CHUNK // 4
    # What a rank puts in; it receives three times as much.
    assert rows * 1152 / 1e6 == pytest.approx(4.7, abs=0.05)
    assert moved.latent / 3 / 1e6 == pytest.approx(368, abs=0.5)
    assert moved.index_keys / 3 / 1e6 == pytest.approx(22, abs=0.1)
    hidden = CHUNK * 6144 * 2
    assert moved.hidden == all_gather_bytes(rows, 4, 6144 * 2) == hidden * 3 // 4
    assert moved.hidden / 450e9 * 1e3 == pytest.approx(0.3, abs=0.05)


def test_row_32_two_of_2p_segments_are_one_part_of_p() -> None:
    layout = head_tail([1024], [0], [True], 4)
    assert layout.rank_rows.tolist() == [256] * 4


def test_row_33_plain_parts_against_head_tail() -> None:
    fresh = halves_visits([MILLION], [MILLION], 4)
    assert fresh.sum() / fresh.max() == pytest.approx(16 / 7, rel=1e-5)
    late = halves_visits([MILLION], [CHUNK], 4)
    assert late.sum() / late.max() == pytest.approx(4, rel=0.01)
    sparse = halves_visits([MILLION], [CHUNK], 4, 2048)
    assert imbalance(sparse) == 1.0
    shares = prefill_shares(million(sizes=Sizes(tp=2, pcp=4)), chunk(64))
    assert shares.imbalance == pytest.approx(1.0, abs=1e-4) and isinstance(shares, Shares)


def test_row_34_pcp_multiplies_the_ranks() -> None:
    assert Sizes(tp=8, pcp=4).world == 32
    with pytest.raises(PlanError, match="make 32 ranks"):
        million(sizes=Sizes(tp=8, pcp=4))


@pytest.mark.parametrize(("dcp", "fits"), [(1, True), (4, True), (8, True), (2, False)])
def test_row_35_decode_ranks_beside_prefill_ranks(dcp: int, fits: bool) -> None:
    sizes = Sizes(tp=2, pcp=4, dcp=dcp)
    if fits:
        check_sizes(sizes)
    else:
        with pytest.raises(ValueError, match="choose one of 1, 4, 8"):
            check_sizes(sizes)


def test_rows_39_and_40_reads_and_writes_of_a_chunk() -> None:
    read = CHUNK * 2048 * million(device=GPUS["B200"]).latent_row * 78  # rows of 576 B, as the table has them
    assert read / 1e12 == pytest.approx(1.5, abs=0.01)
    assert 64 * read / 1e12 == pytest.approx(97, abs=0.6)
    assert read / GPUS["H200"].bandwidth == pytest.approx(0.31, abs=0.005)
    written = CHUNK * million(device=GPUS["B200"]).latent_row * 78
    assert written / 1e6 == pytest.approx(736, abs=0.5)
    assert 64 * written / 1e9 == pytest.approx(47, abs=0.2)


def test_row_41_two_reduces_a_layer() -> None:
    moved = step_traffic(million(), chunk(64)).reduce
    assert moved == 2 * 78 * ring_bytes(CHUNK, 6144, 8)
    assert moved / 1e9 == pytest.approx(55, abs=0.1)
    assert ring_bytes(CHUNK, 6144, 8) / 1e6 == pytest.approx(352, abs=0.5)
    assert step_traffic(million(sizes=Sizes(tp=2, pcp=4)), chunk(64)).hidden * 4 / 3e6 == pytest.approx(201, abs=0.5)
    assert 64 * moved / 2 / 1e12 == pytest.approx(1.8, abs=0.05)  # one a layer, for the whole prompt (row 39)


def test_row_42_dispatch_and_combine() -> None:
    sent = [dispatch_bytes(CHUNK, 8, 6144, width) * 75 / 1e9 for width in (1, 2)]
    assert sent == pytest.approx([60.4, 121], abs=0.3)
    assert 64 * sent[0] / 1e3 == pytest.approx(3.9, abs=0.05)


def test_row_43_exchange_of_ids() -> None:
    own, rest = exchange_bytes(CHUNK, 2048, [2048] * 8, 0)
    assert (own / 1e6, rest / 1e6, (own + rest) / 1e6) == pytest.approx((16.8, 117, 134), abs=0.5)
    moved = step_traffic(million(), chunk(64)).topk / 21
    assert moved / 1e6 == pytest.approx(117, abs=1)


def test_row_48_no_all_to_all_in_one_group() -> None:
    assert not uses_all_to_all(million(ep=8))
    assert step_traffic(million(ep=8), chunk(64)).dispatch == 0
    assert uses_all_to_all(million(sizes=Sizes(tp=2, pcp=4), ep=8))
    assert uses_all_to_all(million(sizes=Sizes(tp=4, dp=2), ep=8))


def test_row_49_what_was_right() -> None:
    setup = million()
    logits = legal_logits_bytes(CHUNK, 1_000_000, 1 << 40)
    assert logits / 1e9 == pytest.approx(65.5, abs=0.1)
    own, rest = exchange_bytes(CHUNK, setup.model["index_topk"], [CHUNK], 0)
    assert (own + rest) / 4 / 1e6 == pytest.approx(33.6, abs=0.1)
    assert setup.model["q_lora_rank"] + setup.model.latent_values == 2624
    assert setup.model["num_attention_heads"] * (setup.model["qk_nope_head_dim"] + 64) == 16384
    chosen = int(np.minimum(np.arange(1, MILLION + 1), 2048).sum())
    assert attend_flop(setup, chosen, 64) * 78 / 1e15 == pytest.approx(23.3, abs=0.05)
    for budget, count in ((8192, 128), (4096, 256)):
        smaller = million(ledger=LedgerFlags(max_num_batched_tokens=budget, max_num_seqs=256))
        assert len(timeline(smaller).prefill) == count
    assert count_launches(split_chunks([MILLION], [1], workspace_rows(MILLION), 512 << 20)) == 1


def test_the_cap_binds_and_the_pool_does_not_hold_it(steps: Timeline) -> None:
    assert {step_chunks(million(), step).binds for step in steps.prefill} == {"logits"}
    assert size(million(kv="bfloat16")).capacity < MILLION < size(million()).capacity * 2
