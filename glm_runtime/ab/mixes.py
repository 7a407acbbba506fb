"""Built-in synthetic workloads. Pure.

    interference     ====streams decode====|####### a long prompt #######|====          who waits for whom
    burst            ||||||||  many short prompts at once                               the line at the door
    shared-prefix    [== system prompt A ==]q1  [== A ==]q2  [== B ==]q3                what the prefix cache is worth
    long-context     [################]  [################]  ...                         prompts of many steps

Each is a function of its own flags: `--workload "interference --long 3000 --streams 4"`. Random prompts are seeded: the
same seed gives the same tokens.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from glm_runtime.ab.asks import Ask, Workload, in_order


@dataclass(frozen=True)
class Mix:
    """A named workload. `flags`: name -> (default, help); `make`: their values, vocabulary, random numbers -> asks."""

    text: str
    flags: Mapping[str, tuple[float, str]]
    make: Callable[[argparse.Namespace, range, random.Random], list[Ask]]


def _tokens(count: int, vocab: range, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choices(vocab, k=count))


def interference(v: argparse.Namespace, vocab: range, rng: random.Random) -> list[Ask]:
    """Streams that decode, then long prompts beside them."""
    streams = [Ask(0.0, _tokens(v.prompt, vocab, rng), v.new, "stream") for _ in range(v.streams)]
    long = [
        Ask(v.after + i * v.every, _tokens(v.long, vocab, rng), v.long_new, "long prompt") for i in range(v.long_count)
    ]
    return streams + long


def burst(v: argparse.Namespace, vocab: range, rng: random.Random) -> list[Ask]:
    """Bursts of short prompts, each burst at once."""
    lengths = range(max(1, v.prompt // 2), v.prompt + 1)
    return [
        Ask(i * v.every, _tokens(rng.choice(lengths), vocab, rng), v.new)
        for i in range(v.bursts)
        for _ in range(v.size)
    ]


def shared_prefix(v: argparse.Namespace, vocab: range, rng: random.Random) -> list[Ask]:
    """Groups of prompts that begin alike, shuffled."""
    prefixes = [_tokens(v.prefix, vocab, rng) for _ in range(v.groups)]
    prompts = [prefix + _tokens(v.question, vocab, rng) for prefix in prefixes for _ in range(v.per_group)]
    rng.shuffle(prompts)
    return [Ask(i * v.every, prompt, v.new) for i, prompt in enumerate(prompts)]


def long_context(v: argparse.Namespace, vocab: range, rng: random.Random) -> list[Ask]:
    """Long prompts, one after the other or overlapping."""
    return [Ask(i * v.every, _tokens(v.prompt, vocab, rng), v.new) for i in range(v.count)]


MIXES: Mapping[str, Mix] = {
    "interference": Mix(
        "streams decode; then long prompts come",
        {
            "streams": (4, "requests that decode from the start"),
            "prompt": (20, "tokens of their prompts"),
            "new": (256, "tokens each produces"),
            "long": (3000, "tokens of a long prompt"),
            "long_count": (1, "long prompts"),
            "long_new": (8, "tokens that a long prompt produces"),
            "after": (0.5, "seconds until the first long prompt"),
            "every": (2.0, "seconds between long prompts"),
        },
        interference,
    ),
    "burst": Mix(
        "bursts of short prompts",
        {
            "bursts": (2, "bursts"),
            "size": (16, "prompts of a burst"),
            "prompt": (64, "tokens of a prompt at most; half of it at least"),
            "new": (32, "tokens each produces"),
            "every": (3.0, "seconds between bursts"),
        },
        burst,
    ),
    "shared-prefix": Mix(
        "groups of prompts with a common beginning",
        {
            "groups": (4, "different beginnings"),
            "per_group": (6, "prompts of each"),
            "prefix": (512, "tokens of a beginning"),
            "question": (48, "tokens of a prompt's own"),
            "new": (32, "tokens each produces"),
            "every": (0.2, "seconds between prompts"),
        },
        shared_prefix,
    ),
    "long-context": Mix(
        "long prompts",
        {
            "count": (4, "prompts"),
            "prompt": (4096, "tokens of a prompt"),
            "new": (32, "tokens each produces"),
            "every": (1.0, "seconds between prompts"),
        },
        long_context,
    ),
}


def make(name: str, words: list[str], vocab: range, seed: int) -> Workload:
    """A workload of MIXES.

    Args:
        name: key of MIXES.
        words: its own flags, as words.
        vocab: token ids to draw from.

    Raises:
        ValueError: naming the flag.
    """
    mix = MIXES[name]
    values = flags(name, mix.flags, words)
    for flag, value in vars(values).items():
        least = 0 if flag in ("after", "every") else 1
        if not value >= least:
            raise ValueError(f"--workload {name}: --{flag.replace('_', '-')} {value} is below {least}")
    asks = in_order(mix.make(values, vocab, random.Random(seed)))
    return Workload(" ".join([name, *words]), mix.text, asks, reuse=None)


def flags(name: str, table: Mapping[str, tuple[float, str]], words: list[str]) -> argparse.Namespace:
    """Values of a workload's own flags. Raises ValueError naming the flag."""
    parser = Parser(prog=f"--workload {name}", add_help=False, allow_abbrev=False)
    for flag, (default, text) in table.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", type=type(default), default=default, help=text)
    return parser.parse_args(words)


class Parser(argparse.ArgumentParser):
    """Raises ValueError instead of printing a usage text and exiting."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(f"{self.prog}: {message}")


def help_text() -> str:
    """The workloads and their flags, for --help."""
    lines = []
    for name, mix in MIXES.items():
        lines.append(f"  {name}: {mix.text}")
        lines += [
            f"      --{flag.replace('_', '-')} (default {default:g})  {text}"
            for flag, (default, text) in mix.flags.items()
        ]
    return "\n".join(lines)
