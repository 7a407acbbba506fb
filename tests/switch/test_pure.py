"""The switch's parts that need no server: flags, messages, states, figures, and the ledger that takes over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm_runtime.cli import Options, split
from glm_runtime.config import ConfigError
from glm_runtime.live_switch import Order, Refused, order_of
from glm_runtime.prepare import request_for
from policies.ledger import Ledger, LedgerConfig, PagePool, Request
from policies.ledger.dropped import cut
from policies.ledger.flags import FlagError, check_sglang
from policies.steps import Step
from policies.switch import wire
from policies.switch.arms import Arms, percentiles
from policies.switch.flags import SwitchFlags, duration
from policies.switch.state import Switch
from policies.switch.wire import Message


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60.0), ("500ms", 0.5), ("1.5m", 90.0), ("2h", 7200.0)])
def test_durations(text: str, seconds: float) -> None:
    assert duration("--ab-alternate", text) == seconds


@pytest.mark.parametrize("text", ["60", "s", "-1s", "1 s", "1d", "99ms", "0s", ""])
def test_what_is_no_duration_names_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--ab-alternate"):
        split(["--ab-alternate", text])


def request(*argv: str) -> Any:
    return request_for(split(list(argv))[0], "cpu", 1)


def test_a_server_that_can_switch_has_the_ledgers_knobs_whoever_starts() -> None:
    stock = request("--allow-policy-switch", "--max-num-batched-tokens", "128")
    assert stock.slots["scheduler"] == "sglang"
    assert (stock.knobs["max_num_batched_tokens"], stock.knobs["allow_policy_switch"]) == (128, True)
    assert stock.knobs["ab_alternate_s"] is None
    turning = request("--policy", "vllm-ledger", "--ab-alternate", "60s")
    assert (turning.knobs["allow_policy_switch"], turning.knobs["ab_alternate_s"]) == (True, 60.0)
    assert "allow_policy_switch" not in request("--policy", "vllm-ledger").knobs
    assert Options.of({"allow_policy_switch": True}).switch.wanted


def test_what_cannot_be_together_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--scheduling-policy priority .* --allow-policy-switch"):
        request("--allow-policy-switch", "--scheduling-policy", "priority")
    with pytest.raises(ConfigError, match=r"belongs to the ledger.*--allow-policy-switch"):
        request("--max-num-batched-tokens", "128")
    with pytest.raises(FlagError, match="between sglang and ledger only"):
        SwitchFlags(allow_policy_switch=True).check("orca")
    mixing = SimpleNamespace(enable_mixed_chunk=True)
    check_sglang(mixing, "--allow-policy-switch", switchable=True)
    for flags, word in (({"chunked_prefill_size": 64}, "--chunked-prefill-size"), ({"pp_size": 2}, "--pp-size")):
        with pytest.raises(FlagError, match=f"{word}.*--allow-policy-switch"):
            check_sglang(SimpleNamespace(**flags), "--allow-policy-switch", switchable=True)
    with pytest.raises(FlagError, match="--enable-mixed-chunk"):
        check_sglang(mixing, "--scheduler ledger")


@pytest.mark.parametrize("message", [Message("to", "ledger", 30.0), Message("done"), Message("send_back")])
def test_messages_come_back_as_they_were(message: Message) -> None:
    assert wire.read(message.values()) == message


def test_messages_that_are_none() -> None:
    assert wire.read({"pp_max_micro_batch_size": 8}) is None
    for values in ({wire.PREFIX + "to.orca": 1.0}, {wire.PREFIX + "x": 1}, {wire.PREFIX + "done": 1, "other": 2}):
        with pytest.raises(ValueError, match=r"glm_runtime\.switch"):
            wire.read(values)
    for seconds in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="seconds"):
            wire.read(Message("to", "ledger", seconds).values())


def test_states() -> None:
    switch = Switch("sglang")
    assert switch.ask("sglang", 1.0) and not switch.draining
    assert switch.ask("ledger", 1e9) and switch.draining
    assert not switch.ask("sglang", 0.0), "one at a time"
    assert not switch.forced and not switch.overdue()
    switch.force()
    assert switch.forced
    switch.done()
    assert (switch.active, switch.draining, switch.forced, switch.switches["ledger"]) == ("ledger", False, False, 1)
    switch.force()
    assert not switch.forced, "a deadline that comes late means nothing"
    assert switch.ask("sglang", 0.0) and switch.forced
    turning = Switch("ledger", 1e9)
    assert not turning.ask("sglang", 1.0), "it alternates by itself"
    assert not turning.due()
    turning.alternate_s = 0.0
    assert turning.due()
    turning.turn()
    assert turning.target == "sglang" and not turning.due()


def test_arms() -> None:
    arms = Arms(("sglang", "ledger"), "sglang")
    steps = [
        ("sglang", 10, 0, 0),
        ("sglang", 0, 2, 0),
        ("sglang", 128, 0, 2),
        ("ledger", 64, 2, 0),
        ("ledger", 5, 0, 0),
    ]
    for number, (name, prefill, decode, left_out) in enumerate(steps):
        step = Step(number, 0.0, "mixed", prefill, decode, left_out=left_out, scheduler=name)
        step.ms = 1.0 + number
        arms.add(step)
    arms.change("sglang", "ledger")
    facts = arms.facts()
    assert (facts["sglang"]["steps"], facts["ledger"]["steps"]) == (3, 2)
    assert (facts["sglang"]["prefill_tokens"], facts["sglang"]["decode_rows_left_out"]) == (138, 2)
    assert facts["sglang"]["decode_gap_ms"] is None
    assert facts["ledger"]["decode_gap_ms"]["max"] >= 0, "the stream waited for the step that left it out"
    assert facts["ledger"]["step_ms"] == {"p50": 5.0, "p99": 5.0, "max": 5.0}
    assert (facts["sglang"]["turns"], facts["ledger"]["turns"]) == (1, 1)
    assert percentiles(range(1, 101)) == {"p50": 51, "p99": 100, "max": 100}


def test_bodies() -> None:
    assert order_of({"scheduler": "ledger", "deadline_s": 0}) == Order("ledger", 0.0)
    for body in (None, {"scheduler": 1}, {"scheduler": "ledger", "deadline_s": float("inf")}, {"prefill_kv": "paged"}):
        with pytest.raises(Refused):
            order_of(body)


def ledger_of(**fields: Any) -> Ledger:
    values: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 4096} | fields
    return Ledger(LedgerConfig(**values), PagePool(1000, 16))


def taken(ledger: Ledger, id: str, prompt: int, outputs: int, computed: int, half: bool = False) -> Request:
    """A request as somebody else has left it, its pages held."""
    made = Request(id, prompt, max_tokens=50)
    made.tokens += outputs
    made.computed, made.is_prefill_chunk = computed, half
    pages = -(-computed // 16)
    ledger.kv.held[made] = pages  # type: ignore[attr-defined]
    ledger.kv.free_pages -= pages  # type: ignore[attr-defined]
    made.quiet = pages * 16
    return made


def test_a_ledger_takes_over_between_two_steps() -> None:
    ledger = ledger_of()
    decode = taken(ledger, "decode", 20, 3, 22)
    half = taken(ledger, "half", 200, 0, 96, half=True)
    assert ledger.adopt([decode, half]) is None
    ledger.add(Request("new", 10))
    plan = ledger.schedule()
    assert {request.id: rows for request, rows in plan.tokens.items()} == {"decode": 1, "half": 63}
    ledger.update(plan)
    assert (decode.num_tokens, decode.num_computed_tokens, half.num_computed_tokens) == (24, 23, 159)
    while half.is_prefill_chunk:
        ledger.update(ledger.schedule())
    assert half.num_output_tokens == 1
    ledger.finish(decode)
    ledger.finish(half)
    for request in list(ledger.requests.values()):
        ledger.finish(request)
    assert ledger.kv.free_pages == 1000  # type: ignore[attr-defined]


@pytest.mark.parametrize("dropped", [False, True])
def test_a_ledger_takes_over_a_step_in_flight(dropped: bool) -> None:
    """The other side's step is folded as the oldest plan; who ends or is preempted meanwhile is as usual."""
    ledger = ledger_of(async_scheduling=True)
    stays = taken(ledger, "stays", 20, 0, 20)
    ends = taken(ledger, "ends", 30, 4, 34)
    carried = ledger.adopt([stays, ends], [stays, ends])
    assert carried is not None
    assert (stays.num_output_placeholders, stays.to_go, ends.to_go) == (1, 1, 1)
    second = ledger.schedule()
    assert {request.id: rows for request, rows in second.tokens.items()} == {"stays": 1, "ends": 1}
    if dropped:
        ledger.roster.loosen(stays)
        ledger.send_back(stays)
    ledger.update(carried, {stays: 0} if dropped else None, finished=[ends])
    assert ends.id not in ledger.requests
    assert stays.num_tokens == (20 if dropped else 21)
    ledger.update(second)
    if not dropped:
        assert (stays.num_tokens, stays.num_computed_tokens) == (22, 21)


