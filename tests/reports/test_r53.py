"""R53 (sglang#4574): grammars that are invalid, endless, too large or lead nowhere; other streams are unharmed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.guard.asking import Neighbour, ask, refused, strict
from tests.ledger.client import drained
from tests.ledger.hall import Hall

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.hall("narrow")]

DEEP = '{"properties": {"a": ' * 80 + "{}" + "}}" * 80
WRONG = [
    ("json_schema", "5"),
    ("json_schema", "[]"),
    ("json_schema", "{"),
    ("json_schema", '{"type": "no such type"}'),
    ("json_schema", '{"type": "string", "pattern": "("}'),
    ("json_schema", '{"$ref": "#"}'),
    ("json_schema", '{"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}'),
    ("json_schema", json.dumps({"description": "x" * (1 << 20)})),
    ("json_schema", DEEP),
    ("json_schema", '{"type": "string", "pattern": "\\u0000"}'),
    ("regex", "("),
    ("regex", "a**"),
    ("regex", "\0"),
    ("ebnf", "root ::="),
    ("ebnf", "root ::= root"),
    ("structural_tag", "{}"),
    ("structural_tag", "[]"),
]


def body(name: str, text: Any, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 20, "temperature": 0, name: text}
    return {"input_ids": [5, 6], "sampling_params": sampling} | more


def test_refused(hall: Hall) -> None:
    server = hall.server("narrow")
    with Neighbour(server, 400):
        for name, text in WRONG:
            for stream in (False, True):
                assert refused(server, "/generate", body(name, text, stream=stream))["field"] == name, text[:50]
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no such type"}}}
        chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "response_format": schema}
        for stream in (False, True):
            assert refused(server, "/v1/chat/completions", chat | {"stream": stream})["field"] == "json_schema"
        two = body("regex", "a")
        two["sampling_params"]["json_schema"] = "{}"
        assert "only one grammar" in refused(server, "/generate", two)["message"]
    drained(server)


def test_a_dead_end_behind_the_first_token(hall: Hall) -> None:
    """What only shows while the text is made ends that request: 400 as a whole, an abort with its reason streamed."""
    server = hall.server("narrow")
    nowhere = 'root ::= "a" b\nb ::= b'
    with Neighbour(server, 150):
        assert refused(server, "/generate", body("ebnf", nowhere))["field"] == "ebnf"
        status, text = ask(server, "/generate", body("ebnf", nowhere, stream=True))
    assert status == 200
    events = [strict(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    ends = [event["meta_info"]["finish_reason"] for event in events if event["meta_info"]["finish_reason"]]
    assert [end["type"] for end in ends] == ["abort"]
    drained(server)


def test_sound_ones_are_served(hall: Hall) -> None:
    server = hall.server("narrow")
    assert server.post("/generate", body("regex", "abc"))["text"] == "abc"
    assert server.post("/generate", body("ebnf", 'root ::= "abc"'))["text"] == "abc"
    recursive = '{"type": "object", "properties": {"x": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}'
    assert server.post("/generate", body("json_schema", recursive))["text"].startswith("{")
