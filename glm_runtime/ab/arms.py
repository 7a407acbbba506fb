"""The arms of a comparison: a name, and the server flags that make it. Pure.

--policies sglang,vllm-ledger         ─> two arms of those names
--arm "wide: --policy vllm-ledger --max-num-batched-tokens 256"
flags of all arms + flags of the arm  ─> the arm's win
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from glm_runtime.config import ConfigError

# Flags that the runner sets itself.
OURS = ("--host", "--port", "--step-log")
_NAME = re.compile(r"[\w.+=() -]+")


@dataclass(frozen=True)
class Arm:
    """One way to serve. `flags`: arguments of glm_runtime.launch_server."""

    name: str
    flags: tuple[str, ...]

    @property
    def slug(self) -> str:
        """Its name as part of a file name."""
        return re.sub(r"[^\w.-]+", "-", self.name).strip("-")


def split_flags(flags: Sequence[str]) -> list[list[str]]:
    """Each flag with its values. Raises ConfigError for a value without a flag."""
    found: list[list[str]] = []
    for word in flags:
        if word.startswith("--"):
            found.append([word])
        elif not found:
            raise ConfigError(f"{word!r} is no flag; flags begin with --")
        else:
            found[-1].append(word)
    return found


def flag_name(words: Sequence[str]) -> str:
    """`--flag` of `--flag value` or `--flag=value`."""
    return words[0].partition("=")[0]


def merge(common: Sequence[str], own: Sequence[str]) -> tuple[str, ...]:
    """Flags of all arms and of one arm; where both name a flag, the arm's stays."""
    mine = split_flags(own)
    named = {flag_name(words) for words in mine}
    kept = [words for words in split_flags(common) if flag_name(words) not in named]
    return tuple(word for words in kept + mine for word in words)


def parse(text: str) -> Arm:
    """An arm from `name: flags`. Raises ConfigError naming --arm."""
    name, colon, flags = text.partition(":")
    name = name.strip()
    if not colon or not _NAME.fullmatch(name):
        raise ConfigError(f'--arm {text!r}: "name: --flag value ..." is wanted')
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise ConfigError(f"--arm {name}: {error}") from None
    split_flags(words)
    return Arm(name, tuple(words))


def arms(policies: Sequence[str], texts: Sequence[str], common: Sequence[str], budget: int | None = None) -> list[Arm]:
    """All arms, in the order of the command line: policies first.

    Args:
        policies: names given with --policies.
        texts: values of --arm.
        common: flags of every arm's server.
        budget: tokens of a step for every arm, by the flag that each arm's scheduler knows; None leaves defaults.

    Raises:
        ConfigError: naming the flag: no arm, a name twice, or a flag that the runner sets itself.
    """
    made = [Arm(name, ("--policy", name)) for name in policies] + [parse(text) for text in texts]
    if not made:
        raise ConfigError("no arms: name policies with --policies a,b, or arms with --arm")
    for arm in made:
        if sum(arm.slug == other.slug for other in made) > 1:
            raise ConfigError(f"the arm {arm.name!r} is there twice; --arm names must differ")
        for words in split_flags([*common, *arm.flags]):
            if flag_name(words) in OURS:
                raise ConfigError(f"{flag_name(words)} cannot be given to an arm: ab sets it itself")
            if flag_name(words) == "--config":
                raise ConfigError("--config cannot be given to an arm: its flags must be seen here; write them out")
    return [replace(arm, flags=merge(common, _with_budget(arm.flags, common, budget))) for arm in made]


def is_ledger(flags: Sequence[str]) -> bool:
    """Whether these flags choose the ledger: by --scheduler, else by the policy's own slot."""
    values = {flag_name(words): words[0].partition("=")[2] or " ".join(words[1:]) for words in split_flags(flags)}
    if "--scheduler" in values:
        return values["--scheduler"] == "ledger"
    from policies.registry import resolve

    return resolve(values.get("--policy", "sglang"), {}).slots["scheduler"] == "ledger"


def _with_budget(own: Sequence[str], common: Sequence[str], budget: int | None) -> Sequence[str]:
    if budget is None:
        return own
    flag = "--max-num-batched-tokens" if is_ledger(merge(common, own)) else "--chunked-prefill-size"
    if flag in map(flag_name, split_flags(own)):
        return own
    return (*own, flag, str(budget))
