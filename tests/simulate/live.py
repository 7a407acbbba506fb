"""A live server and the simulator on the same requests.

batch 1 ──────────────► steps 1, 2, ... n | batch 2 ──► n+1, ...      each batch reaches the scheduler as one message
step record ─► arrival step of batch 2 ─► the simulated scheduler gets it before the same step
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm_runtime.simulate.replica import Side
from glm_runtime.simulate.req import Req
from glm_runtime.simulate.shape import Plan
from glm_runtime.traces import Request, prompts
from tests.servers import Server

IDS = range(5, 195)


@dataclass
class Batch:
    """Requests sent together: when (monotonic seconds), and when each one's first and last token came."""

    names: list[str]
    sent: float = 0.0
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)


def send(server: Server, trace: Sequence[Request], seed: int, label: str, more: Mapping[str, Any]) -> Batch:
    """Ask for all of them in one message and read their streams to the end."""
    # NOTE: SGLang aborts a streamed batch's ids, and all that begin with one of them, two seconds after its end.
    batch = Batch([f"{label}-{i:03}" for i in range(len(trace))])
    sampling = [
        {"temperature": 0.0, "max_new_tokens": line.output_tokens, "ignore_eos": True} | dict(more) for line in trace
    ]
    if more.get("ignore_eos") is False:
        for params in sampling:  # no end before the length, though SGLang cannot know
            params["min_new_tokens"] = params["max_new_tokens"]
    body = {
        "input_ids": prompts(trace, IDS, seed=seed),
        "sampling_params": sampling,
        "rid": batch.names,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    try:
        text = json.dumps(body)
        batch.sent = time.monotonic()
        connection.request("POST", "/generate", text, {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            name = event["meta_info"]["id"]
            now = time.monotonic()
            batch.first.setdefault(name, now)
            if event["meta_info"].get("finish_reason"):
                assert event["meta_info"]["finish_reason"]["type"] == "length", event
                batch.last[name] = now
    finally:
        connection.close()
    assert set(batch.last) == set(batch.names)
    return batch


def send_both(
    server: Server, label: str, first: Sequence[Request], second: Sequence[Request], wait: float, **more: Any
) -> list[Batch]:
    """The second batch `wait` seconds after the first; `label` is used once in a server's life."""
    found: list[Batch] = []
    threads = [
        threading.Thread(target=lambda: found.append(send(server, first, 1, f"{label} a", more))),
        threading.Thread(target=lambda: found.append(send(server, second, 1, f"{label} b", more))),
    ]
    threads[0].start()
    time.sleep(wait)
    threads[1].start()
    for thread in threads:
        thread.join(300)
    assert len(found) == 2, "a batch was not answered"
    return sorted(found, key=lambda batch: batch.sent)


def arrival_step(steps: Sequence[Mapping[str, Any]], count: int) -> int:
    """Place of the first step (from 0) by whose planning a second batch of `count` had come; their number if none.

    Preemptions lengthen the line too, but by fewer.
    """
    seen: set[str] = set()
    line = 0
    for i, step in enumerate(steps):
        fresh = set(step["rows"]) - seen
        seen |= fresh
        if i and step["waiting"] - line + len(fresh) >= count:
            return i
        line = step["waiting"]
    return len(steps)


def drive(side: Side, arrivals: Mapping[int, Sequence[Req]], overlap: bool) -> list[Plan]:
    """Plan and settle until nothing is left; `arrivals`: place of the step -> who comes before it is planned."""
    plans: list[Plan] = []
    flying: Plan | None = None
    left = dict(arrivals)
    idle = 0
    while True:
        for req in left.pop(len(plans), ()):
            side.add(req)
        made = side.plan()
        assert not side.failed
        if made is not None:
            plans.append(made)
        if flying is not None:
            side.settle(flying)
            flying = None
        if made is not None and not overlap:
            side.settle(made)
        elif made is not None:
            flying = made
        idle = 0 if made is not None or flying is not None else idle + 1
        if idle > 2:
            assert not left, f"step {len(plans)} is the last, somebody was to come before {sorted(left)}"
            return plans


def rows(plan: Plan, names: Sequence[str]) -> dict[str, int]:
    """Rows of a simulated step under the requests' names."""
    return {names[index]: count for index, count in plan.rows.items()}
