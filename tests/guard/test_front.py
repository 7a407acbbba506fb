"""The HTTP layer of the guard around small ASGI apps: what waits, what is replaced, who is told of a hang-up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from glm_runtime.guard.front import HELD_EVENTS, Front, from_validation
from glm_runtime.guard.limits import GuardFlags
from glm_runtime.guard.refusal import Refusal
from glm_runtime.guard.visit import Visit, current

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"x", b"y")],
}
REFUSAL = Refusal("top_k", -2, "-1 or more")


def part(text: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


def visit() -> Visit:
    found = current.get()
    assert found is not None
    return found


def run(app: Any, body: list[bytes] | None = None, path: str = "/generate", length: int = 0) -> list[Message]:
    """What an app's client gets; it sends `body` in parts, then stays."""

    async def session() -> list[Message]:
        parts = list(body or [b"{}"])
        sent: list[Message] = []

        async def receive() -> Message:
            if parts:
                now = parts.pop(0)
                return {"type": "http.request", "body": now, "more_body": bool(parts)}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"content-length", str(length).encode())] if length else []
        await Front(app)({"type": "http", "path": path, "headers": headers}, receive, send)
        return sent

    return asyncio.run(session())


def refused(sent: list[Message], status: int = 400) -> Message:
    assert [m["type"] for m in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == status
    headers = dict(sent[0]["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == str(len(sent[1]["body"])).encode()
    return dict(json.loads(sent[1]["body"]))


def test_a_stream_begins_with_what_the_scheduler_says() -> None:
    seen: list[int] = []

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await send(START)
        await send(part(b"created"))
        visit().admitted = True
        await send(part(b"token"))
        await send(part(b"", False))
        seen.append(1)

    sent = run(app)
    assert [m.get("body") for m in sent] == [None, b"created", b"token", b""]
    assert seen == [1]


def test_a_refusal_takes_the_place_of_a_stream() -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await send(START)
        await send(part(b"created"))
        visit().refusal = REFUSAL
        await send(part(b"data: the endpoint's own words"))
        await send(part(b"", False))

    sent = run(app)
    answer = refused(sent)
    assert answer["error"]["field"] == "top_k"
    assert dict(sent[0]["headers"])[b"x"] == b"y", "other layers' headers stay"
    assert refused(run(app, path="/v1/messages"))["type"] == "error"


def test_a_refusal_that_is_raised_or_comes_at_the_end() -> None:
    async def raises(scope: Any, receive: Receive, send: Send) -> None:
        raise REFUSAL

    async def late(scope: Any, receive: Receive, send: Send) -> None:
        await send(START)
        visit().refusal = REFUSAL

    async def stumbles(scope: Any, receive: Receive, send: Send) -> None:
        raise TypeError("unexpected keyword argument 'bogus'")

    assert refused(run(raises))["error"]["value"] == -2
    assert refused(run(late))["error"]["field"] == "top_k"
    assert "bogus" in refused(run(stumbles))["error"]["message"]


def test_what_has_begun_goes_on() -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await send(START)
        visit().admitted = True
        await send(part(b"token"))
        visit().refusal = REFUSAL
        await send(part(b"end", False))

    assert [m.get("body") for m in run(app)] == [None, b"token", b"end"]


def test_a_stream_of_nobody_does_not_wait_for_ever() -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await send(START)
        for _ in range(HELD_EVENTS + 5):
            await send(part(b"x"))
        raise RuntimeError("stop")

    sent: list[Message] = []

    async def session() -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await Front(app)({"type": "http", "path": "/", "headers": []}, receive, send)

    with pytest.raises(RuntimeError, match="stop"):
        asyncio.run(session())
    assert len(sent) == HELD_EVENTS + 6


def test_bodies_that_are_too_large() -> None:
    most = GuardFlags().guard_max_body_mb << 20

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(part(b"read", False))

    assert refused(run(app, length=most + 1), 413)["error"]["field"] == "body"
    piece = b"x" * (most // 4 + 1)
    assert refused(run(app, [piece] * 4), 413)["error"]["field"] == "body"
    assert run(app, [piece] * 3)[-1]["body"] == b"read"


def test_a_hang_up_aborts_what_is_in_flight() -> None:
    aborted: list[str] = []

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"{}"
        visit().note("a", lambda: aborted.append("a"))
        assert (await receive())["type"] == "http.disconnect"
        visit().note("b", lambda: aborted.append("b"))

    async def session() -> None:
        messages: list[Message] = [
            {"type": "http.request", "body": b"{}", "more_body": False},
            {"type": "http.disconnect"},
        ]

        async def receive() -> Message:
            return messages.pop(0)

        async def send(message: Message) -> None:
            raise AssertionError(message)

        await Front(app)({"type": "http", "path": "/", "headers": []}, receive, send)

    asyncio.run(session())
    assert aborted == ["a", "b"]


def test_validation_errors_name_the_field() -> None:
    found = from_validation(
        [{"loc": ("body", "messages", 0, "role"), "msg": "Field required", "type": "missing", "input": {}}]
    )
    assert (found.field, found.bound) == ("messages[0].role", "Field required")
    broken = {"type": "json_invalid", "loc": ("body", 5), "msg": "x", "input": {}, "ctx": {"error": "bad"}}
    assert from_validation([broken]).field == "body"
    assert str(from_validation([]))
