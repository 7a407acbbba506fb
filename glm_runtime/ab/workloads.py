"""`--workload W`: a built-in mix, a dataset of SGLang's, a trace or a record, as one list of asks.

interference --long 3000      mixes.py
random-ids --num-prompts 16   datasets.py
trace FILE, or FILE itself    traces/: Azure CSV, Mooncake JSONL and CSV, a server's --record
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import Any

from glm_runtime import traces
from glm_runtime.ab import datasets, mixes
from glm_runtime.ab.asks import Ask, Workload, in_order
from glm_runtime.config import ConfigError


def check(text: str) -> None:
    """Raise ConfigError where `text` names no workload, before anything is started."""
    words = _words(text)
    if words[0] in mixes.MIXES or words[0] in datasets.NAMES or words[0] == "trace" or os.path.exists(words[0]):
        return
    known = ", ".join((*mixes.MIXES, *datasets.NAMES))
    raise ConfigError(f"--workload {words[0]} is no file and none of {known}")


def with_trace_flags(text: str, **given: int | None) -> str:
    """`text` with --divide-lengths and --limit where they are given. ConfigError where it is no trace."""
    words = [word for name, value in given.items() if value is not None for word in (_flag(name), str(value))]
    if not words:
        return text
    if not is_trace(text):
        raise ConfigError(f"{words[0]} reshapes a trace; --workload {_words(text)[0]} has flags of its own (--help)")
    return f"{text} {' '.join(words)}"


def is_trace(text: str) -> bool:
    """Whether a trace file is meant."""
    name = _words(text)[0]
    return name not in mixes.MIXES and name not in datasets.NAMES


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def load(text: str, speed: float, vocab: range, tokenizer: Callable[[], Any], seed: int) -> Workload:
    """The workload.

    Args:
        text: value of --workload.
        speed: arrivals this many times as fast.
        vocab: token ids for prompts that are made up.
        tokenizer: gives the model's tokenizer, where a dataset needs it.

    Raises:
        ConfigError: naming the flag, or file and line.
    """
    check(text)
    if not speed > 0:
        raise ConfigError(f"--speed {speed}: a number above 0 is needed")
    name, *words = _words(text)
    try:
        if name in mixes.MIXES:
            made = mixes.make(name, words, vocab, seed)
        elif name in datasets.NAMES:
            made = datasets.make(name, words, tokenizer(), seed)
        else:
            made = from_trace(words if name == "trace" else [name, *words], vocab, seed)
    except ValueError as error:
        raise ConfigError(error) from None
    if speed == 1:
        return made
    asks = tuple(Ask(ask.at / speed, ask.prompt, ask.new, ask.kind, ask.prompt_tokens) for ask in made.asks)
    return Workload(made.name, f"{made.text}, {speed:g} times as fast", asks, made.reuse)


def from_trace(words: list[str], vocab: range, seed: int) -> Workload:
    """A trace file with the flags of `traces.add_arguments`. ValueError naming the flag, or file and line."""
    parser = mixes.Parser(prog="--workload trace", add_help=False, allow_abbrev=False)
    traces.add_arguments(parser)
    values = parser.parse_args(words if "--trace" in words else ["--trace", *words])
    requests = traces.load(values)
    prompts = traces.prompts(requests, vocab, seed=seed)
    asks = []
    for request, prompt in zip(requests, prompts, strict=True):
        said = request.text if request.text is not None else tuple(prompt)
        asks.append(Ask(request.arrival_s, said, request.output_tokens, "", request.prompt_tokens))
    file = os.path.basename(values.trace)
    scaled = "" if values.divide_lengths == 1 else f", lengths divided by {values.divide_lengths}"
    faster = "" if values.speed == 1 else f", {values.speed:g} times as fast"
    reuse = traces.reuse(requests) if any(request.block_ids for request in requests) else None
    return Workload(" ".join(["trace", file, *words[1:]]), f"trace {file}{scaled}{faster}", in_order(asks), reuse)


def warm_up(workload: Workload, count: int, vocab: range, seed: int) -> list[Ask]:
    """Asks before the clock runs: lengths spread over the workload's, the longest among them, other tokens."""
    by_length = sorted(workload.asks, key=lambda ask: ask.prompt_tokens)
    count = min(count, len(by_length))
    places = [round(i * (len(by_length) - 1) / max(1, count - 1)) for i in range(count)] if count > 1 else [-1] * count
    asks = [
        Ask(0.0, tuple(prompt), min(16, by_length[place].new), "", len(prompt))
        for place, prompt in zip(
            places,
            traces.prompts(
                [traces.Request(0.0, by_length[place].prompt_tokens, 1) for place in places], vocab, seed=seed + 7919
            ),
            strict=True,
        )
    ]
    return asks


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--workload {text!r}: {error}") from None
    if not words:
        raise ConfigError("--workload is empty")
    return words
