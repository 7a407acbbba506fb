"""Rounds: every arm plays the workload in turn, A B A B, so that what the machine does meanwhile meets all alike.

round 1   start A, warm up, flush, play, stop     start B, ...
round 2   start A, ...                            start B, ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm_runtime.ab.arms import Arm
from glm_runtime.ab.asks import Ask, Workload
from glm_runtime.ab.client import Output, Played, play
from glm_runtime.ab.fleet import Fleet
from glm_runtime.ab.runs import Reply, Run, save
from glm_runtime.ab.servers import Server, ServerFailed


class Progress:
    """A bar over all requests of all rounds, with SGLang's client's own tqdm."""

    def __init__(self, total: int, quiet: bool) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        self._bar = tqdm(total=total, unit="request", disable=quiet, dynamic_ncols=True)

    def say(self, text: str) -> None:
        """What is going on."""
        self._bar.set_description(text)

    def tick(self) -> None:
        """One more answer."""
        self._bar.update(1)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def rounds(
    arms: Sequence[Arm],
    workload: Workload,
    warm_up: Sequence[Ask],
    count: int,
    fleet: Fleet,
    folder: Path,
    *,
    logprobs: bool = True,
    max_concurrency: int | None = None,
    quiet: bool = False,
) -> list[Run]:
    """Play the workload `count` times on every arm; each run is saved in `folder` as soon as it is there.

    Raises:
        ConfigError: an arm's flags were refused. ServerFailed: a server did not start, or ended.
    """
    progress = Progress(count * len(arms) * len(workload.asks), quiet)
    found: list[Run] = []
    try:
        for number in range(1, count + 1):
            for arm in arms:
                progress.say(f"round {number}/{count}, {arm.name}")
                with fleet.of(arm) as server:
                    run = one(server, arm, workload, warm_up, number, logprobs, max_concurrency, progress)
                save(run, folder / "runs" / f"{arm.slug}-{number}.json")
                found.append(run)
    finally:
        progress.close()
    return found


def one(
    server: Server,
    arm: Arm,
    workload: Workload,
    warm_up: Sequence[Ask],
    number: int,
    logprobs: bool,
    max_concurrency: int | None,
    progress: Progress,
) -> Run:
    """One round on a running server."""
    if warm_up:
        asyncio.run(play(server.url, warm_up, f"{arm.slug}.{number}w", logprobs))
    server.flush()
    # NOTE: a request id must be new to a server that has served other rounds.
    label = f"{arm.slug}.{number}"
    played = asyncio.run(play(server.url, workload.asks, label, logprobs, max_concurrency, progress.tick))
    server.alive()
    if not any(output.success for output in played.outputs):
        raise ServerFailed(f"arm {arm.name}: no request was answered: {played.outputs[0].error}")
    return Run(
        arm=arm.name,
        flags=list(arm.flags),
        round=number,
        workload=workload.fingerprint,
        start=played.start,
        seconds=played.seconds,
        replies=[reply(output, played) for output in played.outputs],
        steps=server.steps(played.start),
        policy=server.get("/policy"),
        server=_plain(server.get("/server_info")),
    )


def reply(output: Output, played: Played) -> Reply:
    """What is kept of an answer."""
    return Reply(
        sent=output.start_time - played.start,
        ttft=output.ttft,
        latency=output.latency,
        itl=output.itl,
        tokens=output.token_ids,
        logprobs=output.logprobs,
        top=output.top,
        prompt_tokens=output.prompt_len,
        cached=output.cached_tokens,
        retractions=output.retractions,
        error="" if output.success else output.error or "no answer",
        text=output.generated_text,
    )


def _plain(server_info: dict[str, Any]) -> dict[str, Any]:
    """SGLang's arguments of GET /server_info, without what its processes count."""
    return {name: value for name, value in server_info.items() if name != "internal_states"}
