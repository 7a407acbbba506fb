"""Messages and their bytes: what is read, what is refused and how, what an error repeats."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_runtime.gateway.protocol import (
    ENCODERS,
    Bad,
    Generate,
    Hello,
    Ping,
    error,
    is_terminal,
    only_plain,
    read,
    sendable,
    unpack,
)


def refused(message: Any, encoding: str = "json") -> Bad:
    frame = orjson.dumps(message) if encoding == "json" else msgspec.msgpack.encode(message)
    with pytest.raises(Bad) as raised:
        read(frame, encoding)  # type: ignore[arg-type]
    return raised.value


def test_requests() -> None:
    assert read(b'{"type":"ping","id":"a"}', "json") == Ping("a")
    assert read(b'{"type":"hello","id":"a","encoding":"msgpack"}', "json") == Hello("a", "msgpack")
    asked = {"type": "generate", "id": "a", "input_ids": [1, 2], "sampling_params": {"n": 2}, "stream": True}
    wanted = Generate("a", input_ids=[1, 2], sampling_params={"n": 2}, stream=True)
    assert read(orjson.dumps(asked), "json") == wanted
    assert read(msgspec.msgpack.encode(asked), "msgpack") == wanted
    assert read(orjson.dumps(asked), "msgpack") == wanted


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"input_ids": [1.5]}, "input_ids[0]"),
        ({"input_ids": [True]}, "input_ids[0]"),
        ({"input_ids": [[1]]}, "input_ids[0]"),
        ({"input_ids": ["1"]}, "input_ids[0]"),
        ({"text": 5}, "text"),
        ({"text": "a", "stream": 1}, "stream"),
        ({"text": "a", "priority": "1"}, "priority"),
        ({"text": "a", "top_logprobs_num": 1.5}, "top_logprobs_num"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"messages": "hi"}, "messages"),
        ({"text": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
    ],
)
@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_a_bad_field_is_named_and_ends_the_request(fields: dict[str, Any], field: str, encoding: str) -> None:
    bad = refused({"type": "generate", "id": "r"} | fields, encoding)
    assert (bad.code, bad.field, bad.id) == ("bad_request", field, "r")
    message = bad.message()
    assert is_terminal(message) and message["field"] == field
    if field == "priority":
        assert (message["value"], message["bound"]) == ("1", "`int | null`")
    if field == "input_ids[0]" and fields["input_ids"] == [1.5]:
        assert (message["value"], message["bound"]) == (1.5, "`int`")


@pytest.mark.parametrize("id", [None, 5, "", "x" * 129, ["r"]])
def test_a_bad_id_ends_nothing(id: Any) -> None:
    bad = refused({"type": "generate", "id": id, "text": "x"})
    assert bad.id is None and not is_terminal(bad.message())


def test_unknown_fields_and_verbs_are_refused() -> None:
    assert refused({"type": "generate", "id": "a", "text": "x", "custom_logit_processor": "80"}).code == "bad_request"
    assert refused({"type": "shutdown", "id": "a"}).field == "type"
    assert refused({"id": "a"}).code == "bad_request"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_r49_a_number_that_is_none_is_refused(value: float) -> None:
    """R49: NaN and infinity, in msgpack, which can carry them, and in JSON, which cannot."""
    for where in ({"sampling_params": {"temperature": value}}, {"sampling_params": {"a": {"b": [value]}}}):
        bad = refused({"type": "generate", "id": "r", "text": "x"} | where, "msgpack")
        assert bad.code == "bad_request" and "not finite" in str(bad)
        assert orjson.loads(ENCODERS["json"](bad.message()))["id"] == "r"
        assert msgspec.msgpack.decode(ENCODERS["msgpack"](bad.message()))["id"] == "r"
    with pytest.raises(Bad):
        read(b'{"type":"generate","id":"r","text":"x","sampling_params":{"temperature":NaN}}', "json")


def test_msgpack_may_carry_nothing_that_json_has_not() -> None:
    import datetime

    for alien in (b"bytes", datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), msgspec.msgpack.Ext(1, b"x"), {1: 2}):
        bad = refused({"type": "generate", "id": "r", "text": "x", "sampling_params": {"a": alien}}, "msgpack")
        assert bad.id == "r" and bad.field is not None and bad.field.startswith("sampling_params")


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(frame: bytes) -> None:
    for encoding in ("json", "msgpack"):
        try:
            read(frame, encoding)  # type: ignore[arg-type]
        except Bad as bad:
            assert unpack(ENCODERS[encoding](bad.message()), encoding)["type"] == "error"  # type: ignore[index, arg-type]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["type", "id", "text", "input_ids", "sampling_params", "priority", "x"]), JSON))
def test_any_object_is_read_or_refused(message: dict[str, Any]) -> None:
    message = {"type": "generate", "id": "r"} | message
    try:
        frame = msgspec.msgpack.encode(message)
    except OverflowError:
        return
    try:
        read(frame, "msgpack")
    except Bad as bad:
        assert orjson.loads(ENCODERS["json"](bad.message()))["type"] == "error"


@given(JSON)
def test_an_error_repeats_any_value_in_both_encodings(value: Any) -> None:
    message = error("a", "bad_request", "no", "field", value, value)
    for encode in ENCODERS.values():
        assert encode(message)
    shown = sendable(value)
    only_plain(shown)
    assert len(orjson.dumps(shown)) < 4000
