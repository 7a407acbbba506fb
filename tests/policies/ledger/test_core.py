"""The ledger's own options and its contract with the caller."""

from __future__ import annotations

from typing import Any

import pytest

from policies.ledger import Ledger, LedgerConfig, PagePool, Request, Status, StepPlan


def make(pages: int = 1000, page: int = 16, fast: bool = True, **fields: Any) -> Ledger:
    values: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 4096} | fields
    return Ledger(LedgerConfig(**values), PagePool(pages, page), fast=fast)


def rows(plan: StepPlan) -> dict[str, int]:
    return {request.id: count for request, count in plan.tokens.items()}


def step(ledger: Ledger) -> dict[str, int]:
    plan = ledger.schedule()
    ledger.update(plan)
    return rows(plan)


def test_a_decode_is_asked_for_kv_once_a_page() -> None:
    """Quiet decodes cost nothing: the pool hears of each request only when its page ends."""
    ledger = make(page=16)
    asked: list[str] = []
    grow = ledger.kv.grow

    def counted(request: Request, end: int, lookahead: int) -> int:
        asked.append(request.id)
        return grow(request, end, lookahead)

    ledger.kv.grow = counted  # type: ignore[method-assign]
    for i in range(8):
        ledger.add(Request(f"r{i}", 4 + i))
    for _ in range(33):
        step(ledger)
    assert {request.num_tokens for request in ledger.running} == set(range(37, 45))
    assert {id: asked.count(id) for id in asked} == {f"r{i}": 2 for i in range(8)}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("decode_first", [True, False])
def test_decode_first_serves_a_younger_decode_before_older_prefills(fast: bool, decode_first: bool) -> None:
    """Order of admission starves the decode for a step (vLLM's rule); decode_first does not."""
    ledger = make(fast=fast, decode_first=decode_first, long_prefill_token_threshold=32, num_prefill_lookahead=32)
    for id, prompt in (("old", 40), ("next", 40), ("young", 20)):
        ledger.add(Request(id, prompt))
    assert step(ledger) == {"old": 8, "next": 8, "young": 20}
    wanted = {"old": 32, "young": 1} if decode_first else {"old": 32, "next": 32}
    assert step(ledger) == wanted


def test_overlap_one_step_in_flight() -> None:
    """A decode is scheduled on the token in flight; what surely ends is not scheduled again."""
    ledger = make(async_scheduling=True)
    request = Request("r", 20, max_tokens=3)
    ledger.add(request)
    first = ledger.schedule()
    assert (request.num_computed_tokens, request.num_tokens, request.num_output_placeholders) == (20, 20, 1)
    second = ledger.schedule()
    assert rows(second) == {"r": 1} and request.num_output_placeholders == 2
    ledger.update(first)
    third = ledger.schedule()
    assert rows(third) == {"r": 1}
    ledger.update(second)
    fourth = ledger.schedule()
    assert not fourth and rows(fourth) == {}
    ledger.update(third, finished=[request])
    assert (request.num_output_tokens, request.status) == (3, Status.FINISHED)
    assert not ledger.requests


def test_overlap_result_of_a_preempted_request_counts_or_is_dropped() -> None:
    for dropped, tokens in ((False, 18), (True, 17)):
        ledger = make(pages=3, async_scheduling=True, scheduler_reserve_full_isl=False)
        old, young = Request("old", 15), Request("young", 16)
        ledger.add(old)
        ledger.add(young)
        plan = ledger.schedule()
        ledger.update(plan)
        flying = ledger.schedule()
        assert rows(flying) == {"old": 1, "young": 1}
        plan = ledger.schedule()
        assert [request.id for request in plan.preempted] == ["young"] and rows(plan) == {"old": 1}
        ledger.update(flying, {young: 0} if dropped else None)
        assert (young.num_tokens, young.num_computed_tokens, young.num_output_placeholders) == (tokens, 0, 0)
        assert old.num_tokens == 17


def test_abort_in_flight_is_final() -> None:
    ledger = make(async_scheduling=True)
    request = Request("r", 20)
    ledger.add(request)
    plan = ledger.schedule()
    assert ledger.abort("r") is request and ledger.abort("r") is None
    ledger.add(Request("r", 5))  # the id is free again
    ledger.update(plan)
    assert request.num_output_tokens == 0
    assert rows(ledger.schedule()) == {"r": 5}


def test_wrong_calls_are_named() -> None:
    ledger = make(num_spec_tokens=2)
    request = Request("r", 20)
    ledger.add(request)
    with pytest.raises(ValueError, match="'r' is in use"):
        ledger.add(Request("r", 3))
    plan = ledger.schedule()
    with pytest.raises(ValueError, match="counts: 2 tokens for 'r'"):
        ledger.update(plan, {request: 2})
    with pytest.raises(ValueError, match="counts"):
        ledger.update(plan, {Request("stranger", 3): 1})
    ledger.update(plan)
    with pytest.raises(ValueError, match="not the oldest step"):
        ledger.update(plan)
    with pytest.raises(ValueError, match="3 drafts"):
        ledger.set_drafts(request, 3)
    with pytest.raises(ValueError, match="num_prompt_tokens"):
        Request("empty", 0)


