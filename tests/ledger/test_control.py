"""What operators and clients do to a running server: streams, sessions, pauses, flushes, loads, refusals."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.equality.prompts import prompt
from tests.ledger.cases import CROWD, FEATURES
from tests.ledger.client import Case, Reply, ask, drained, events, post, together, totals
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server]

PAGE = 64
_fresh = itertools.count()


def fresh(length: int, new: int = 16, **more: object) -> Case:
    """A prompt that no test has asked before."""
    number = next(_fresh)
    return Case(f"fresh{number}", tuple(prompt(length, f"ledger/fresh/{number}")), new, more=more)


@pytest.mark.hall("narrow")
def test_prompt_tails_of_one_token_are_decode_steps(hall: Hall) -> None:
    """vLLM's prefill_runs_as_decode: 129 tokens at a budget of 128, and 65 with 64 cached."""
    server = hall.server("narrow")
    before = totals(server)["steps"]
    long = fresh(129, 4)
    first = ask(server, long)
    steps = hall.steps("narrow", before)
    assert [(step["mode"], step["rows"]) for step in steps[:2]] == [
        ("extend", {long.name: 128}),
        ("decode", {long.name: 1}),
    ]
    before = totals(server)["steps"]
    again = Case("tail", long.ids, 4)
    assert ask(server, again).tokens == first.tokens
    steps = hall.steps("narrow", before)
    assert [step["mode"] for step in steps] == ["decode"] * len(steps)
    assert steps[0]["hits"] == {"tail": 128}
    drained(server)


@pytest.mark.hall("narrow")
def test_decodes_never_wait_for_a_prompt(hall: Hall) -> None:
    """Four streams and three long prompts: no step leaves a decode out."""
    server = hall.server("narrow")
    before = totals(server)["steps"]
    streams = [fresh(20, 60) for _ in range(4)]
    longs = [fresh(900, 4) for _ in range(3)]
    together(server, streams + longs)
    steps = hall.steps("narrow", before)
    for stream in streams:
        own = [(step["number"], step["rows"][stream.name]) for step in steps if stream.name in step["rows"]]
        # A long prompt that came first may cut this one's in two; from its last piece on it decodes.
        ends = next(i for i in range(len(own)) if sum(rows for _, rows in own[: i + 1]) >= len(stream.ids))
        own = [number for number, _ in own[ends:]]
        assert len(own) == own[-1] - own[0] + 1, f"{stream.name} sat out"
    assert sum(step["chunks"] >= 1 for step in steps) >= 3 * 900 // 128 - 3
    assert all(step["left_out"] == 0 for step in steps)
    drained(server)


@pytest.mark.hall("narrow")
def test_streams_have_no_empty_events(hall: Hall) -> None:
    """Several prompts half way at once: none of them says anything before its first token."""
    server = hall.server("narrow")
    cases = [fresh(300, 12) for _ in range(5)]
    before = totals(server)["steps"]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(cases)) as pool:
        streams = list(pool.map(lambda case: list(events(server, case)), cases))
    for found in streams:
        counts = [len(event["output_ids"]) for event in found]
        assert counts[0] >= 1
        assert counts == sorted(set(counts)) or counts[:-1] == sorted(set(counts[:-1]))
        assert counts[-1] == 12
    assert any(step["chunks"] >= 1 for step in hall.steps("narrow", before))


@pytest.mark.hall("narrow")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue(hall: Hall, expected: dict[str, Reply], mode: str) -> None:
    server = hall.server("narrow")
    cases = [case for case in CROWD if len(case.ids) < 1200]
    stood: list[int] = []

    def pause() -> None:
        start = totals(server)["steps"]
        while totals(server)["steps"] < start + 4:
            time.sleep(0.01)
        post(server, "/pause_generation", {"mode": mode})
        stood.append(totals(server)["steps"])
        time.sleep(0.4)
        stood.append(totals(server)["steps"])
        post(server, "/continue_generation", {})

    found = together(server, cases, pause)
    assert stood[1] - stood[0] <= 1, "steps ran during the pause"
    for case in cases:
        assert found[case.name].tokens == expected[case.name].tokens, case.name
    drained(server)


