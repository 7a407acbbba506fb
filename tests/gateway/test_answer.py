"""SGLang's outputs become deltas and one terminal; what waits for a client joins and is counted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_runtime.gateway.answer import Answer
from glm_runtime.gateway.protocol import Generate, is_terminal, unpack_all
from glm_runtime.gateway.session import BATCH, Live, Session, size_of

LENGTH = {"type": "length", "length": 3}


def outs(pieces: list[str], cumulative: bool, finish: Any = LENGTH, index: int | None = None) -> list[dict[str, Any]]:
    """SGLang's outputs of these pieces, each of one token, the last with the finish reason."""
    made = []
    for i, piece in enumerate(pieces):
        ids, logprobs = list(range(i + 1)), [[-0.5, j, None] for j in range(i + 1)]
        if not cumulative:
            ids, logprobs = ids[-1:], logprobs[-1:]
        last = i == len(pieces) - 1
        meta = {"id": "inner", "finish_reason": finish if last else None, "output_token_logprobs": logprobs}
        text = "".join(pieces[: i + 1]) if cumulative else piece
        out = {"text": text, "output_ids": ids, "meta_info": meta}
        made.append(out if index is None else out | {"index": index})
    return made


@pytest.mark.parametrize("cumulative", [True, False])
@given(st.lists(st.text(max_size=3), min_size=1, max_size=6))
def test_deltas_join_to_the_text(cumulative: bool, pieces: list[str]) -> None:
    answer = Answer("a", True, cumulative=cumulative)
    messages = [message for out in outs(pieces, cumulative) for message in answer.take(out)]
    *deltas, done = messages
    assert [message["type"] for message in messages] == ["delta"] * len(deltas) + ["done"]
    assert "".join(delta["text"] for delta in deltas) == done["text"] == "".join(pieces)
    assert [id for delta in deltas for id in delta["output_ids"]] == done["output_ids"] == list(range(len(pieces)))
    rows = [row for delta in deltas for row in delta["output_token_logprobs"]]
    assert rows == done["meta_info"]["output_token_logprobs"] and len(rows) == len(pieces)
    assert "id" not in done["meta_info"] and done["finish_reason"] == LENGTH


def test_without_stream_there_is_only_the_end() -> None:
    answer = Answer("a", False)
    messages = [message for out in outs(["x", "y"], True) for message in answer.take(out)]
    assert [message["type"] for message in messages] == ["done"]
    assert messages[0]["text"] == "xy"


def test_n_choices_end_once() -> None:
    answer = Answer("a", True, n=2)
    first, second = outs(["a", "b"], True, index=0), outs(["c", "d", "e"], True, index=1)
    order = [second[0], first[0], first[1], second[1], second[2]]
    messages = [message for out in order for message in answer.take(out)]
    assert [message["type"] for message in messages] == ["delta"] * 5 + ["done"]
    assert [choice["text"] for choice in messages[-1]["choices"]] == ["ab", "cde"]
    for index, text in enumerate(("ab", "cde")):
        assert "".join(m["text"] for m in messages[:-1] if m["index"] == index) == text


@pytest.mark.parametrize(
    ("finish", "kind", "code"),
    [
        ({"type": "abort", "message": "gone"}, "aborted", None),
        ({"type": "abort", "message": "bad", "status_code": 400}, "error", "bad_request"),
        ({"type": "abort", "message": "full", "status_code": 503}, "error", "overloaded"),
        ({"type": "abort", "message": "oh", "status_code": 500}, "error", "engine"),
    ],
)
def test_an_abort_of_the_engine(finish: dict[str, Any], kind: str, code: str | None) -> None:
    for cumulative in (True, False):
        answer = Answer("a", True, cumulative=cumulative)
        made = outs(["x", "y"], cumulative, finish)
        if not cumulative:
            made[-1]["text"] = "xy"  # SGLang repeats the whole text there
        messages = [message for out in made for message in answer.take(out)]
        assert messages[-1]["type"] == kind and messages[-1].get("code") == code
        assert sum(is_terminal(message) for message in messages) == 1


def live(id: str = "a") -> Live:
    return Live(Generate(id, text="x"), "rid", Answer(id, True))


def delta(id: str, text: str, index: int | None = None) -> dict[str, Any]:
    made = {"type": "delta", "id": id, "text": text, "output_ids": [ord(c) for c in text]}
    return made if index is None else made | {"index": index}


def drain(session: Session, count: int | None = None) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    while session.outbox and (count is None or len(made) < count):
        frame, messages = session.next()
        session.sent(messages)
        made += unpack_all(frame, "json")
    return made


def test_waiting_deltas_join_per_request_and_choice() -> None:
    session, one, two = Session(b"\0", 1 << 20, 0.0), live("a"), live("b")
    for text in "xyz":
        session.put(delta("a", text), one)
        session.put(delta("b", text, 1), two)
    session.put(delta("b", "w", 0), two)
    session.put({"type": "done", "id": "a", "text": "xyz"})
    heard = drain(session)
    assert [(m["id"], m["text"]) for m in heard] == [("a", "xyz"), ("b", "xyz"), ("b", "w"), ("a", "xyz")]
    assert heard[0]["output_ids"] == [120, 121, 122]
    assert session.waiting == 0 and one.tail is None
    session.put(delta("a", "new"), one)
    assert drain(session)[0]["text"] == "new"


def test_sizes() -> None:
    """A delta weighs its text, its ids and its logprobs; what has choices weighs them all."""
    plain = delta("a", "xyz")
    assert size_of(plain) == 96 + 3 + 18
    assert size_of(plain | {"output_token_logprobs": [[-1.0, 5, None]] * 2}) > size_of(plain) + 200
    done = {"type": "done", "id": "a", "choices": [{"index": 0, "text": "x" * 500, "output_ids": [], "meta_info": {}}]}
    assert size_of(done) > 500


def test_what_waits_is_counted() -> None:
    session = Session(b"\0", 4500, 0.0)
    session.put(delta("a", "x" * 500), live())
    assert not session.full
    session.put(delta("b", "x" * 500), live("b"))
    assert session.full
    drain(session)
    assert session.waiting == 0 and not session.full


@given(
    st.lists(st.tuples(st.integers(0, 3), st.text("abc", max_size=3)), max_size=40), st.booleans(), st.integers(1, 5)
)
def test_nothing_is_lost_and_order_is_kept(puts: list[tuple[int, str]], batch: bool, every: int) -> None:
    session = Session(b"\0", 1 << 30, 0.0)
    session.batch = batch
    lives = [live(f"{i}") for i in range(4)]
    heard: list[dict[str, Any]] = []
    for place, (request, text) in enumerate(puts):
        session.put(delta(f"{request}", text), lives[request])
        if place % every == 0:
            heard += drain(session, 1)
    heard += drain(session)
    for request in range(4):
        wanted = "".join(text for who, text in puts if who == request)
        assert "".join(m["text"] for m in heard if m["id"] == f"{request}") == wanted
    assert session.waiting == 0


def test_batches_are_bounded() -> None:
    session = Session(b"\0", 1 << 30, 0.0)
    session.batch = True
    for i in range(BATCH + 5):
        session.put({"type": "pong", "id": f"{i}"})
    assert session.next()[1] == BATCH
    session.sent(BATCH)
    assert session.next()[1] == 5
    session.put_encoded(b"ready")
    session.put({"type": "pong", "id": "last"})
    assert session.next()[1] == 5
    session.sent(5)
    assert session.next() == (b"ready", 1)
