"""What one simulated step is: its rows for the cost model, its tokens for the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from glm_runtime.simulate.req import Req


@dataclass(slots=True)
class Shape:
    """Work of one step.

    Attributes:
        prefill_rows, prefill_pairs: new prompt rows, and the keys that they see in all.
        chosen: the same with no more than index_topk keys a row.
        contexts: summed contexts of prompts longer than index_topk.
        chunks: prompts in it.
        decode_rows, decode_context: decoding requests and the keys that they see in all.
        decode_chosen: the same with no more than index_topk keys each.
    """

    prefill_rows: int = 0
    prefill_pairs: int = 0
    chosen: int = 0
    contexts: int = 0
    chunks: int = 0
    decode_rows: int = 0
    decode_context: int = 0
    decode_chosen: int = 0

    def add_prompt(self, start: int, rows: int, topk: int) -> None:
        """Rows [start, start + rows) of a prompt."""
        end = start + rows
        self.prefill_rows += rows
        self.prefill_pairs += rows * start + rows * (rows + 1) // 2
        growing = min(max(topk - start, 0), rows)
        self.chosen += growing * start + growing * (growing + 1) // 2 + (rows - growing) * topk
        self.chunks += 1
        if end > topk:
            self.contexts += end

    @property
    def tokens(self) -> int:
        """Rows in all."""
        return self.prefill_rows + self.decode_rows


@dataclass(slots=True)
class Plan:
    """One step that a scheduler decided.

    Attributes:
        number: counts the steps of a replica, from 1.
        shape: its work.
        mode: "decode", "extend" or "mixed", as the step record names it.
        singles: requests that get a token and are told one by one, with the step of their token before (0: none).
        steady: further rows that get a token, each of which got one in step `steady_since` as well.
        rows: request index -> rows; filled only where steps are recorded.
        inside: what the scheduler needs when the result comes.
    """

    number: int
    shape: Shape
    mode: str
    singles: list[tuple[Req, int]] = field(default_factory=list)
    steady: int = 0
    steady_since: int = 0
    preempted: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    inside: object = None

    def drop(self, req: Req) -> None:
        """The request's token of this step is thrown away."""
        left = [pair for pair in self.singles if pair[0] is not req]
        if len(left) == len(self.singles):
            self.steady -= 1
        self.singles = left

    def pass_by(self, steps: int) -> None:
        """Become the plain decode that comes `steps` later."""
        shape, before = self.shape, self.shape.decode_context
        shape.decode_context += steps * shape.decode_rows
        # NOTE: as far as single contexts are not told; exact once all of them are above index_topk, or all below.
        if shape.decode_chosen == before:
            shape.decode_chosen = shape.decode_context
        self.number += steps
        self.steady_since = self.number - 1
