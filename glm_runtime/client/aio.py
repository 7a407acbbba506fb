"""The asyncio client.

async with AsyncClient("tcp://127.0.0.1:5557") as client:
    print((await client.generate("Hello", max_new_tokens=16)).text)
    async for delta in client.stream("Hello", max_new_tokens=16):
        print(delta.text, end="")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Any

import zmq

from glm_runtime.client.connect import dealer
from glm_runtime.client.results import Aborted, Delta, Lost, Refused, Result
from glm_runtime.client.sync import DEFAULT
from glm_runtime.client.wire import Pending, Prompt, Wire, generate
from glm_runtime.gateway.protocol import TAG, Encoding, Message


class AsyncClient:
    """A connection to the gateway for one event loop; any number of tasks may use it. Arguments as for `Client`."""

    def __init__(
        self,
        endpoint: str = DEFAULT,
        *,
        timeout: float | None = 60.0,
        lost_after: float = 10.0,
        heartbeat: float = 1.0,
        encoding: Encoding = "json",
        key_file: str | None = None,
        server_key: str | None = None,
    ) -> None:
        self._socket = dealer(endpoint, key_file, server_key)
        # A loop that is held up for long still keeps its word; ZeroMQ's own heartbeats tell a dead process sooner.
        self._wire = Wire(self._send, encoding, heartbeat, lost_after, promise=10 * heartbeat)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.timeout = timeout

    def _send(self, frame: bytes) -> None:
        try:
            self._socket.send_multipart([TAG, frame], zmq.NOBLOCK)
        except zmq.Again:
            raise Lost("the server takes nothing more") from None
        # NOTE: a send can swallow the descriptor's sign that something came in.
        if self._loop is not None:
            self._loop.call_soon(self._take)

    def _begin(self) -> asyncio.AbstractEventLoop:
        """The loop of the first call is the client's."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.fileno(), self._take)
            self._tick()
        return self._loop

    def _take(self) -> None:
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            assert self._loop is not None
            self._wire.receive(frames, self._loop.time())

    def _tick(self) -> None:
        assert self._loop is not None
        self._take()
        self._wire.tick(self._loop.time())
        self._timer = self._loop.call_later(self._wire.heartbeat / 4, self._tick)

    def _ask(self, message: Message) -> Pending:
        return self._wire.ask(message, self._begin().time(), self.timeout)

    async def wait(self, pending: Pending) -> Message:
        """The next message of a request. Raises what ended it."""
        if not pending.ready:
            waiter = self._begin().create_future()

            def wake() -> None:
                if not waiter.done():
                    waiter.set_result(None)

            pending.wake = wake
            try:
                await waiter
            finally:
                pending.wake = None
        if not pending.inbox:
            assert pending.failure is not None
            raise pending.failure
        message = pending.inbox.popleft()
        if message["type"] == "error":
            raise Refused(message)
        if message["type"] == "aborted":
            raise Aborted(message["reason"])
        return message

    async def _answer(self, message: Message) -> Message:
        pending = self._ask(message)
        try:
            return await self.wait(pending)
        finally:
            self.abort(pending)

    async def generate(self, prompt: Prompt, **given: Any) -> Result:
        """One answer; see `Client.generate`. Cancelling the task aborts the request."""
        return Result.of(await self._answer(generate(prompt, False, given)))

    def stream(self, prompt: Prompt, **given: Any) -> AsyncStream:
        """The same as an asynchronous iterator of deltas; leaving it early aborts the request."""
        return AsyncStream(self, self._ask(generate(prompt, True, given)))

    async def batch(self, prompts: Iterable[Prompt], **given: Any) -> list[Result]:
        """All at once, with the same parameters; the answers in the order of the prompts."""
        return list(await asyncio.gather(*(self.generate(prompt, **given) for prompt in prompts)))

    async def hello(self) -> Message:
        """What the server says of itself: version, model, policy, limits."""
        if self._wire.hello is None:
            await self.ping()
        assert self._wire.hello is not None
        return self._wire.hello

    async def ping(self) -> float:
        """Seconds to the server and back."""
        loop = self._begin()
        begin = loop.time()
        await self._answer({"type": "ping"})
        return loop.time() - begin

    async def stats(self) -> Message:
        """The gateway's counters."""
        return await self._answer({"type": "stats"})

    async def policy(self) -> Any:
        """What the scheduler process runs, as GET /policy."""
        return (await self._answer({"type": "policy"}))["policy"]

    def abort(self, pending: Pending) -> None:
        """Give up on a request."""
        if not self._socket.closed:
            self._wire.abort(pending)

    def close(self) -> None:
        """Abort what is open and disconnect."""
        if self._socket.closed:
            return
        for pending in list(self._wire.pending.values()):
            self._wire.abort(pending)
            pending.failure = Lost("the client was closed")
            pending.news()
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()

    async def __aenter__(self) -> AsyncClient:
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream:
    """Deltas of one request. `result` is there once they have all come."""

    def __init__(self, client: AsyncClient, pending: Pending) -> None:
        self._client, self._pending = client, pending
        self.result: Result | None = None

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self.result is not None or (self._pending.ended and not self._pending.ready):
            raise StopAsyncIteration
        message = await self._client.wait(self._pending)
        if message["type"] == "done":
            self.result = Result.of(message)
            raise StopAsyncIteration
        return Delta.of(message)

    def close(self) -> None:
        """Abort the request if it still runs."""
        self._client.abort(self._pending)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *left: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
