"""The load that runs while a server's scheduler changes under it, and the one who changes it.

cases()            some forty requests: prompts of 1 to 1,500 tokens, shared heads, logprobs, grammars; penalties apart
Flipper            changes the scheduler again and again until it is told to stop
"""

from __future__ import annotations

import json
import random
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.equality.prompts import prompt
from tests.ledger.cases import SCHEMA
from tests.ledger.client import Case
from tests.servers import Server

LENGTHS = (1, 2, 15, 63, 64, 65, 100, 127, 128, 129, 192, 257, 300, 400, 640, 900, 1200, 1500)


def plain_cases() -> list[Case]:
    """Greedy requests whose answer does not depend on who stood beside them."""
    made = [Case(f"plain{n}", tuple(prompt(n, f"switch/{n}")), 40) for n in LENGTHS]
    head = prompt(256, "switch/head")
    made += [Case(f"shared{i}", (*head, *prompt(20 + 30 * i, f"switch/tail/{i}")), 40) for i in range(5)]
    made += [Case(f"long{i}", tuple(prompt(30 + i, f"switch/long/{i}")), 120) for i in range(4)]
    made += [Case(f"scored{n}", tuple(prompt(n, f"switch/scored/{n}")), 24, logprobs=True) for n in (40, 130, 300)]

    def asked(name: str, length: int, new: int, **sampling: object) -> Case:
        return Case(name, tuple(prompt(length, f"switch/{name}")), new, sampling=sampling)

    return [
        *made,
        asked("regex", 20, 40, regex=r"[0-9]{3}-[a-f]{8}-[A-Z]{10}", ignore_eos=False),
        asked("json", 90, 60, json_schema=json.dumps(SCHEMA), ignore_eos=False),
        asked("stop", 30, 60, stop=["e", "a"]),
        asked("none", 70, 0),
    ]


def penalised_cases() -> list[Case]:
    """Penalties and a minimum length: the same in every order only without the overlap schedule (ledger/cases.py)."""
    kinds: dict[str, dict[str, object]] = {
        "frequency": {"frequency_penalty": 0.7},
        "presence": {"presence_penalty": 1.1, "repetition_penalty": 1.2},
        "least": {"min_new_tokens": 40, "ignore_eos": False, "presence_penalty": 0.2},
    }
    return [
        Case(f"{name}{n}", tuple(prompt(n, f"switch/{name}/{n}")), 60, sampling=sampling)
        for name, sampling in kinds.items()
        for n in (20, 150)
    ]


def again(cases: list[Case], wave: int) -> list[Case]:
    """The same requests under new ids, in another order."""
    made = [Case(f"{case.name}-{wave}", case.ids, case.new, case.logprobs, case.sampling, case.more) for case in cases]
    random.Random(wave).shuffle(made)
    return made


def switch(server: Server, **body: Any) -> dict[str, Any]:
    """POST /policy."""
    answer: dict[str, Any] = server.post("/policy", body)
    return answer


def refusal(server: Server, body: Any) -> tuple[int, str]:
    """Status and message of a POST /policy that is refused."""
    try:
        server.post("/policy", body)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]
    raise AssertionError(f"{body} was not refused")


def state(server: Server) -> dict[str, Any]:
    """The switch's facts."""
    return dict(server.get("/policy")["switch"])


class Flipper(threading.Thread):
    """Changes the scheduler as fast as the server does it, each time with one of `deadlines`."""

    def __init__(self, server: Server, seed: int, deadlines: tuple[float, ...]) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.changes = 0
        self.failure: Exception | None = None
        self._draw = random.Random(seed)
        self._deadlines = deadlines
        self._stop_asked = threading.Event()

    def run(self) -> None:
        try:
            active = state(self.server)["active"]
            while not self._stop_asked.is_set():
                wanted = "ledger" if active == "sglang" else "sglang"
                answer = switch(self.server, scheduler=wanted, deadline_s=self._draw.choice(self._deadlines))
                assert answer["changed"] and answer["switch"]["active"] == wanted, answer
                active = wanted
                self.changes += 1
                self._stop_asked.wait(self._draw.choice((0.0, 0.0, 0.02, 0.1)))
        except Exception as error:
            self.failure = error

    def end(self) -> None:
        """Stop and wait; raises what it met."""
        self._stop_asked.set()
        self.join(60)
        if self.failure is not None:
            raise self.failure


@contextmanager
def flipping(server: Server, seed: int, deadlines: tuple[float, ...] = (0.0, 0.05, 30.0)) -> Iterator[Flipper]:
    """The scheduler changes all the while."""
    flipper = Flipper(server, seed, deadlines)
    flipper.start()
    try:
        yield flipper
    finally:
        flipper.end()
