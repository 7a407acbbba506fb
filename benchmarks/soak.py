"""A soak of the ZMQ gateway: many clients, most of them ordinary, some that vanish, change their mind or are hostile.

python -m benchmarks.soak [--quick] [--json FILE] [--clients N] [--requests N] [--seed N]

ordinary   streams or whole answers; every one is compared with the answer that its prompt got alone
abort      leaves its stream after some pieces
vanish     its connection closes in mid-answer; a new client takes its place
hostile    rubbish frames, pickles, messages beyond the size limit, other protocols on the port, all through the run

Asked of it: each ordinary request is answered, once and as alone; at the end nothing is in flight, every KV token is
free or cached, and the server's processes are no larger than after the first fifth of the run. Before the full form,
prompts as large as the KV cache touch each of its pages once: memory asked for and not yet written is no leak.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil
import zmq

from benchmarks.common import Ask, Report, parser
from glm_runtime.client import AsyncClient, Client, ClientError
from glm_runtime.gateway.protocol import TAG

PROMPTS = 48
TOKENS = (1, 4, 12, 24)
GROWTH_MB = 32.0
LONG_PROMPT = 2048
SHARES = (("ordinary", 0.8), ("abort", 0.1), ("vanish", 0.1))


@dataclass
class Soak:
    """What happened. `wrong`: ordinary requests whose answer differs from the one alone; `failed`: that got none."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    growth_mb: float = 0.0
    in_flight: int = 0
    kv_lost: int = 0


def prompt(number: int) -> list[int]:
    """Token ids; some prompts share a long beginning, so that the prefix cache has work."""
    shared = [66 + number % 3] * 70 if number % 2 else []
    return [*shared, *(65 + (number * 7 + place * 3) % 57 for place in range(3 + number % 29))]


def sampling(number: int) -> dict[str, Any]:
    """Greedy, of a length that depends on the prompt."""
    return {"max_new_tokens": TOKENS[number % len(TOKENS)], "temperature": 0, "ignore_eos": True}


