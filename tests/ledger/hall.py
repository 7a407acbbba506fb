"""Which servers the tests ask: one alive at a time, each started once where tests keep the order of `SERVERS`.

hall.server("storm") ─> the same as before?  no: stop that one, start this one
hall.expected()      ─> answers of `--policy sglang` to all fixed cases, asked once
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from tests import alone
from tests.ledger import client
from tests.ledger.cases import CROWD, FEATURES, MANY, STORM, penalised
from tests.ledger.client import Reply
from tests.servers import Server

# NOTE: SGLang compares its books with the pools in every step, and ends the server where they differ.
STRICT: dict[str, str | None] = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2"}
LEDGER = ("--scheduler", "ledger", "--max-num-seqs", "32")


def _ledger(budget: int, pool: int, *more: str) -> tuple[str, ...]:
    return (*LEDGER, "--max-num-batched-tokens", str(budget), "--max-total-tokens", str(pool), *more)


SERVERS: dict[str, tuple[str, ...]] = {
    "stock": ("--policy", "sglang", "--max-total-tokens", "16384"),
    "wide": _ledger(2048, 16384, "--enable-metrics", "--enable-cache-report"),
    "narrow": _ledger(128, 7168),
    "plain": _ledger(32, 7168, "--disable-overlap-schedule", "--no-decode-first"),
    "storm": _ledger(128, 1024, "--enable-metrics"),
    "storm32": _ledger(32, 1024, "--disable-overlap-schedule", "--no-scheduler-reserve-full-isl", "--no-decode-first"),
    "tp2": _ledger(128, 7168, "--tp-size", "2"),
    "priority": _ledger(64, 1024, "--scheduling-policy", "priority", "--disable-radix-cache"),
    "paced": _ledger(2048, 16384, "--target-step-ms", "200", "--enable-metrics"),
}


class Hall:
    """At most one server: the one that was asked for last. Every ledger server writes a step log."""

    def __init__(self) -> None:
        self._name = ""
        self._server: Server | None = None
        self._expected: dict[str, Reply] = {}
        self._many: list[list[int]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ledger-steps-")

    def log(self, name: str) -> Path:
        """Step log of a server."""
        return Path(self._folder.name) / f"{name}.jsonl"

    def steps(self, name: str, after: int = 0) -> list[dict[str, Any]]:
        """Steps of a server's log with a number above `after`."""
        found = [json.loads(line) for line in self.log(name).read_text().splitlines()]
        return [step for step in found if step["number"] > after]

    def server(self, name: str) -> Server:
        """The running server `name` of SERVERS."""
        if self._server is None or self._name != name or self._server.process.poll() is not None:  # type: ignore[union-attr]
            self.close()
            alone.take(self.close)
            self.log(name).unlink(missing_ok=True)
            own = () if name == "stock" else ("--step-log", str(self.log(name)))
            server = Server("--dtype", "float32", *SERVERS[name], *own, env=STRICT, small=False)
            try:
                server.start()
            except BaseException:
                server.kill()
                raise
            self._server, self._name = server, name
        return self._server

    def expected(self) -> dict[str, Reply]:
        """Answers of `--policy sglang`, by the name of the case."""
        if not self._expected:
            stock = self.server("stock")
            for cases in (CROWD, STORM, FEATURES):
                self._expected |= client.together(stock, [case for case in cases if not penalised(case)])
                self._expected |= {case.name: client.ask(stock, case) for case in cases if penalised(case)}
            self._many = [list(answer["output_ids"]) for answer in stock.post("/generate", MANY.body())]
        return self._expected

    def many(self) -> list[list[int]]:
        """Its answers to MANY, a request with n > 1."""
        self.expected()
        return self._many

    def close(self) -> None:
        """Stop the server, if there is one."""
        if self._server is not None:
            self._server.stop()
            self._server.log.unlink(missing_ok=True)
            self._server = None


@functools.cache
def hall() -> Hall:
    """The one hall of this test run."""
    return Hall()