def test_taking_over_checks_what_it_is_given() -> None:
    ledger = ledger_of()
    decode = taken(ledger, "decode", 20, 1, 20)
    with pytest.raises(ValueError, match="in flight"):
        ledger.adopt([decode], [decode])
    ledger.adopt([decode])
    with pytest.raises(ValueError, match="'decode' is in use"):
        ledger.adopt([taken(ledger, "decode", 20, 1, 20)])


def test_logprobs_of_a_preempted_request_are_cut_out() -> None:
    """Between two others: each keeps its own values."""
    reqs = [SimpleNamespace(is_retracted=gone) for gone in (False, True, False)]
    logits = SimpleNamespace(
        input_token_logprobs=torch.tensor([1.0, 1.5, 2.0, 2.5, 2.7, 3.0]), finalize_input_logprobs=lambda: None
    )
    result = SimpleNamespace(
        extend_input_len_per_req=[4, 3, 1],
        extend_logprob_start_len_per_req=[2, 0, 0],
        copy_done=None,
        logits_output=logits,
    )
    mode = SimpleNamespace(is_extend=lambda: True)
    cut(SimpleNamespace(reqs=reqs, return_logprob=True, forward_mode=mode), result)
    assert logits.input_token_logprobs.tolist() == [1.0, 1.5, 3.0]
