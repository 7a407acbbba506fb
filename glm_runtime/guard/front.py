"""The guard at the HTTP server: an ASGI layer around SGLang's app.

    refused    400 with {"error": {"message", "field", "value", "bound"}}, also where the endpoint streams: the first
               bytes of an event stream wait until the request has an answer or is refused
    too large  413 before the body is read to its end
    raised     an endpoint that raises answers JSON, never a bare text
    hung up    the client's requests are aborted at once, whether the endpoint looks at the connection or not

One reader of the connection: the layer reads ahead of the app, and hands messages on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from glm_runtime import config
from glm_runtime.guard.limits import GuardFlags
from glm_runtime.guard.refusal import Refusal
from glm_runtime.guard.visit import Visit, current

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

HELD_EVENTS = 64  # parts of an event stream that wait for the request's fate
STREAMS = (b"text/event-stream", b"application/x-ndjson")
CLIENT_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    OverflowError,
    RecursionError,
)


class Front:
    """ASGI middleware; one `Visit` a request."""

    def __init__(self, app: App) -> None:
        self.app = app
        asked = config.asked()
        self.most = GuardFlags.from_knobs(asked.knobs if asked else {}).guard_max_body_mb << 20

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        visit = Visit()
        token = current.set(visit)
        line = Line(receive, visit, self.most)
        answer = Answer(send, visit, scope.get("path", ""))
        try:
            if line.announced(scope) > self.most:
                await answer.refuse(line.too_large(line.announced(scope)))
                return
            await self.app(scope, line.receive, answer.send)
            await answer.end()
        except TooLarge as error:
            await answer.refuse(error.refusal)
        except Refusal as refusal:
            await answer.refuse(refusal)
        except CLIENT_ERRORS as error:
            if answer.begun:
                raise
            if visit.gone:
                return  # nobody is there to be told
            logger.exception("glm_runtime: an endpoint could not read its request")
            said = f"{type(error).__name__}: {error}"
            await answer.refuse(Refusal("request", said, "a request that this endpoint can read"))
        finally:
            current.reset(token)
            await line.close()


class TooLarge(Exception):
    """The body outgrew --guard-max-body-mb while it was read."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Line:
    """The connection, read by one task from the end of the body on, so that a hang-up is seen at once."""

    def __init__(self, receive: Receive, visit: Visit, most: int) -> None:
        self._receive = receive
        self._visit = visit
        self._most = most
        self._seen = 0
        self._watch: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()

    @staticmethod
    def announced(scope: MutableMapping[str, Any]) -> int:
        """Content-Length of the request; 0 where there is none."""
        for name, value in scope.get("headers", ()):
            if name == b"content-length" and value.isdigit():
                return int(value)
        return 0

    def too_large(self, size: int) -> Refusal:
        """Why a body of `size` bytes is refused."""
        return Refusal("body", f"{size} bytes", f"at most {self._most} bytes (--guard-max-body-mb)", status_code=413)

    async def receive(self) -> Message:
        """What the app receives: the body, then nothing until the client hangs up."""
        if self._watch is not None:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._visit.hang_up()
            return message
        self._seen += len(message.get("body", b""))
        if self._seen > self._most:
            # NOTE: FastAPI makes a 400 of what is raised here; the visit keeps what it was.
            self._visit.refusal = self.too_large(self._seen)
            raise TooLarge(self._visit.refusal)
        if not message.get("more_body", False):
            self._watch = asyncio.create_task(self._wait())
        return message

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._gone.set()
        self._visit.hang_up()

    async def close(self) -> None:
        """The request is over."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)


class Answer:
    """The response, held back until it is clear that it is not a refusal."""

    def __init__(self, send: Send, visit: Visit, path: str) -> None:
        self._send = send
        self._visit = visit
        self._path = path
        self._held: list[Message] = []
        self._stream = False
        self.begun = False  # something has gone out
        self._refused = False

    async def send(self, message: Message) -> None:
        """What the app sends."""
        if self._refused:
            return
        if self.begun:
            await self._send(message)
            return
        if self._visit.refusal is not None:
            await self.refuse(self._visit.refusal)
            return
        self._held.append(message)
        if message["type"] == "http.response.start":
            kind = dict(self._headers()).get(b"content-type", b"")
            self._stream = kind.startswith(STREAMS)
            return
        last = not message.get("more_body", False)
        if last or not self._stream or self._visit.admitted or len(self._held) > HELD_EVENTS:
            await self.end()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the held start: the app's, those of its CORS layer among them."""
        return [(bytes(k), bytes(v)) for m in self._held[:1] for k, v in m.get("headers", ())]

    async def end(self) -> None:
        """Let go of what is held."""
        if self._visit.refusal is not None and not self.begun:
            await self.refuse(self._visit.refusal)
        held, self._held = self._held, []
        for message in held:
            self.begun = True
            await self._send(message)

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with the refusal, unless something else has gone out already."""
        if self.begun or self._refused:
            return
        kept = [pair for pair in self._headers() if not pair[0].startswith(b"content-")]
        self._refused, self._held = True, []
        body = json.dumps(envelope(refusal, self._path), ensure_ascii=False).encode()
        headers = [*kept, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": refusal.status_code, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def envelope(refusal: Refusal, path: str) -> dict[str, Any]:
    """The JSON of a refusal, with what clients of this endpoint's protocol look for beside it."""
    found, status = refusal.as_dict(), refusal.status_code
    kind = "invalid_request_error" if status < 500 else "overloaded_error"
    found["error"] |= {"type": kind, "param": refusal.field, "code": status}
    if path.startswith("/v1/messages"):
        return {"type": "error"} | found
    return {"object": "error", "message": str(refusal), "type": kind, "code": status} | found


def from_validation(errors: list[Any]) -> Refusal:
    """The first of pydantic's errors about a request's JSON."""
    if not errors:
        return Refusal.because("the request does not read")
    where = [str(part) for part in errors[0].get("loc", ()) if part not in ("body", "query")]
    field = where[0] + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in where[1:]) if where else None
    said = str(errors[0].get("msg", "does not read")).removeprefix("Value error, ")
    reason = errors[0].get("ctx", {}).get("error")
    if errors[0].get("type") == "json_invalid":
        return Refusal.because(f"the body is no valid JSON ({reason}, byte {field})", "body")
    return Refusal(field, errors[0].get("input"), said, said=f"{field or 'the body'}: {said}")