def test_unfit_requests_are_told_why() -> None:
    ledger = make(pages=10, page=16, max_model_len=400)
    assert ledger.unfit(Request("fits", 160)) is None
    assert "KV pool" in (ledger.unfit(Request("r", 161)) or "")
    assert "max_model_len" in (ledger.unfit(Request("r", 400)) or "")
    assert "chunked prefill" in (make(enable_chunked_prefill=False).unfit(Request("r", 65)) or "")


def test_pause() -> None:
    ledger = make()
    ledger.add(Request("a", 10))
    step(ledger)
    ledger.add(Request("b", 10))
    ledger.paused = "new"
    assert step(ledger) == {"a": 1}
    ledger.paused = "all"
    assert not ledger.schedule()
    ledger.paused = "none"
    assert step(ledger) == {"a": 1, "b": 10}


def test_chunks_end_on_pages() -> None:
    """Non-final chunks end on a page; without strict only where that costs at most one row in sixteen."""
    ledger = make(max_num_batched_tokens=40, max_num_seqs=4, chunk_align=16, chunk_align_strict=True)
    request = Request("r", 50)
    ledger.add(request)
    assert [step(ledger)["r"] for _ in range(3)] == [32, 18, 1]
    loose = make(max_num_batched_tokens=10, chunk_align=16)
    loose.add(Request("r", 40))
    assert [step(loose)["r"] for _ in range(5)] == [10, 10, 10, 10, 1]
    near = make(max_num_batched_tokens=50, chunk_align=16)
    near.add(Request("r", 150))
    assert [step(near)["r"] for _ in range(4)] == [48, 48, 48, 6]
    with pytest.raises(ValueError, match="chunk_align"):
        make(max_num_batched_tokens=40, max_num_seqs=32, chunk_align=16, chunk_align_strict=True)


def test_threshold_below_a_page_still_moves() -> None:
    ledger = make(chunk_align=16, chunk_align_strict=True, long_prefill_token_threshold=5, max_num_seqs=4)
    ledger.add(Request("a", 40))
    ledger.add(Request("b", 40))
    assert step(ledger) == {"a": 16, "b": 16}


def test_cap_on_partial_prefills() -> None:
    """Two may be half way; the third waits, a prompt that the step can finish does not."""
    ledger = make(max_num_partial_prefills=2, long_prefill_token_threshold=16)
    for id, prompt in (("a", 100), ("b", 100), ("c", 100), ("d", 9)):
        ledger.add(Request(id, prompt))
    plan = ledger.schedule()
    assert rows(plan) == {"a": 16, "b": 16, "d": 9}
    assert [request.id for request in ledger.waiting] == ["c"]


def test_a_held_back_prompt_is_not_looked_up_again() -> None:
    ledger = make(max_long_partial_prefills=1, long_prefill_token_threshold=16)
    looked: list[str] = []
    lookup = ledger.kv.lookup

    def counted(request: Request) -> int:
        looked.append(request.id)
        return lookup(request)

    ledger.kv.lookup = counted  # type: ignore[method-assign]
    for id in ("a", "b", "c"):
        ledger.add(Request(id, 50))
    steps = [step(ledger) for _ in range(12)]
    assert looked == ["a", "b", "c", "b", "c"]
    assert [list(rows) for rows in steps[:5]] == [["a"], ["a"], ["a"], ["a", "b"], ["a", "b"]]
    assert all(request.num_output_tokens for request in ledger.running) and len(ledger.running) == 3


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"long_prefill_token_threshold": 5000}, "long_prefill_token_threshold"),
        ({"watermark": 1.0}, "watermark"),
        ({"prefill_schedule_interval": 0}, "prefill_schedule_interval"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"max_num_partial_prefills": 1, "max_long_partial_prefills": 2}, "max_long_partial_prefills"),
        ({"draft_slots": 64}, "draft_slots"),
        ({"max_num_scheduled_tokens": True}, "max_num_scheduled_tokens"),
    ],
)
def test_bad_settings_name_the_field(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        make(**fields)


@pytest.mark.parametrize("fast", [True, False])
def test_a_tail_of_one_token_is_an_extend_row_that_runs_as_decode(fast: bool) -> None:
    """Its token is a prompt's, not a sampled one: whoever builds the batch must be told, by chunk and by prefix hit."""
    ledger = make(fast=fast)
    chunked = Request("chunked", 65)
    ledger.add(chunked)
    ledger.update(ledger.schedule())
    plan = ledger.schedule()
    assert (plan.extends, plan.chunks, plan.decode_only) == ({chunked: 1}, [], True)
    assert (plan.prefill_tokens, plan.decode_rows) == (1, 0)
    ledger.update(plan)
    plan = ledger.schedule()
    assert (rows(plan), plan.extends, plan.decode_rows) == ({"chunked": 1}, {}, 1)
    ledger.update(plan)
    ledger.kv.lookup = lambda request: request.tokens - 1  # type: ignore[method-assign]
    hit = Request("hit", 17)
    ledger.add(hit)
    plan = ledger.schedule()
    assert (plan.extends, plan.decode_only) == ({hit: 1}, True)
    assert rows(plan) == {"chunked": 1, "hit": 1}
