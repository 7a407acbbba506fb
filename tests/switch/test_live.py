"""A running server changes its scheduler hundreds of times under load, and every answer is what it would have been.

| server  | starts as | chunk | pool   | overlap | also                                             |
|---------|-----------|-------|--------|---------|--------------------------------------------------|
| tight   | sglang    |   128 |  2,560 |   on    | preemption and retraction, aborts, streams       |
| plain   | ledger    |   128 | 16,384 |   off   | penalties, mixed chunks, --ab-alternate          |
| tp2     | ledger    |   128 |  7,168 |   on    | two ranks                                        |

float32; SGLang's strict memory checks and the ledger's comparison with SGLang's books are on. What is expected is
`sglang`'s own answer before the first switch.
"""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.equality.prompts import prompt
from tests.ledger.client import Case, Reply, drained, events, post, settled, together
from tests.ledger.hall import STRICT
from tests.servers import Server
from tests.switch.load import again, flipping, penalised_cases, plain_cases, refusal, state, switch

pytestmark = [pytest.mark.slow, pytest.mark.server]

COMMON = ("--dtype", "float32", "--allow-policy-switch", "--max-num-batched-tokens", "128", "--max-num-seqs", "24")
KEY = "switch-key"


def start(*flags: str) -> Server:
    server = Server(*COMMON, *flags, env=STRICT, small=False)
    try:
        return server.start()
    except BaseException:
        server.kill()
        raise


def assert_same(found: dict[str, Reply], expected: dict[str, Reply], cases: list[Case], within: float = 1e-5) -> None:
    """Tokens and finish equal, logprobs `within`, by the name before the wave's number."""
    for case in cases:
        ours, theirs = found[case.name], expected[case.name.rsplit("-", 1)[0]]
        assert (ours.tokens, ours.finish) == (theirs.tokens, theirs.finish), case.name
        if case.logprobs:
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=within), case.name
            assert ours.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=within), case.name


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("switch") / "steps.jsonl"


@pytest.fixture(scope="module")
def plain(log: Path) -> Iterator[Server]:
    server = start(
        *("--policy", "vllm-ledger", "--max-total-tokens", "16384", "--disable-overlap-schedule", "--enable-metrics"),
        *("--enable-mixed-chunk", "--step-log", str(log)),
    )
    yield server
    server.stop()


@pytest.fixture(scope="module")
def expected(plain: Server) -> dict[str, Reply]:
    """What `sglang` answers; asked before anything is switched under load."""
    switch(plain, scheduler="sglang")
    found = together(plain, [*plain_cases(), *penalised_cases()])
    assert not any(reply.finish["type"] in ("error", "abort") for reply in found.values())
    return found


@pytest.fixture(scope="module")
def tight(expected: dict[str, Reply]) -> Iterator[Server]:
    server = start("--policy", "sglang", "--max-total-tokens", "2560")
    yield server
    server.stop()


def test_idle_switches(plain: Server) -> None:
    """Nobody is there: it is done at once, the report follows, and the same again changes nothing."""
    before = state(plain)
    assert plain.get("/policy")["slots"]["scheduler"] == before["active"] == "ledger"
    answer = switch(plain, scheduler="sglang")
    assert answer["changed"]
    assert answer["switch"]["last"]["to"] == "sglang"
    report = plain.get("/policy")
    assert report["slots"]["scheduler"] == report["implementations"]["scheduler"]["name"] == "sglang"
    assert not switch(plain, scheduler="sglang")["changed"]
    assert switch(plain, scheduler="ledger", wait=False)["scheduler"] == "ledger"
    end = time.monotonic() + 10
    while state(plain)["state"] != "idle" and time.monotonic() < end:
        time.sleep(0.01)
    after = state(plain)
    assert (after["active"], after["switches"]) == ("ledger", before["switches"] + 2)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"scheduler": "orca"}, 400, ("scheduler", "'orca'", "sglang, ledger")),
        ({}, 400, ("scheduler", "None")),
        ({"scheduler": "ledger", "indexer": "qchunk"}, 400, ("indexer", "restart with --indexer qchunk")),
        ({"policy": "sglang"}, 400, ("policy", "only its scheduler")),
        ({"scheduler": "ledger", "deadline_s": -1}, 400, ("deadline_s", "-1")),
        ({"scheduler": "ledger", "wait": "no"}, 400, ("wait", "'no'")),
        ({"scheduler": "ledger", "when": 1}, 400, ("when", "unknown")),
        (["ledger"], 400, ("JSON object",)),
    ],
)
def test_bad_bodies(plain: Server, body: Any, status: int, words: tuple[str, ...]) -> None:
    found, text = refusal(plain, body)
    assert found == status
    assert all(word in text for word in words), text


def test_plain_without_overlap(plain: Server, expected: dict[str, Reply], log: Path) -> None:
    """Penalties and mixed chunks too; afterwards both arms have figures, and every step says whose it was."""
    first = state(plain)["switches"]
    changes = wave = 0
    while wave < 2 or (changes < 100 and wave < 6):
        wave += 1
        cases = again([*plain_cases(), *penalised_cases()], wave)
        post(plain, "/flush_cache")
        with flipping(plain, wave) as flipper:
            assert_same(together(plain, cases), expected, cases)
        changes += flipper.changes
    drained(plain)
    facts = settled(plain)  # the health check of `drained` is a request too
    after = state(plain)
    assert after["switches"] - first == changes >= 100
    arms = after["arms"]
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [step["number"] for step in steps] == list(range(1, len(steps) + 1))
    for name, arm in arms.items():
        own = [step for step in steps if step["scheduler"] == name]
        assert arm["steps"] == len(own)
        assert arm["prefill_tokens"] == sum(step["prefill_tokens"] for step in own) > 0
        assert arm["decode_rows"] == sum(step["decode_rows"] for step in own) > 0
        assert arm["step_ms"]["p50"] <= arm["step_ms"]["p99"] <= arm["step_ms"]["max"]
        assert arm["decode_gap_ms"]["max"] > 0
    assert facts["steps"] == len(steps)
    text = plain.raw("/metrics")

    def value(name: str, scheduler: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(name) and f'scheduler="{scheduler}"' in line]
        assert lines, f"{name} of {scheduler} is missing"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    for name, arm in arms.items():
        assert value("glm_runtime:steps_total", name) == arm["steps"]
        assert value("glm_runtime:policy_switches_total", name) == after["switches_to"][name]


