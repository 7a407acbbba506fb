"""After an acknowledged abort nothing more is said."""

from __future__ import annotations

from typing import Any

from glm_runtime.guard.silence import settle


def output(tokens: int, finish: Any, name: str = "a") -> dict[str, Any]:
    meta = {"id": name, "finish_reason": finish, "completion_tokens": tokens, "output_token_logprobs": [1] * tokens}
    return {"text": "x" * tokens, "output_ids": [5] * tokens, "meta_info": meta}


LENGTH, ABORT = {"type": "length", "length": 1}, {"type": "abort", "message": "Aborted"}


def test_nobody_aborted() -> None:
    spoken: set[str] = set()
    part = output(1, None)
    assert settle(part, {}, spoken, True)
    assert (part, spoken) == (output(1, None), {"a"})


def test_stream_before_the_first_part() -> None:
    spoken: set[str] = set()
    assert not settle(output(1, None), {"a"}, spoken, True)
    last = output(2, LENGTH)
    assert settle(last, {"a"}, spoken, True)
    assert (last["text"], last["output_ids"], last["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["output_token_logprobs"] == []


def test_stream_that_has_begun_goes_on_to_its_end() -> None:
    spoken = {"a"}
    last = output(5, ABORT)
    assert settle(last, {"a"}, spoken, True)
    assert last == output(5, ABORT)


def test_whole_answer() -> None:
    one, many = output(1, ABORT), output(7, ABORT)
    assert settle([one, many], {"a"}, set(), False)
    assert one["output_ids"] == []
    assert many == output(7, ABORT)
