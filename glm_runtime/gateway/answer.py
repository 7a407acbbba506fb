"""SGLang's outputs of one request as messages: deltas, then exactly one terminal. Pure.

    out, out, out(finish_reason) ─> delta, delta, delta + done      text of the deltas, joined == text of done

With n > 1 each output names its choice; `done` comes when all have ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm_runtime.gateway.protocol import Message, error

# Lists of meta_info that grow with the output: a delta carries what is new.
GROWING = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
LEFT_OUT = frozenset({"id", "finish_reason", "weight_version"})
CODES = {400: "bad_request", 429: "overloaded", 503: "overloaded"}


class Choice:
    """One sequence of the answer so far."""

    __slots__ = ("finish", "ids", "meta", "text")

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.meta: dict[str, Any] = {}
        self.finish: dict[str, Any] | None = None


class Answer:
    """Follows one request.

    Args:
        id: the client's request id.
        stream: whether deltas are wanted.
        n: sequences asked for.
        cumulative: whether SGLang's outputs hold everything so far (its default) or only what is new.
    """

    def __init__(self, id: str, stream: bool, n: int = 1, cumulative: bool = True) -> None:
        self.id, self.stream, self.n, self.cumulative = id, stream, n, cumulative
        self.choices = [Choice() for _ in range(n)]
        self.left = n

    def take(self, out: Mapping[str, Any]) -> list[Message]:
        """The messages that this output makes: none, a delta, or the end."""
        place = out.get("index", 0) if self.n > 1 else 0
        choice = self.choices[place]
        if choice.finish is not None:
            return []
        meta = out["meta_info"]
        finish = meta.get("finish_reason")
        text, ids = out.get("text") or "", out.get("output_ids") or []
        growing = {name: meta[name] for name in GROWING if meta.get(name)}
        if self.cumulative:
            new_text, new_ids = text[len(choice.text) :], ids[len(choice.ids) :]
            new = {name: rows[len(choice.meta.get(name, ())) :] for name, rows in growing.items()}
        else:
            if finish is not None and finish.get("type") == "abort" and choice.text and text.startswith(choice.text):
                text, ids = text[len(choice.text) :], []  # an abort repeats the whole text
            new_text, new_ids, new = text, ids, growing
        choice.text += new_text
        choice.ids.extend(new_ids)
        for name, rows in new.items():
            choice.meta.setdefault(name, []).extend(rows)
        made: list[Message] = []
        if self.stream and (new_text or new_ids):
            delta: Message = {"type": "delta", "id": self.id, "text": new_text, "output_ids": list(new_ids)}
            if self.n > 1:
                delta["index"] = place
            if new:
                delta |= new
            made.append(delta)
        if finish is None:
            return made
        choice.finish = dict(finish)
        choice.meta |= {name: value for name, value in meta.items() if name not in LEFT_OUT and name not in GROWING}
        self.left -= 1
        if finish.get("type") == "abort":
            return [*made, self.cut(finish)]
        if self.left == 0:
            made.append(self.done())
        return made

    def done(self) -> Message:
        """The terminal of a request that came to its end."""
        made: Message = {"type": "done", "id": self.id}
        if self.n == 1:
            return made | self._choice(self.choices[0])
        return made | {"choices": [{"index": i} | self._choice(choice) for i, choice in enumerate(self.choices)]}

    def _choice(self, choice: Choice) -> Message:
        return {
            "text": choice.text,
            "output_ids": choice.ids,
            "finish_reason": choice.finish,
            "meta_info": choice.meta,
        }

    def cut(self, finish: Mapping[str, Any]) -> Message:
        """The terminal of a request that SGLang ended: an error where it names a status, else aborted."""
        reason = str(finish.get("message") or "aborted")
        status = finish.get("status_code")
        if status is None:
            return self.aborted(reason)
        return error(self.id, CODES.get(int(status), "engine"), reason)

    def aborted(self, reason: str) -> Message:
        """The terminal of a request that was ended on purpose."""
        return {
            "type": "aborted",
            "id": self.id,
            "reason": reason,
            "completion_tokens": sum(len(choice.ids) for choice in self.choices),
        }
