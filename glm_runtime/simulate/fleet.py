"""Many replicas behind a router.

round-robin   each in its turn
least-load    fewest prompt tokens of requests that have not ended; ties to the lower number
prefix        the one that holds the longest prefix, unless its load is above LEAN times the least plus one prompt
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glm_runtime.simulate.metrics import Metrics
from glm_runtime.simulate.replica import Overlap, Replica, Side, StepCost
from glm_runtime.simulate.req import Req
from glm_runtime.simulate.shape import Plan
from glm_runtime.traces import Request

ROUTERS = ("round-robin", "least-load", "prefix")
LEAN = 1.5
INPUT_RESERVE = 5
"""Positions that SGLang keeps back from a prompt (tp_worker.py, max_req_input_len)."""


def output_limit(prompt: int, output: int, positions: int, pool_tokens: int, page: int) -> int | None:
    """Output tokens that SGLang allows; None where it refuses the prompt, or leaves it nothing."""
    longest = min(positions - 1, pool_tokens - 1)
    if prompt >= longest - INPUT_RESERVE:
        return None
    paged = -(-prompt // page) * page
    most = min(output, longest - prompt - 1, pool_tokens - paged - page - 1)
    return most if most > 0 else None


def requests_of(
    trace: Sequence[Request], positions: int, pool_tokens: int, page: int
) -> tuple[list[Req], list[Request]]:
    """(requests to serve, those that a server would refuse)."""
    taken: list[Req] = []
    refused: list[Request] = []
    for line in trace:
        output = output_limit(line.prompt_tokens, line.output_tokens, positions, pool_tokens, page)
        if output is None:
            refused.append(line)
        else:
            taken.append(Req(len(taken), line, page, output))
    return taken, refused


def run_fleet(
    requests: Sequence[Req],
    make: Callable[[], Side],
    cost: StepCost,
    overlap: Overlap,
    replicas: int = 1,
    router: str = "round-robin",
    on_step: Callable[[Plan, float, float], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Metrics]:
    """Serve all requests. ValueError for an unknown router or no replica; RuntimeError where a line cannot move."""
    if replicas < 1:
        raise ValueError(f"--replicas {replicas}: at least 1 is needed")
    if router not in ROUTERS:
        raise ValueError(f"--router {router}: known are {', '.join(ROUTERS)}")
    fleet = [Replica(make(), cost, overlap, Metrics(), on_step) for _ in range(replicas)]
    for number, req in enumerate(requests):
        if router == "round-robin":
            fleet[number % replicas].send(req)
            continue
        for replica in fleet:
            replica.run(until=req.arrival)
        _choose(fleet, req, router).send(req)
        if progress is not None:
            progress(number + 1)
    for replica in fleet:
        replica.run()
    return [replica.metrics for replica in fleet]


def _choose(fleet: Sequence[Replica], req: Req, router: str) -> Replica:
    least = min(fleet, key=_load)
    if router == "least-load":
        return least
    most = (req.prompt - 1) // fleet[0].side.tree.page
    pages = req.pages(most)
    held, best = max(
        ((replica.side.tree.peek(pages, most), -number) for number, replica in enumerate(fleet)), default=(0, 0)
    )
    found = fleet[-best]
    return found if held and found.load <= LEAN * least.load + req.prompt else least


def _load(replica: Replica) -> int:
    return replica.load
