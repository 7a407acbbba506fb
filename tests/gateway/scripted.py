"""A gateway in this process over a scripted engine: the real ROUTER, sessions and limits, tokens without a model.

A request of `max_new_tokens` n yields n tokens, one each `step_s`: token i is letter i of the alphabet, over and over.
"""

from __future__ import annotations

import asyncio
import string
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import zmq

from glm_runtime.gateway.flags import Settings
from glm_runtime.gateway.listen import listen_all, parse
from glm_runtime.gateway.protocol import TAG, Bad, Generate
from glm_runtime.gateway.server import Gateway

LETTERS = string.ascii_lowercase


def letters(count: int) -> str:
    """Text of the first `count` tokens."""
    return (LETTERS * (count // len(LETTERS) + 1))[:count]


class ScriptedEngine:
    """Stands where SGLang's TokenizerManager stands."""

    cumulative = True
    draining = False

    def __init__(self, step_s: float = 0.002) -> None:
        self.step_s = step_s
        self.running: set[str] = set()
        self.rids: list[str] = []
        self.stopped_early = 0
        self.padding = 0  # letters more a token

    async def policy(self) -> Any:
        return {"policy": "scripted"}

    def facts(self) -> dict[str, Any]:
        return {"model": "scripted"}

    async def generate(self, ask: Generate, rid: str) -> AsyncIterator[dict[str, Any]]:
        if ask.text == "refuse me":
            raise Bad("bad_request", "text: refused", "text", ask.text, "another")
        if ask.text == "break":
            raise RuntimeError("a fault of the engine")
        count = int(ask.sampling_params.get("max_new_tokens", 8))
        self.running.add(rid)
        self.rids.append(rid)
        text, ids, ended = "", [], False
        try:
            for i in range(count):
                await asyncio.sleep(self.step_s)
                text += LETTERS[i % 26] + "." * self.padding
                ids.append(i)
                finish = {"type": "length", "length": count} if i == count - 1 else None
                if ask.stream or finish:
                    ended = finish is not None
                    yield {
                        "text": text,
                        "output_ids": ids,
                        "meta_info": {"finish_reason": finish, "completion_tokens": i},
                    }
        finally:
            self.running.discard(rid)
            self.stopped_early += not ended


class Running:
    """A gateway on a loop of its own thread."""

    def __init__(self, engine: ScriptedEngine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.listeners = listen_all(settings.endpoints)
        self.endpoint = self.listeners[0].endpoint.text
        self._ready, self._stop = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.gateway = Gateway(self.engine, self.settings, self.listeners)
        await self.gateway.start()
        self._ready.set()
        while not self._stop.is_set():
            await asyncio.sleep(0.01)
        await self.gateway.close()

    def start(self) -> Running:
        self.thread.start()
        assert self._ready.wait(10)
        return self

    def stop(self) -> None:
        self._stop.set()
        self.thread.join(20)
        assert not self.thread.is_alive()

    def stats(self) -> dict[str, Any]:
        """Counters, asked on the gateway's own loop."""

        async def ask() -> dict[str, Any]:
            return self.gateway.stats()

        return asyncio.run_coroutine_threadsafe(ask(), self.loop).result(10)


@contextmanager
def serving(
    engine: ScriptedEngine | None = None, endpoint: str = "tcp://127.0.0.1:0", **limits: Any
) -> Iterator[Running]:
    """A gateway while the block runs."""
    endpoints = tuple(parse(text) for text in endpoint.split())
    running = Running(engine or ScriptedEngine(), Settings(endpoints, **limits)).start()
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def dealer(endpoint: str, **options: int) -> Iterator[zmq.Socket[bytes]]:
    """A plain DEALER, as docs/zmq-protocol.md shows it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            made.setsockopt(getattr(zmq, name), value)
        made.connect(endpoint)
        yield made


def say(socket: zmq.Socket[bytes], **message: Any) -> None:
    """Send one JSON message."""
    socket.send_multipart([TAG, orjson.dumps(message)])


def hear(socket: zmq.Socket[bytes], limit_s: float = 30.0) -> dict[str, Any]:
    """The next message that is no heartbeat."""
    end = time.monotonic() + limit_s
    while True:
        assert socket.poll(max(0, int((end - time.monotonic()) * 1000))), "no answer"
        tag, frame = socket.recv_multipart()
        assert tag == TAG
        message = dict(orjson.loads(frame))
        if message["type"] != "heartbeat":
            return message


def until(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
