"""Messages of the gateway and their bytes. Pure: no socket, no SGLang.

frame 1   TAG, the protocol's version
frame 2   one message, an object with a "type": JSON; msgpack once a hello has said so
          from the server, where the hello asked for "batch": or an array of messages

client    hello generate abort stats policy ping
server    hello delta done error aborted abort stats policy pong heartbeat
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import orjson

TAG = b"glm/1"
VERSION = 1
ID_LIMIT = 128  # characters of an id
SHOWN = 80  # characters of a refused value that an error repeats
HEARTBEAT_RANGE = (0.1, 3600.0)  # seconds

Encoding = Literal["json", "msgpack"]
Message = dict[str, Any]
Encodable = Mapping[str, Any] | Sequence[Mapping[str, Any]]  # a message, or several


class Hello(msgspec.Struct, tag="hello", forbid_unknown_fields=True, frozen=True):
    """Settings of this connection; may be sent again.

    Attributes:
        encoding: of all messages after this one, both ways.
        batch: whether an array of messages may come in place of one.
        heartbeat_s: the client will say something at least this often while it waits; None: no promise.
    """

    id: str
    encoding: Encoding = "json"
    batch: bool = False
    heartbeat_s: float | None = None


class Generate(msgspec.Struct, tag="generate", forbid_unknown_fields=True, frozen=True):
    """One prompt; the fields but `id` and `messages` are SGLang's of POST /generate.

    Attributes:
        text, input_ids, messages: exactly one of them: text, token ids, or chat messages for the model's template.
        chat_template_kwargs: for the template; with `messages` only.
    """

    id: str
    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling_params: dict[str, Any] = {}
    stream: bool = False
    priority: int | None = None
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class Abort(msgspec.Struct, tag="abort", forbid_unknown_fields=True, frozen=True):
    """End the request whose id is exactly `target`."""

    id: str
    target: str


class Stats(msgspec.Struct, tag="stats", forbid_unknown_fields=True, frozen=True):
    """Ask for the gateway's counters."""

    id: str


class Policy(msgspec.Struct, tag="policy", forbid_unknown_fields=True, frozen=True):
    """Ask for what the scheduler process runs, as GET /policy."""

    id: str


class Ping(msgspec.Struct, tag="ping", forbid_unknown_fields=True, frozen=True):
    """Ask for a pong."""

    id: str


Request = Hello | Generate | Abort | Stats | Policy | Ping


class Bad(ValueError):
    """A message that is refused.

    Attributes:
        code: kind of the error, as sent. field, value, bound: what is wrong with it, where it is one field.
        id: id of the request that this ends; None: it ends none.
    """

    def __init__(
        self,
        code: str,
        message: str,
        field: str | None = None,
        value: Any = None,
        bound: Any = None,
        id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.field, self.value, self.bound, self.id = code, field, value, bound, id

    def message(self) -> Message:
        """The `error` message."""
        return error(self.id, self.code, str(self), self.field, self.value, self.bound)


# ---- bytes ---------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in a message")


_msgpack = msgspec.msgpack.Encoder(enc_hook=_plain)


def to_json(message: Encodable) -> bytes:
    """JSON; a float that is not finite becomes null."""
    return orjson.dumps(message, default=_plain, option=orjson.OPT_NON_STR_KEYS)


def to_msgpack(message: Encodable) -> bytes:
    """msgpack."""
    return _msgpack.encode(message)


ENCODERS: Mapping[Encoding, Callable[[Encodable], bytes]] = {
    "json": to_json,
    "msgpack": to_msgpack,
}


def spoken(frame: bytes, encoding: Encoding) -> Encoding:
    """Encoding of a frame: JSON is understood on every connection, for no msgpack map or array begins as JSON's do."""
    return "json" if frame[:1] in (b"{", b"[") else encoding


def unpack(frame: bytes, encoding: Encoding) -> Message:
    """The object in a frame. Raises Bad ("malformed")."""
    encoding = spoken(frame, encoding)
    try:
        value = orjson.loads(frame) if encoding == "json" else msgspec.msgpack.decode(frame)
    except (ValueError, RecursionError, msgspec.DecodeError) as problem:
        raise Bad("malformed", f"frame 2 is no {encoding}: {shown(problem)}") from None
    if not isinstance(value, dict):
        raise Bad("malformed", f"frame 2 is no object but {type(value).__name__}")
    return value


def unpack_all(frame: bytes, encoding: Encoding) -> list[Message]:
    """The messages in a frame of the server: one, or an array of them."""
    value = orjson.loads(frame) if spoken(frame, encoding) == "json" else msgspec.msgpack.decode(frame)
    return value if isinstance(value, list) else [value]


_PATH = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)


