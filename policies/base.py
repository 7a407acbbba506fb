"""A policy: four slots, each filled with a named implementation.

    scheduler         which request gets how many tokens this step
    indexer           how the DSA indexer's query-by-key scoring is cut
    prefill_kv        how sparse MLA reads the selected KV in prefill
    context_parallel  which query rows a prefill rank owns

Names only: nothing is imported until ``SlotImpl.load`` runs in the process that uses it. Pure: no sglang, no torch.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SLOTS = ("scheduler", "indexer", "prefill_kv", "context_parallel")

# The command-line flag that overrides each slot; errors name the flag, since that is what the user typed.
FLAGS: Mapping[str, str] = {
    "scheduler": "--scheduler",
    "indexer": "--indexer",
    "prefill_kv": "--prefill-kv",
    "context_parallel": "--cp-split",
}

# What a loaded target of each slot has to offer; None: the target itself is called.
#   scheduler         install(request) -> None, run in every process of the server while SGLang loads its plugins; it
#                     registers hooks, which SGLang applies right after, and one of them sets ``glm_scheduler`` on the
#                     Scheduler object or class to the slot's name: the launcher serves only what reports itself so
#   indexer           select(batch, q, head_weights, cache, topk, scratch) -> ids
#   prefill_kv        attend(batch, q_nope, q_rope, cache, topk_ids, scale, scratch) -> rows
#   context_parallel  a class or function that makes the split, given the number of ranks: SGLang's
#                     ContextParallelStrategy, with `name` the slot's; attention asks it for `local_q_indices` and
#                     `gather_kv_cache`
OFFERS: Mapping[str, str | None] = {
    "scheduler": None,
    "indexer": "select",
    "prefill_kv": "attend",
    "context_parallel": None,
}

# The stock filling, as a base for policies that change one slot.
STOCK: Mapping[str, str] = {
    "scheduler": "sglang",
    "indexer": "ragged",
    "prefill_kv": "paged",
    "context_parallel": "interleave",
}

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?")


class PolicyError(ValueError):
    """A policy or slot that is unknown, contradictory or does not load; the text is one line for the user."""


def reason(error: Exception) -> str:
    """Kind and text of an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def check_name(what: str, name: object) -> None:
    """Raises PolicyError unless ``name`` can be typed after a flag: lower case letters, digits, '.', '_', '-'."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PolicyError(f"{what} {name!r} is no name: lower case letters, digits, '.', '_', '-' are")


def check_slot(what: str, slot: object) -> None:
    """Raises PolicyError unless ``slot`` is one of SLOTS."""
    if slot not in SLOTS:
        raise PolicyError(f"{what}: unknown slot {slot!r}, known: {', '.join(SLOTS)}")


def import_string(target: object) -> str:
    """``module:attribute`` of a class or function, checked to lead back to it.

    Raises PolicyError for what no other process could import: lambdas, instances, things made inside a function.
    """
    module = getattr(target, "__module__", None)
    path = getattr(target, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str):
        raise PolicyError(f"target {target!r} is no class, function or 'module:attribute'")
    text = f"{module}:{path}"
    try:
        same = import_target(text) is target
    except (ImportError, AttributeError):
        same = False
    if not same:
        raise PolicyError(f"target {text} cannot be imported by name, so no other process could load it")
    return text


def import_target(text: str) -> Any:
    """The object behind ``module`` or ``module:attribute.path``. Raises ImportError or AttributeError."""
    module, _, path = text.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found


@dataclass(frozen=True)
class SlotImpl:
    """One way to fill one slot.

    Attributes:
        slot: one of SLOTS.
        name: what the user types after the slot's flag.
        target: None where SGLang's own code does the work; else ``module`` or ``module:attribute``, imported only in
            the process that uses it. A class or function is taken too, and turned into that string.
        description: one line for --list-policies.
        knobs: its settings and their defaults, JSON values; the runtime reports the effective ones beside them.
        provider: distribution it comes from; filled in by the registry.
    """

    slot: str
    name: str
    target: str | Callable[..., Any] | None = None
    description: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    provider: str = ""

    def __post_init__(self) -> None:
        check_slot(f"slot implementation {self.name!r}", self.slot)
        check_name(f"{self.slot} implementation", self.name)
        if self.target is not None and not isinstance(self.target, str):
            object.__setattr__(self, "target", import_string(self.target))
        elif isinstance(self.target, str) and not _TARGET.fullmatch(self.target):
            raise PolicyError(f"{self.slot} {self.name!r}: target {self.target!r} is no 'module:attribute'")

    def load(self) -> Any:
        """The target itself, or None where SGLang's own code does the work.

        Raises PolicyError when it does not import or does not offer what its slot needs (see OFFERS).
        """
        if self.target is None:
            return None
        what = f"{FLAGS[self.slot]} {self.name}"
        try:
            found = import_target(str(self.target))
        except Exception as error:  # a third party's module may raise anything while it is imported
            raise PolicyError(f"{what}: {self.target} does not load: {reason(error)}") from error
        offer = OFFERS[self.slot]
        if offer is None:
            if not callable(found):
                raise PolicyError(f"{what}: {self.target} is not callable")
        elif not callable(getattr(found, offer, None)):
            raise PolicyError(f"{what}: {self.target} has no function {offer}")
        return found


@dataclass(frozen=True)
class Policy:
    """A named filling of the four slots.

    Attributes:
        name: what the user types after --policy; equal to the name of its entry point.
        version: of the policy itself.
        description: one line for --list-policies.
        slots: slot -> name of its implementation, all four (start from STOCK to change one).
        brings: implementations that come with the policy, beside the built-in ones. In a policy that
            ``registry.resolve`` returned: the four chosen ones, in the order of SLOTS.
        provider: distribution it comes from, ``name version``; filled in by the registry.
    """

    name: str
    version: str
    description: str
    slots: Mapping[str, str] = field(default_factory=lambda: dict(STOCK), hash=False)
    brings: tuple[SlotImpl, ...] = ()
    provider: str = ""

    def __post_init__(self) -> None:
        check_name("policy", self.name)
        for slot in self.slots:
            check_slot(f"policy {self.name!r}", slot)
        missing = [slot for slot in SLOTS if slot not in self.slots]
        if missing:
            raise PolicyError(
                f"policy {self.name!r}: slot {missing[0]!r} is not filled (start from policies.base.STOCK)"
            )
        for slot, name in self.slots.items():
            check_name(f"policy {self.name!r}: {slot}", name)
        object.__setattr__(self, "slots", {slot: self.slots[slot] for slot in SLOTS})
        object.__setattr__(self, "brings", tuple(self.brings))
        keys = [(impl.slot, impl.name) for impl in self.brings]
        for key in keys:
            if keys.count(key) > 1:
                raise PolicyError(f"policy {self.name!r}: brings {key[0]} {key[1]!r} twice")

    def impl(self, slot: str) -> SlotImpl:
        """The implementation that fills ``slot``. Only on a resolved policy; PolicyError otherwise."""
        check_slot(f"policy {self.name!r}", slot)
        for impl in self.brings:
            if impl.slot == slot and impl.name == self.slots[slot]:
                return impl
        raise PolicyError(
            f"policy {self.name!r} is not resolved: {slot} is a name only (use policies.registry.resolve)"
        )

    def knobs(self) -> dict[str, Any]:
        """Declared knobs of the four implementations and their defaults. Only on a resolved policy."""
        return {knob: default for slot in SLOTS for knob, default in self.impl(slot).knobs.items()}

    def describe(self, effective: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What GET /policy shows, as plain JSON values. Only on a resolved policy.

        Args:
            effective: settings in force; they stand over the declared defaults and may name further ones.
        """
        return {
            "policy": self.name,
            "version": self.version,
            "description": self.description,
            "provider": self.provider,
            "slots": dict(self.slots),
            "implementations": {
                slot: {"name": impl.name, "target": impl.target, "provider": impl.provider}
                for slot in SLOTS
                for impl in [self.impl(slot)]
            },
            "knobs": self.knobs() | dict(effective or {}),
        }
