"""The blocking client.

with Client("tcp://127.0.0.1:5557") as client:
    print(client.generate("Hello", max_new_tokens=16).text)
    for delta in client.stream("Hello", max_new_tokens=16):
        print(delta.text, end="")
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import zmq

from glm_runtime.client.connect import dealer
from glm_runtime.client.results import Aborted, Delta, Lost, Refused, Result
from glm_runtime.client.wire import Pending, Prompt, Wire, generate
from glm_runtime.gateway.protocol import TAG, Encoding, Message

DEFAULT = "tcp://127.0.0.1:5557"


class Client:
    """A connection to the gateway. One thread at a time may use it; many requests may be open.

    Args:
        endpoint: the server's --zmq-endpoint.
        timeout: seconds that a request may go without progress; None: for ever.
        lost_after: seconds without any sign of the server after which it counts as lost.
        heartbeat: seconds of silence after which the server is asked for a sign.
        encoding: "json" or "msgpack".
        key_file, server_key: CURVE: the client's NAME.key_secret, and the server's NAME.key (or the key itself).
    """

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
        self._wire = Wire(self._send, encoding, heartbeat, lost_after)
        self.timeout = timeout

    def _send(self, frame: bytes) -> None:
        try:
            self._socket.send_multipart([TAG, frame], zmq.NOBLOCK)
        except zmq.Again:
            raise Lost("the server takes nothing more") from None

    def wait(self, pending: Pending) -> Message:
        """The next message of a request. Raises what ended it."""
        while not pending.ready:
            if self._socket.poll(int(self._wire.heartbeat * 250)):
                self._take()
            self._wire.tick(time.monotonic())
        if not pending.inbox:
            assert pending.failure is not None
            raise pending.failure
        message = pending.inbox.popleft()
        if message["type"] == "error":
            raise Refused(message)
        if message["type"] == "aborted":
            raise Aborted(message["reason"])
        return message

    def _take(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._wire.receive(frames, time.monotonic())

    def _ask(self, message: Message) -> Message:
        pending = self._wire.ask(message, time.monotonic(), self.timeout)
        try:
            return self.wait(pending)
        finally:
            self._wire.abort(pending)

    def generate(self, prompt: Prompt, **given: Any) -> Result:
        """One answer.

        Args:
            prompt: text, token ids, or chat messages ({"role", "content"}).
            given: SGLang's sampling parameters by name (max_new_tokens, temperature, stop, ...), and priority,
                return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob, return_text_in_logprobs,
                chat_template_kwargs.

        Raises:
            Refused, Aborted, Lost, TooLate.
        """
        return Result.of(self._ask(generate(prompt, False, given)))

    def stream(self, prompt: Prompt, **given: Any) -> Stream:
        """The same as an iterator of deltas; leaving it early aborts the request."""
        return Stream(self, self._wire.ask(generate(prompt, True, given), time.monotonic(), self.timeout))

    def batch(self, prompts: Iterable[Prompt], **given: Any) -> list[Result]:
        """All at once, with the same parameters; the answers in the order of the prompts."""
        asked: list[Pending] = []
        try:
            for prompt in prompts:
                asked.append(self._wire.ask(generate(prompt, False, dict(given)), time.monotonic(), self.timeout))
            return [Result.of(self.wait(pending)) for pending in asked]
        finally:
            for pending in asked:
                self._wire.abort(pending)

    def hello(self) -> Message:
        """What the server says of itself: version, model, policy, limits."""
        if self._wire.hello is None:
            self.ping()
        assert self._wire.hello is not None
        return self._wire.hello

    def ping(self) -> float:
        """Seconds to the server and back."""
        begin = time.monotonic()
        self._ask({"type": "ping"})
        return time.monotonic() - begin

    def stats(self) -> Message:
        """The gateway's counters."""
        return self._ask({"type": "stats"})

    def policy(self) -> Any:
        """What the scheduler process runs, as GET /policy."""
        return self._ask({"type": "policy"})["policy"]

    def close(self) -> None:
        """Abort what is open and disconnect."""
        if not self._socket.closed:
            for pending in list(self._wire.pending.values()):
                self._wire.abort(pending)
            self._socket.close()

    def abort(self, pending: Pending) -> None:
        """Give up on a request."""
        if not self._socket.closed:
            self._wire.abort(pending)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """Deltas of one request. `result` is there once they have all come."""

    def __init__(self, client: Client, pending: Pending) -> None:
        self._client, self._pending = client, pending
        self.result: Result | None = None

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if self.result is not None or (self._pending.ended and not self._pending.ready):
            raise StopIteration
        message = self._client.wait(self._pending)
        if message["type"] == "done":
            self.result = Result.of(message)
            raise StopIteration
        return Delta.of(message)

    def close(self) -> None:
        """Abort the request if it still runs."""
        self._client.abort(self._pending)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *left: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