def read(frame: bytes, encoding: Encoding) -> Request:
    """The request in a frame, its fields of the right types. Raises Bad naming the field.

    The error carries the request's id where the message is a `generate` that has a usable one: it ends that request.
    """
    value = unpack(frame, encoding)
    own = value.get("id")
    own = own if value.get("type") == "generate" and isinstance(own, str) and 0 < len(own) <= ID_LIMIT else None
    try:
        if spoken(frame, encoding) == "msgpack":
            only_plain(value)
        request = cast(Request, msgspec.convert(value, Request))
        _check(request)
    except msgspec.ValidationError as problem:
        found = _PATH.match(str(problem))
        text, path = (found.group(1), found.group(2)) if found else (str(problem), None)
        bound = text.removeprefix("Expected ").partition(", got")[0]
        raise Bad("bad_request", shown(text, 200), path or None, _at(value, path or ""), bound, own) from None
    except RecursionError:
        raise Bad("malformed", "frame 2 is nested too deeply", id=own) from None
    except Bad as problem:
        problem.id = own
        raise
    return request


def _at(value: Any, path: str) -> Any:
    """What stands in a message at msgspec's `path` (a.b[2].c); None where nothing does."""
    for name, place in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            value = value[int(place)] if place else value[name]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _check(request: Request) -> None:
    if not 0 < len(request.id) <= ID_LIMIT:
        raise Bad("bad_request", f"id: 1 to {ID_LIMIT} characters are needed", "id", request.id, ID_LIMIT)
    if isinstance(request, Hello) and request.heartbeat_s is not None:
        least, most = HEARTBEAT_RANGE
        if not least <= request.heartbeat_s <= most:
            text = f"heartbeat_s: {least:g} to {most:g} seconds are possible"
            raise Bad("bad_request", text, "heartbeat_s", request.heartbeat_s, list(HEARTBEAT_RANGE))
    if isinstance(request, Generate):
        given = [name for name in ("text", "input_ids", "messages") if getattr(request, name) is not None]
        if len(given) != 1:
            said = " and ".join(given) or "none of them"
            raise Bad("bad_request", f"exactly one of text, input_ids and messages is needed, not {said}", "text", said)
        if request.messages is None and request.chat_template_kwargs is not None:
            text = "chat_template_kwargs goes with messages only"
            raise Bad("bad_request", text, "chat_template_kwargs", given[0], "messages")


def only_plain(value: Any, path: str = "") -> None:
    """Raise Bad unless `value` is made of what JSON has: msgpack can carry more (bytes, dates, NaN)."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise Bad("bad_request", f"{path or 'message'}: a key is no string", path or None, key)
            only_plain(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            if type(item) is not int:
                only_plain(item, f"{path}[{place}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise Bad("bad_request", f"{path}: {value} is not finite", path, str(value), "a finite number")
    elif value is not None and not isinstance(value, str | bool | int):
        raise Bad("bad_request", f"{path}: {type(value).__name__} is no JSON type", path, type(value).__name__)


# ---- answers -------------------------------------------------------------------------------------------------------


def shown(value: object, limit: int = SHOWN) -> str:
    """Text of a value on one line, cut."""
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def sendable(value: Any) -> Any:
    """`value` as an error may repeat it: small, and possible in both encodings."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) <= 8:
        return [sendable(item) for item in value]
    return shown(value if isinstance(value, str) else repr(value))


def error(
    id: str | None, code: str, message: str, field: str | None = None, value: Any = None, bound: Any = None
) -> Message:
    """An `error`: terminal for the request `id`; with `id` None it is about a message and ends no request."""
    made: Message = {"type": "error", "id": id, "code": code, "message": message}
    if field is not None:
        made |= {"field": field, "value": sendable(value), "bound": sendable(bound)}
    return made


TERMINAL = frozenset({"done", "error", "aborted"})


def is_terminal(message: Mapping[str, Any]) -> bool:
    """Whether this ends the request that its `id` names."""
    return message.get("type") in TERMINAL and message.get("id") is not None
