"""The two fronts of one server: HTTP streaming (POST /generate) and ZMQ (glm_runtime.client), in turns, in one run.

python -m benchmarks.fronts [--quick] [--json FILE] [--requests N] [--tokens N] [--concurrency N]

requests/s       short streamed requests, `concurrency` at a time, from a client process of its own. HTTP: aiohttp on as
                 many kept-alive connections; ZMQ: AsyncClient on one, and on as many as HTTP has.
front CPU        processor time of the server's main process (both fronts and SGLang's TokenizerManager live there) per
                 output token; scheduler and detokenizer are processes of their own and do the same for both.
latency          one request at a time: seconds to the answer of one token, and between the tokens of a stream of 64,
                 median and 99th percentile at the client. The engine's share is the same for both, the difference is
                 the fronts'.

The model is the embedded tiny one, cut to `--layers` layers: the fewer, the more the front decides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import psutil

from benchmarks.common import Ask, Report, median, parser, quantile

ARMS = ("http", "zmq", "zmq-many")
ASK_RATE = 1.5
ASK_CPU = 0.5


# ---- the client process --------------------------------------------------------------------------------------------


class Load:
    """One arm's requests in this process: `run` gives seconds and the gaps between tokens."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.sampling = {"max_new_tokens": given.tokens, "temperature": 0, "ignore_eos": True}
        self.gaps: list[float] = []
        self.whole: list[float] = []
        self.tokens = 0

    def prompt(self, number: int) -> list[int]:
        """Eight token ids, another prompt each time."""
        return [65 + (number // 26**place) % 26 for place in range(8)]

    async def run(self) -> dict[str, Any]:
        """All requests, `concurrency` at a time."""
        async with self.front() as ask:
            await self.workers(ask, self.given.concurrency, 0)  # connections are there before the clock starts
            self.gaps, self.whole, self.tokens = [], [], 0
            begin = time.perf_counter()
            cpu = time.process_time()
            await self.workers(ask, self.given.requests, 1)
            seconds = time.perf_counter() - begin
            return {
                "seconds": seconds,
                "tokens": self.tokens,
                "client_cpu_s": time.process_time() - cpu,
                "gap_p50": median(self.gaps),
                "gap_p99": quantile(self.gaps, 0.99),
                "whole_p50": median(self.whole),
            }

    async def workers(self, ask: Any, requests: int, round_: int) -> None:
        """Tasks that take the next request until none is left."""
        numbers = iter(range(round_ * 10_000, round_ * 10_000 + requests))

        async def worker(place: int) -> None:
            for number in numbers:
                begin = time.perf_counter()
                await ask(place, self.prompt(number))
                self.whole.append(time.perf_counter() - begin)

        await asyncio.gather(*(worker(place) for place in range(self.given.concurrency)))

    def front(self) -> Any:
        """An asynchronous context that gives `ask(worker, prompt)`."""
        return self.http() if self.given.arm == "http" else self.zmq()

    def note(self, before: float | None, count: int) -> float:
        """A piece of a stream has come."""
        now = time.perf_counter()
        if before is not None:
            self.gaps.append(now - before)
        self.tokens += count
        return now

    def http(self) -> Any:
        """POST /generate with "stream"; the answer's lines are parsed as a client has to."""
        import contextlib

        import aiohttp
        import orjson

        @contextlib.asynccontextmanager
        async def front() -> Any:
            connector = aiohttp.TCPConnector(limit=self.given.concurrency)
            async with aiohttp.ClientSession(connector=connector) as session:

                async def ask(place: int, prompt: list[int]) -> None:
                    body = {"input_ids": prompt, "sampling_params": self.sampling, "stream": True}
                    last, had = None, 0
                    async with session.post(
                        self.given.url + "/generate", data=orjson.dumps(body), headers=HEADERS
                    ) as a:
                        async for line in a.content:
                            if line.startswith(b"data: {"):
                                have = len(orjson.loads(line[6:])["output_ids"])
                                last, had = self.note(last, have - had), have

                yield ask

        return front()

    def zmq(self) -> Any:
        """AsyncClient: one for all workers, or one each."""
        import contextlib

        from glm_runtime.client import AsyncClient

        @contextlib.asynccontextmanager
        async def front() -> Any:
            count = self.given.concurrency if self.given.arm == "zmq-many" else 1
            clients = [AsyncClient(self.given.url) for _ in range(count)]

            async def ask(place: int, prompt: list[int]) -> None:
                last = None
                async for delta in clients[place % count].stream(prompt, **self.sampling):
                    last = self.note(last, len(delta.output_ids))

            try:
                yield ask
            finally:
                for client in clients:
                    client.close()

        return front()


HEADERS = {"Content-Type": "application/json"}


def client(argv: list[str]) -> None:
    """The client process: one line of JSON when its loop stands ready, one with the figures."""
    made = argparse.ArgumentParser()
    made.add_argument("arm", choices=ARMS)
    made.add_argument("url")
    for name in ("requests", "tokens", "concurrency"):
        made.add_argument(name, type=int)
    import uvloop

    uvloop.install()
    print(json.dumps(asyncio.run(Load(made.parse_args(argv)).run())))


# ---- the benchmark -------------------------------------------------------------------------------------------------


def load(arm: str, urls: dict[str, str], requests: int, tokens: int, concurrency: int) -> dict[str, Any]:
    """Figures of one run of an arm."""
    url = urls["http" if arm == "http" else "zmq"]
    command = [sys.executable, "-m", "benchmarks.fronts", "--client", arm, url]
    run = subprocess.run(
        [*command, str(requests), str(tokens), str(concurrency)], capture_output=True, text=True, check=True
    )
    return dict(json.loads(run.stdout))


def main() -> int:
    """The benchmark itself."""
    made = parser("HTTP streaming against ZMQ on the same server")
    made.add_argument("--requests", type=int, help="of each arm and round (default 4000; quick 300)")
    made.add_argument("--tokens", type=int, default=8, help="of each request (default 8)")
    made.add_argument("--concurrency", type=int, default=64, help="requests at a time (default 64)")
    made.add_argument("--policy", default="vllm-ledger", help="of the server (default vllm-ledger)")
    made.add_argument("--rounds", type=int, help="default 3; quick 2")
    made.add_argument("--layers", type=int, default=1, help="layers of the tiny model (default 1)")
    options = made.parse_args()
    requests = options.requests or (300 if options.quick else 4000)
    rounds = options.rounds or (2 if options.quick else 3)
    report = Report("fronts", options)

    from tests.servers import Server, free_port

    endpoint = f"tcp://127.0.0.1:{free_port()}"
    cut = json.dumps({"num_hidden_layers": options.layers, "indexer_types": ["full"] * options.layers})
    flags = ["--policy", options.policy, "--zmq-endpoint", endpoint, "--log-level", "warning"]
    flags += ["--json-model-override-args", cut, "--max-running-requests", str(options.concurrency)]
    with Server(*flags) as server:
        assert server.process is not None
        front = psutil.Process(server.process.pid)
        urls = {"http": server.url, "zmq": endpoint}
        rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
        cpus: dict[str, list[float]] = {arm: [] for arm in ARMS}
        clients: dict[str, list[float]] = {arm: [] for arm in ARMS}
        latencies: dict[str, dict[str, list[float]]] = {
            arm: {"one token": [], "gap p50": [], "gap p99": []} for arm in ARMS[:2]
        }
        for arm in ARMS:  # warm
            load(arm, urls, options.concurrency, options.tokens, options.concurrency)
        for round_ in range(rounds):
            for arm in ARMS if round_ % 2 == 0 else reversed(ARMS):
                before = sum(front.cpu_times()[:2])
                figures = load(arm, urls, requests, options.tokens, options.concurrency)
                spent = sum(front.cpu_times()[:2]) - before
                warm = options.concurrency * options.tokens  # of the connections
                cpus[arm].append(spent / (figures["tokens"] + warm))
                rates[arm].append(requests / figures["seconds"])
                clients[arm].append(figures["client_cpu_s"] / figures["tokens"])
            for arm in ARMS[:2] if round_ % 2 == 0 else reversed(ARMS[:2]):
                latencies[arm]["one token"].append(load(arm, urls, 50, 1, 1)["whole_p50"])
                figures = load(arm, urls, 4, 64, 1)
                latencies[arm]["gap p50"].append(figures["gap_p50"])
                latencies[arm]["gap p99"].append(figures["gap_p99"])
    for arm in ARMS:
        report.figure(f"{arm} requests/s", median(rates[arm]))
        report.figure(f"{arm} front CPU a token, us", median(cpus[arm]) * 1e6)
        report.figure(f"{arm} client CPU a token, us", median(clients[arm]) * 1e6)
    for name in latencies["http"]:
        for arm in ARMS[:2]:
            report.figure(f"{arm} latency, {name}, us", median(latencies[arm][name]) * 1e6)
    rate = median([z / h for z, h in zip(rates["zmq"], rates["http"], strict=True)])
    cpu = median([z / h for z, h in zip(cpus["zmq"], cpus["http"], strict=True)])
    report.ask(Ask("requests/s, ZMQ over HTTP streaming", rate, ASK_RATE, ">=", "x"))
    report.ask(Ask("front CPU a token, ZMQ over HTTP streaming", cpu, ASK_CPU, "<=", "x"))
    return report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        client(sys.argv[2:])
    else:
        sys.exit(main())