@pytest.mark.hall("narrow")
def test_abort_of_everything(hall: Hall) -> None:
    server = hall.server("narrow")
    cases = [fresh(n, 400) for n in (5, 70, 300, 700, 900, 1000)]

    def strike() -> None:
        start = totals(server)["steps"]
        while totals(server)["steps"] < start + 5:
            time.sleep(0.01)
        post(server, "/abort_request", {"abort_all": True, "rid": ""})

    found = together(server, cases, strike)
    assert {reply.finish["type"] for reply in found.values()} <= {"abort", "error"}
    drained(server)


@pytest.mark.hall("wide")
def test_session_continues_its_turns(hall: Hall) -> None:
    """Multi-turn: the second turn is the first one's prompt, answer and the new tokens."""
    server = hall.server("wide")
    session = post(server, "/open_session", {"capacity_of_str_len": 4096})
    first, second = prompt(90, "ledger/turn/1"), prompt(30, "ledger/turn/2")
    one = ask(server, Case("turn1", tuple(first), 16, more={"session_params": {"id": session}}))
    two = ask(server, Case("turn2", tuple(second), 16, more={"session_params": {"id": session, "rid": "turn1"}}))
    whole = ask(server, Case("turns", (*first, *one.tokens, *second), 16))
    assert len(two.tokens) == 16
    assert two.tokens == whole.tokens
    assert two.cached >= PAGE
    post(server, "/close_session", {"session_id": session})
    drained(server)


@pytest.mark.hall("wide")
def test_flush_is_refused_while_busy_and_empties_when_idle(hall: Hall) -> None:
    server = hall.server("wide")
    case = fresh(500, 8)
    ask(server, case)
    drained(server)
    post(server, "/flush_cache")
    kv = totals(server)["kv_tokens"]
    assert (kv["free"], kv["cached"]) == (kv["total"], 0)
    assert ask(server, Case("after flush", case.ids, 8)).cached == 0


@pytest.mark.hall("narrow")
def test_loads_count_half_done_prompts(hall: Hall) -> None:
    server = hall.server("narrow")
    cases = [fresh(1500, 4) for _ in range(3)]
    seen: list[tuple[int, int]] = []

    def watch() -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end and not any(running for running, _ in seen):
            for load in server.get("/v1/loads?include=all")["loads"]:
                seen.append((load["num_running_reqs"], load["num_total_tokens"]))

    together(server, cases, watch)
    assert any(running for running, _ in seen), f"nobody was seen running: {seen[-5:]}"
    drained(server)


@pytest.mark.hall("wide")
def test_beam_search_is_refused_and_the_next_request_works(hall: Hall, expected: dict[str, Reply]) -> None:
    server = hall.server("wide")
    reply = ask(server, Case("beam", tuple(prompt(20, "beam")), 8, sampling={"beam_width": 2}))
    assert "beam_width 2" in str(reply.finish)
    assert "--scheduler ledger" in str(reply.finish)
    plain = FEATURES[0]
    assert ask(server, plain).tokens == expected[plain.name].tokens


@pytest.mark.hall("wide")
def test_a_grammar_that_does_not_compile_fails_alone(hall: Hall) -> None:
    server = hall.server("wide")
    reply = ask(server, Case("bad", tuple(prompt(200, "bad")), 8, sampling={"regex": "(unclosed"}))
    assert reply.finish["type"] in ("abort", "error")
    assert len(ask(server, fresh(30, 8)).tokens) == 8
    drained(server)


@pytest.mark.hall("wide")
def test_metrics_and_log_lines(hall: Hall) -> None:
    """SGLang's own figures go on, and ours stand beside them."""
    server = hall.server("wide")
    case = fresh(400, 8)
    ask(server, case)
    ask(server, Case("again", case.ids, 8))
    drained(server)
    text = server.raw("/metrics")

    def value(name: str, label: str = "") -> float:
        lines = [line for line in text.splitlines() if line.startswith(name) and label in line]
        assert lines, f"{name} {label} is missing"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    facts = totals(server)
    assert value("glm_runtime:step_tokens_total", 'kind="prefill"') == facts["prefill_tokens"]
    assert value("glm_runtime:step_tokens_total", 'kind="decode"') == facts["decode_rows"]
    assert value("glm_runtime:steps_total") == facts["steps"]
    assert value("glm_runtime:preemptions_total") == facts["preempted"]
    assert value("sglang:realtime_tokens_total", 'mode="prefill_compute"') >= 400
    assert value("sglang:realtime_tokens_total", 'mode="prefill_cache"') >= 384
    log = server.log.read_text(errors="replace")
    assert "Prefill batch" in log
    assert "#cached-token: 384" in log
