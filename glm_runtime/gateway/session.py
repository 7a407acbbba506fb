"""One client as the gateway sees it: its requests in flight and the answers that wait for it. Pure.

    put(delta) ──> outbox ──next()──> bytes ──sent──> done()
                     │ a delta joins the waiting one of its request, so that a slow reader costs few messages
                     └ beyond `limit` bytes: a stream ends with an error, a question is discarded and counted

Terminal messages are always kept: their number is bounded by the requests in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

from glm_runtime.gateway.answer import GROWING, Answer
from glm_runtime.gateway.protocol import ENCODERS, Encoding, Generate, Message

PLAIN_DELTA = 4  # fields of a delta without logprobs; short messages have no more
BATCH = 64  # messages of one frame at most
STRIKES = 64  # malformed messages that are answered; what comes after them is not read


class Live:
    """A request in flight.

    Attributes:
        ask: what the client said. rid: its id inside the server. answer: what has come so far.
        task: runs it. tail: its delta that waits in the outbox. ended: its terminal has been put.
    """

    __slots__ = ("answer", "ask", "ended", "rid", "tail", "task")

    def __init__(self, ask: Generate, rid: str, answer: Answer) -> None:
        self.ask, self.rid, self.answer = ask, rid, answer
        self.task: Any = None
        self.tail: Item | None = None
        self.ended = False


class Item:
    """A message that waits."""

    __slots__ = ("live", "message", "size")

    def __init__(self, message: Message | bytes, size: int, live: Live | None) -> None:
        self.message, self.size, self.live = message, size, live


def size_of(message: Mapping[str, Any]) -> int:
    """About how many bytes a message takes."""
    size = 96 + len(message.get("text") or "") + 6 * len(message.get("output_ids") or ())
    if len(message) == PLAIN_DELTA and message.get("type") == "delta":
        return size
    for holder in (message, message.get("meta_info") or {}):
        for name in (*GROWING, "input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
            for row in holder.get(name) or ():
                size += 48 * (len(row) if isinstance(row, list | tuple) else 1)
    for choice in message.get("choices") or ():
        size += size_of(choice)
    return size


class Session:
    """One client.

    Args:
        identity: its routing id at the ROUTER.
        limit: bytes that may wait for it.
        now: seconds, monotonic.
    """

    def __init__(self, identity: bytes, limit: int, now: float) -> None:
        self.identity, self.limit = identity, limit
        self.heard = now
        self.encoding: Encoding = "json"
        self.batch = False
        self.heartbeat_s: float | None = None
        self.live: dict[str, Live] = {}
        self.outbox: deque[Item] = deque()
        self.waiting = 0  # bytes in the outbox
        self.discarded = 0  # messages not answered since the last notice
        self.strikes = 0
        self.blocked = False  # the socket took nothing at the last attempt

    @property
    def full(self) -> bool:
        """Whether more than `limit` bytes wait."""
        return self.waiting > self.limit

    @property
    def muted(self) -> bool:
        """Whether it has sent too many malformed messages to be read any more."""
        return self.strikes >= STRIKES

    def put(self, message: Message, live: Live | None = None) -> None:
        """Let a message wait; a delta joins its request's waiting one."""
        size = size_of(message)
        self.waiting += size
        if live is not None and message.get("type") == "delta":
            tail = live.tail
            waits = tail.message if tail is not None else None
            if tail is not None and isinstance(waits, dict) and waits.get("index") == message.get("index"):
                join(waits, message)
                tail.size += size
                return
            item = Item(message, size, live)
            live.tail = item
        else:
            item = Item(message, size, None)
        self.outbox.append(item)

    def put_encoded(self, message: bytes) -> None:
        """Let bytes wait that are a message already."""
        self.waiting += len(message)
        self.outbox.append(Item(message, len(message), None))

    def next(self) -> tuple[bytes, int]:
        """The frame to send next and how many messages it holds; they stay until `sent`."""
        encode = ENCODERS[self.encoding]
        first = self.outbox[0].message
        if isinstance(first, bytes):
            return first, 1
        if not self.batch or len(self.outbox) == 1:
            return encode(first), 1
        messages: list[Message] = []
        for item in islice(self.outbox, BATCH):
            if isinstance(item.message, bytes):
                break
            messages.append(item.message)
        return encode(messages), len(messages)

    def sent(self, count: int) -> None:
        """The first `count` messages are out."""
        for _ in range(count):
            item = self.outbox.popleft()
            self.waiting -= item.size
            if item.live is not None and item.live.tail is item:
                item.live.tail = None


def join(first: Message, second: Message) -> None:
    """Append a delta to the one before it."""
    first["text"] += second["text"]
    first["output_ids"].extend(second["output_ids"])
    for name in GROWING:
        if name in second:
            first.setdefault(name, []).extend(second[name])
