"""What one request may ask for: facts of the model and the operator's flags.

| flag                         | default | bounds                                                                     |
|------------------------------|---------|----------------------------------------------------------------------------|
| --guard-max-n                | 128     | `n` and `beam_width`                                                       |
| --guard-max-batch            | 4096    | prompts of one request, times `n`                                          |
| --guard-max-top-logprobs     | 256     | `top_logprobs_num`, and never more than the vocabulary                     |
| --guard-max-list             | 4096    | entries of `stop_token_ids`, `logit_bias`, `token_ids_logprob`             |
| --guard-max-grammar-kb       | 64      | size of `json_schema`, `regex`, `ebnf`, `structural_tag`                   |
| --guard-grammar-timeout-s    | 10      | time that compiling one of these may take before the request is refused    |
| --guard-max-body-mb          | 64      | size of an HTTP request                                                    |
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

INT32 = 2**31 - 1
INT64 = 2**63 - 1
FLOAT32 = 3.4028234663852886e38


class FlagError(ValueError):
    """A flag that cannot be honoured; one line naming it."""


@dataclass(frozen=True)
class GuardFlags:
    """The operator's limits. Units are in the names; counts otherwise."""

    guard_max_n: int = 128
    guard_max_batch: int = 4096
    guard_max_top_logprobs: int = 256
    guard_max_list: int = 4096
    guard_max_grammar_kb: int = 64
    guard_grammar_timeout_s: int = 10
    guard_max_body_mb: int = 64

    def knobs(self) -> dict[str, int]:
        """JSON values by name, as GET /policy shows them."""
        return asdict(self)

    @classmethod
    def from_knobs(cls, knobs: Mapping[str, Any]) -> GuardFlags:
        """Back from `knobs`; names that are not ours are left alone."""
        return cls(**{field.name: knobs[field.name] for field in fields(cls) if field.name in knobs})


HELP = {
    "guard_max_n": "largest n and beam_width of a request",
    "guard_max_batch": "most prompts of one request, counted n times",
    "guard_max_top_logprobs": "largest top_logprobs_num of a request",
    "guard_max_list": "most entries of stop_token_ids, logit_bias and token_ids_logprob",
    "guard_max_grammar_kb": "largest json_schema, regex, ebnf or structural_tag, in KiB",
    "guard_grammar_timeout_s": "seconds that compiling a grammar may take",
    "guard_max_body_mb": "largest HTTP request, in MiB",
}


def flag_of(name: str) -> str:
    """Command-line form of a field."""
    return "--" + name.replace("_", "-")


def from_values(values: Mapping[str, Any]) -> GuardFlags:
    """Flags from parsed values or keyword arguments (None: not given). Raises FlagError naming the flag."""
    given = {f.name: values[f.name] for f in fields(GuardFlags) if values.get(f.name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= INT32:
            raise FlagError(f"{flag_of(name)} {value}: a whole number from 1 to {INT32} is needed")
    return GuardFlags(**given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the guard's flags to `parser`."""
    group = parser.add_argument_group("glm_runtime, what one request may ask for (more is refused with HTTP 400)")
    for field in fields(GuardFlags):
        group.add_argument(
            flag_of(field.name),
            type=int,
            default=None,
            metavar="N",
            help=f"{HELP[field.name]} (default {field.default})",
        )


@dataclass(frozen=True)
class Limits:
    """What the checks need to know.

    Attributes:
        vocab: token ids are 0 to vocab - 1.
        context: positions of the model; a prompt and its `max_new_tokens` fit in.
        hidden: width of one row of `input_embeds`.
        text_only: the model takes no images, video or audio.
        routed_experts, indexer_topk: the server was started to return them.
        labels: names that `custom_labels` may have.
        flags: the operator's.
    """

    vocab: int
    context: int
    hidden: int = 0
    text_only: bool = True
    routed_experts: bool = False
    indexer_topk: bool = False
    labels: frozenset[str] = frozenset()
    flags: GuardFlags = GuardFlags()

    @property
    def top_logprobs(self) -> int:
        """Largest `top_logprobs_num`."""
        return min(self.vocab, self.flags.guard_max_top_logprobs)

    @property
    def grammar_bytes(self) -> int:
        """Largest grammar in bytes."""
        return self.flags.guard_max_grammar_kb << 10