def test_a_second_switch_waits_its_turn_and_the_deadline_ends_the_first(plain: Server) -> None:
    """Prompts stand half way: the switch drains, another one is refused, and its deadline sends them back."""
    switch(plain, scheduler="ledger")
    cases = [Case(f"half{i}", tuple(prompt(1500, f"switch/half/{i}")), 4) for i in range(4)]
    asked = ThreadPoolExecutor(4)
    replies = [asked.submit(together, plain, [case]) for case in cases]
    end = time.monotonic() + 20
    while not any(step["chunks"] for step in plain.get("/steps?last=1")["steps"]) and time.monotonic() < end:
        time.sleep(0.01)
    before = state(plain)
    started = switch(plain, scheduler="sglang", deadline_s=30, wait=False)
    assert started["changed"]
    if started["switch"]["state"] == "draining":
        assert plain.get("/policy")["slots"]["scheduler"] == "ledger"
        status, text = refusal(plain, {"scheduler": "ledger"})
        assert (status, "under way" in text) == (409, True)
    found = {name: reply for future in replies for name, reply in future.result().items()}
    assert all(len(reply.tokens) == 4 for reply in found.values())
    assert state(plain)["switches"] == before["switches"] + 1
    solo = together(plain, [Case("solo", cases[3].ids, 4)])["solo"]
    assert found["half3"].tokens == solo.tokens
    drained(plain)


def test_tight_pool_with_overlap(tight: Server, expected: dict[str, Reply]) -> None:
    """More KV wanted than there is: the ledger preempts, SGLang retracts, and each resumes what the other began."""
    changes = wave = 0
    while wave < 2 or (changes < 200 and wave < 8):
        wave += 1
        cases = again(plain_cases(), wave)
        with flipping(tight, wave) as flipper:
            assert_same(together(tight, cases), expected, cases)
        changes += flipper.changes
        drained(tight)
    facts = state(tight)
    assert facts["switches"] == changes >= 200
    assert facts["arms"]["ledger"]["preempted"] + facts["arms"]["sglang"]["preempted"] > 0
    assert facts["prompts_sent_back"] > 0


def test_tight_aborts(tight: Server, expected: dict[str, Reply]) -> None:
    """Aborted wherever they are, on either side; the others do not notice."""
    draw = random.Random(7)
    cases = again(plain_cases(), 9)
    victims = draw.sample([case.name for case in cases], 12)

    def strike() -> None:
        for victim in victims:
            time.sleep(draw.uniform(0.0, 0.25))
            post(tight, "/abort_request", {"rid": victim})

    with flipping(tight, 5):
        found = together(tight, cases, strike)
    assert_same(found, expected, [case for case in cases if case.name not in victims])
    for victim in victims:
        reply, whole = found[victim], expected[victim.rsplit("-", 1)[0]]
        assert reply.tokens == whole.tokens[: len(reply.tokens)], victim
    drained(tight)


def test_tight_streams(tight: Server, expected: dict[str, Reply]) -> None:
    """No token is lost or sent twice. An event may bring none, after a preemption or a hand-over."""
    cases = again([case for case in plain_cases() if case.name.startswith(("plain", "shared"))], 11)
    with flipping(tight, 3), ThreadPoolExecutor(len(cases)) as pool:
        streams = list(pool.map(lambda case: list(events(tight, case)), cases))
    for case, found in zip(cases, streams, strict=True):
        counts = [len(event["output_ids"]) for event in found]
        assert counts[0] >= 1, case.name
        assert counts == sorted(counts), case.name
        assert found[-1]["output_ids"] == expected[case.name.rsplit("-", 1)[0]].tokens, case.name
    drained(tight)


def test_two_ranks_alternate_by_themselves(expected: dict[str, Reply]) -> None:
    """--ab-alternate alone allows it; both ranks change at the same step; a key guards the endpoint."""
    flags = ("--policy", "vllm-ledger", "--tp-size", "2", "--max-total-tokens", "7168", "--ab-alternate", "200ms")
    server = Server(
        *(flag for flag in COMMON if flag != "--allow-policy-switch"),
        *flags,
        *("--admin-api-key", KEY),
        env=STRICT,
        small=False,
    )
    with server:
        cases = again([case for case in plain_cases() if len(case.ids) <= 300 and case.new <= 40], 1)
        # Two ranks add their halves up in another order than one.
        assert_same(together(server, cases), expected, cases, within=1e-3)
        drained(server)
        facts = state(server)
        assert facts["switches"] >= 10
        assert facts["alternate_s"] == 0.2
        assert all(arm["steps"] and arm["turns"] > 1 for arm in facts["arms"].values())
        assert refusal_of_key(server, None) == 401
        assert refusal_of_key(server, KEY) == 409


def refusal_of_key(server: Server, key: str | None) -> int:
    """Status of a POST /policy with this key."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(server.url + "/policy", b'{"scheduler": "sglang"}', headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    return refused.value.code
