"""One connection as a client keeps it: what was asked, what came. Pure: bytes go out through a function, time comes in.

    ask() ─> Pending ─ frames in ─> its inbox ─ terminal ─> ended

While something is waited for the server is pinged; its answer names the session that it knows us by. Another session
than before means that the connection was replaced (a restart, a cut): a request of which nothing has come is asked
again, one that is half here is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from glm_runtime.client.results import ClientError, Lost, TooLate
from glm_runtime.gateway.protocol import ENCODERS, Encoding, Generate, Message, is_terminal, unpack_all

REPLIES = frozenset({"hello", "stats", "policy", "pong", "abort"})
OWN_FIELDS = frozenset(Generate.__struct_fields__) - {"id", "stream", "sampling_params"}
OURS = "#"  # ids of the connection's own messages begin so

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


def generate(prompt: Prompt, stream: bool, given: dict[str, Any]) -> Message:
    """A `generate` without its id; what is no field of the protocol is a sampling parameter."""
    message: Message = {"type": "generate", "stream": stream}
    if isinstance(prompt, str):
        message["text"] = prompt
    else:
        listed = list(prompt)
        message["messages" if listed and isinstance(listed[0], dict) else "input_ids"] = listed
    sampling = dict(given.pop("sampling_params", None) or {})
    for name, value in given.items():
        (message if name in OWN_FIELDS else sampling)[name] = value
    message["sampling_params"] = sampling
    return message


class Pending:
    """A message that waits for its answer.

    Attributes:
        inbox: what has come and was not taken. got: whether anything ever came. ended: whether its last message came.
        failure: why nothing more will come. wake: called when there is news.
    """

    __slots__ = ("ended", "failure", "got", "id", "inbox", "message", "since", "timeout", "wake")

    def __init__(self, message: Message, now: float, timeout: float | None) -> None:
        self.id: str = message["id"]
        self.message, self.since, self.timeout = message, now, timeout
        self.inbox: deque[Message] = deque()
        self.got = self.ended = False
        self.failure: ClientError | None = None
        self.wake: Callable[[], None] | None = None

    @property
    def ready(self) -> bool:
        """Whether there is something to take or to raise."""
        return bool(self.inbox) or self.failure is not None

    def news(self) -> None:
        """Tell whoever waits."""
        if self.wake is not None:
            self.wake()


class Wire:
    """One connection.

    Args:
        send: puts one frame on the wire. encoding: of what goes out after the hello.
        heartbeat: seconds between pings while something is waited for. lost_after: silence after which the server is
            lost. promise: seconds within which the server may count on a sign of us; None: it may not.
    """

    def __init__(
        self,
        send: Callable[[bytes], None],
        encoding: Encoding,
        heartbeat: float,
        lost_after: float,
        promise: float | None = None,
    ) -> None:
        self._send, self.encoding, self._promise = send, encoding, promise
        self.heartbeat, self.lost_after = heartbeat, lost_after
        self.pending: dict[str, Pending] = {}
        self.hello: Message | None = None
        self.heard = self._said = 0.0
        self._count = 0
        self._greeted = False

    def ask(self, message: Message, now: float, timeout: float | None) -> Pending:
        """Send a message that has no id yet."""
        if not self._greeted:
            self._greet()
            self.heard = now
        if not self.pending:
            self.heard = max(self.heard, now)  # nobody listened while nothing was asked
        self._count += 1
        message["id"] = f"{self._count}"
        pending = Pending(message, now, timeout)
        self.pending[pending.id] = pending
        self._out(message)
        return pending

    def abort(self, pending: Pending) -> None:
        """Give up on a request; whatever still comes of it is not kept."""
        if self.pending.pop(pending.id, None) is not None and not pending.ended:
            self._out({"type": "abort", "id": OURS + "abort", "target": pending.id})
        pending.ended = True

    def _greet(self) -> None:
        self._greeted = True
        greeting = {
            "type": "hello",
            "id": OURS + "hello",
            "encoding": self.encoding,
            "batch": True,
            "heartbeat_s": self._promise,
        }
        self._send(ENCODERS["json"](greeting))

    def _out(self, message: Message) -> None:
        self._send(ENCODERS[self.encoding](message))

    def receive(self, frames: Sequence[bytes], now: float) -> None:
        """A multipart message: the version, and a frame with one message or several."""
        self.heard = now
        for message in unpack_all(frames[1], self.encoding):
            kind, id = message.get("type"), message.get("id")
            if kind in ("hello", "pong"):
                self._met(message, now)
            if id is None:
                if kind == "error" and message.get("code") == "malformed" and self.encoding != "json":
                    self._greet()  # a new session does not know our encoding yet
                continue
            pending = self.pending.get(id)
            if pending is None:
                continue
            pending.inbox.append(message)
            pending.got, pending.since = True, now
            if is_terminal(message) or kind in REPLIES:
                pending.ended = True
                del self.pending[id]
            pending.news()

    def _met(self, message: Message, now: float) -> None:
        """Who answers: the session that we know, or a new one."""
        before = self.hello["session"] if self.hello is not None else None
        if message["type"] == "hello":
            self.hello = message
        if before is None or message["session"] == before:
            return
        if message["type"] == "pong":
            self.hello = {**(self.hello or {}), "session": message["session"]}
            self._greet()
        for pending in list(self.pending.values()):
            if not pending.got:
                pending.since = now
                self._out(pending.message)
            else:
                self._fail(pending, Lost("the connection was replaced while the answer was half here"))

    def _fail(self, pending: Pending, failure: ClientError) -> None:
        pending.failure, pending.ended = failure, True
        self.pending.pop(pending.id, None)
        pending.news()

    def tick(self, now: float) -> None:
        """Ping a silent server; end what has waited too long."""
        if not self.pending:
            return
        silent = now - max(self.heard, 0.0)
        if silent >= self.lost_after:
            for pending in list(self.pending.values()):
                self._fail(pending, Lost(f"no sign of the server for {silent:.1f} s"))
            return
        if now - self._said >= self.heartbeat:
            self._said = now
            with suppress(Lost):  # nothing goes out now; `lost_after` decides when that is the end
                self._send(ENCODERS["json"]({"type": "ping", "id": OURS + "ping"}))
        for pending in list(self.pending.values()):
            if pending.timeout is not None and now - pending.since >= pending.timeout:
                late = TooLate(f"no progress for {now - pending.since:.1f} s")
                self.abort(pending)
                pending.failure = late
                pending.news()
