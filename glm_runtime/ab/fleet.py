"""Which servers are alive during a comparison.

    one     the arm's own, started for each round; one at a time
    all     every arm's, through all rounds: more memory, no restarts
    live    one for all arms, whose scheduler is changed between them (live.py)

The first server begins to start at once, while this process still loads SGLang's client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from glm_runtime.ab.arms import Arm
from glm_runtime.ab.live import one_server, switch
from glm_runtime.ab.servers import Server

Keep = Literal["one", "all", "live"]


class Fleet:
    """The servers of a comparison: a context that ends whatever it started.

    Args:
        arms: in the order of a round.
        folder: logs and step records go there.
        limit_s: seconds that a server may take to start.
        keep: which are alive.
    """

    def __init__(self, arms: Sequence[Arm], folder: Path, limit_s: float, keep: Keep) -> None:
        self._keep = keep
        self._make = lambda arm: Server(arm, folder, limit_s)
        self._first = self._make(one_server(arms) if keep == "live" else arms[0])
        self._up: dict[str, Server] = {}

    @contextlib.contextmanager
    def of(self, arm: Arm) -> Iterator[Server]:
        """The server of an arm, for one round. ConfigError or ServerFailed where it does not start."""
        name = self._first.arm.name if self._keep == "live" else arm.name
        if name not in self._up:
            server = self._up[name] = self._make(arm)
            server.begin()
        server = self._up[name]
        server.wait()
        if self._keep == "live":
            switch(server, arm)
        yield server
        if self._keep == "one":
            self._up.pop(name).stop()

    def __enter__(self) -> Fleet:
        self._up[self._first.arm.name] = self._first
        self._first.begin()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._up.values():
            server.stop()