def memory_mb(server: Any) -> float:
    """Resident MiB of all processes of the server."""
    found = 0.0
    for process in [psutil.Process(server.process.pid), *server.children()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.memory_info().rss / 2**20
    return found


class Run:
    """One soak of a server's endpoint."""

    def __init__(self, endpoint: str, clients: int, requests: int, seed: int, message_limit: int) -> None:
        self.endpoint, self.clients, self.requests = endpoint, clients, requests
        self.random = random.Random(seed)
        self.message_limit = message_limit
        self.soak = Soak()
        self.left = requests
        self.solo: dict[int, list[int]] = {}

    def alone(self) -> None:
        """The answer of each prompt, one after the other."""
        with Client(self.endpoint) as client:
            for number in range(PROMPTS):
                self.solo[number] = client.generate(prompt(number), **sampling(number)).output_ids

    async def touch(self, tokens: int, longest: int) -> None:
        """Write `tokens` rows of the KV cache, by prompts of at most `longest`."""
        async with AsyncClient(self.endpoint, timeout=600) as client:
            sizes = [longest] * (tokens // longest)
            ids = [[65 + number, *(65 + place % 57 for place in range(size - 1))] for number, size in enumerate(sizes)]
            await asyncio.gather(*(client.generate(given, max_new_tokens=1) for given in ids))

    async def all(self) -> None:
        """Every client at once, and the hostile ones beside them."""
        hostile = asyncio.create_task(self.hostile())
        await asyncio.gather(*(self.client() for _ in range(self.clients)))
        hostile.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hostile

    async def client(self) -> None:
        """One place: requests one after the other until none is left."""
        encoding: Any = self.random.choice(("json", "msgpack"))
        client = AsyncClient(self.endpoint, encoding=encoding, timeout=120)
        try:
            while self.left > 0:
                self.left -= 1
                kind = self.random.choices([name for name, _ in SHARES], [share for _, share in SHARES])[0]
                number = self.random.randrange(PROMPTS)
                try:
                    await (self.ordinary(client, number) if kind == "ordinary" else self.leave(client, number))
                    self.soak.counts[kind] += 1
                except ClientError as error:
                    self.soak.failed.append(f"{kind} {number}: {type(error).__name__}: {error}")
                if kind == "vanish":
                    client.close()
                    client = AsyncClient(self.endpoint, encoding=encoding, timeout=120)
        finally:
            client.close()

    async def ordinary(self, client: AsyncClient, number: int) -> None:
        """Its answer is the one that it got alone."""
        if self.random.random() < 0.5:
            got = (await client.generate(prompt(number), **sampling(number))).output_ids
        else:
            stream = client.stream(prompt(number), **sampling(number))
            text, got = "", []
            async for delta in stream:
                text += delta.text
                got += delta.output_ids
            assert stream.result is not None
            if text != stream.result.text or got != stream.result.output_ids:
                self.soak.wrong.append(f"{number}: the deltas are not the answer")
        if got != self.solo[number]:
            self.soak.wrong.append(f"{number}: {got} instead of {self.solo[number]}")

    async def leave(self, client: AsyncClient, number: int) -> None:
        """A long request that nobody waits for to its end."""
        stop = self.random.randrange(6)
        stream = client.stream(prompt(number), max_new_tokens=5000, ignore_eos=True)
        place = 0
        async for delta in stream:
            place += len(delta.output_ids)
            if place > stop:
                break
        if self.random.random() < 0.5:
            stream.close()

    async def hostile(self) -> None:
        """Rubbish, until cancelled."""
        context = zmq.Context()
        try:
            while True:
                with context.socket(zmq.DEALER) as peer:
                    peer.setsockopt(zmq.LINGER, 0)
                    peer.connect(self.endpoint)
                    for _ in range(self.random.randrange(1, 100)):
                        with contextlib.suppress(zmq.Again):
                            peer.send_multipart(self.rubbish(), zmq.NOBLOCK)
                        self.soak.counts["hostile"] += 1
                    await asyncio.sleep(self.random.random() * 0.1)
        finally:
            context.destroy(linger=0)

    def rubbish(self) -> list[bytes]:
        """Frames of one hostile message."""
        bits = self.random.randbytes(self.random.randrange(200))
        return self.random.choice(
            (
                [bits],
                [TAG, bits],
                [TAG, pickle.dumps({"rid": os.getpid()})],
                [bits] * self.random.randrange(1, 200),
                [TAG, b'{"type":"generate","id":"x","input_ids":[' + b"1," * 5000 + b"99999999]}"],
                [TAG, b'{"type":"generate","id":"y","text":"","sampling_params":{"top_k":1e300}}'],
                [TAG, b" " * (self.message_limit + 1)],
                [TAG, b'{"type":"abort","id":"z","target":"1"}'],
            )
        )


def run(
    server: Any,
    endpoint: str,
    clients: int,
    requests: int,
    seed: int = 1,
    message_limit: int = 8 << 20,
    touch: bool = False,
) -> Soak:
    """Soak a running server (tests/servers.py) at `endpoint`; `touch`: write each page of its KV cache first."""
    work = Run(endpoint, clients, requests, seed, message_limit)
    work.alone()
    if touch:
        total = server.get("/policy")["knobs"]["step_totals"]["kv_tokens"]["total"]
        asyncio.run(work.touch(total, LONG_PROMPT))
    work.left = requests // 5
    asyncio.run(work.all())
    before = memory_mb(server)
    begin = time.perf_counter()
    work.left = requests - requests // 5
    asyncio.run(work.all())
    soak = work.soak
    soak.seconds = time.perf_counter() - begin
    soak.growth_mb = memory_mb(server) - before
    totals = server.get("/policy")["knobs"]["step_totals"]
    for _ in range(200):
        if not totals["running"] and not totals["waiting"]:
            break
        time.sleep(0.05)
        totals = server.get("/policy")["knobs"]["step_totals"]
    soak.in_flight = totals["running"] + totals["waiting"]
    kv = totals["kv_tokens"]
    soak.kv_lost = kv["total"] - kv["free"] - kv["cached"]
    return soak


def main() -> int:
    """The soak of a server of its own."""
    made = parser("soak of the ZMQ gateway")
    made.add_argument("--clients", type=int, help="at once (default 200; quick 40)")
    made.add_argument("--requests", type=int, help="in all (default 5000; quick 600)")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--policy", default="vllm-ledger")
    options = made.parse_args()
    clients = options.clients or (40 if options.quick else 200)
    requests = options.requests or (600 if options.quick else 5000)
    report = Report("soak", options)

    from tests.servers import Server, free_port

    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with Server("--policy", options.policy, "--zmq-endpoint", endpoint, "--zmq-max-message-mb", "1") as server:
        soak = run(server, endpoint, clients, requests, options.seed, 1 << 20, not options.quick)
        alive = server.process is not None and server.process.poll() is None
    for name in ("ordinary", "abort", "vanish", "hostile"):
        report.figure(f"{name}", soak.counts[name])
    report.figure("requests/s", (requests - requests // 5) / soak.seconds)
    for line in (soak.wrong + soak.failed)[:10]:
        print(line, file=sys.stderr)
    report.ask(Ask("answers that differ from the one alone", len(soak.wrong), 0, "=="))
    report.ask(Ask("requests without an answer", len(soak.failed), 0, "=="))
    report.ask(Ask("in flight at the end", soak.in_flight, 0, "=="))
    report.ask(Ask("KV tokens neither free nor cached", soak.kv_lost, 0, "=="))
    report.ask(Ask("growth of the server's processes", soak.growth_mb, GROWTH_MB, "<=", " MiB"))
    report.ask(Ask("server alive", int(alive), 1, "=="))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
