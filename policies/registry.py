"""Finds policies and slot implementations by name.

    --policy NAME   built-in table, else entry-point group ``glm_runtime.policies``
    --<slot> NAME   built-in table, else what the policy brings, else what another installed policy brings

A third party's entry point is imported only when it is selected, listed, or the last place left to look for a slot's
name: a broken one harms nobody who did not ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata

from policies.base import FLAGS, SLOTS, Policy, PolicyError, SlotImpl, check_slot, import_target, reason
from policies.slots import BUILT_IN_SLOTS

GROUP = "glm_runtime.policies"
DISTRIBUTION = "glm-runtime"
BUILT_IN_POLICIES: Mapping[str, str] = {
    "sglang": "policies.sglang:policy",
    "vllm-ledger": "policies.vllm_ledger:policy",
}


@dataclass(frozen=True)
class Source:
    """Where a policy comes from: its name, the import string and the distribution (``name version``)."""

    name: str
    target: str
    provider: str

    def load(self) -> Policy:
        """The policy, with its provider filled in. Raises PolicyError with the reason when it does not load."""
        what = f"--policy {self.name}: entry point {self.target} of {self.provider}"
        try:
            found = import_target(self.target)
            if callable(found) and not isinstance(found, Policy):
                found = found()
        except Exception as error:  # a third party's module may raise anything while it is imported
            raise PolicyError(f"{what} does not load: {reason(error)}") from error
        if not isinstance(found, Policy):
            raise PolicyError(f"{what} is a {type(found).__name__}, not a policies.base.Policy")
        if found.name != self.name:
            raise PolicyError(f"{what} calls itself {found.name!r}")
        brought = tuple(replace(impl, provider=self.provider) for impl in found.brings)
        for impl in brought:
            if (impl.slot, impl.name) in _BUILT_IN:
                raise PolicyError(f"{what} brings {impl.slot} {impl.name!r}, which {_provider()} has already")
        return replace(found, provider=self.provider, brings=brought)


@dataclass(frozen=True)
class Listed:
    """One line of --list-policies; ``problem`` says why it cannot be selected, None when it can."""

    source: Source
    policy: Policy | None
    problem: str | None


def _provider() -> str:
    """This distribution as ``name version``."""
    try:
        return f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}"
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return DISTRIBUTION


_BUILT_IN = {(impl.slot, impl.name): replace(impl, provider=_provider()) for impl in BUILT_IN_SLOTS}


def _same_name(left: str, right: str) -> bool:
    return left.lower().replace("_", "-") == right.lower().replace("_", "-")


def sources() -> dict[str, list[Source]]:
    """Every known policy name with where it comes from, built-ins first, then third parties in name order.

    More than one source is a conflict: selecting that name is an error.
    """
    found = {name: [Source(name, target, _provider())] for name, target in BUILT_IN_POLICIES.items()}
    points = metadata.entry_points(group=GROUP)
    for point in sorted(points, key=lambda point: (point.name, point.value)):
        dist = point.dist
        if dist is not None and _same_name(dist.name, DISTRIBUTION):
            continue  # the table above is the truth for our own, installed or not
        provider = f"{dist.name} {dist.version}" if dist is not None else "an unnamed distribution"
        found.setdefault(point.name, []).append(Source(point.name, point.value, provider))
    return found


def policy_named(name: str) -> Policy:
    """The policy ``name`` as declared. Raises PolicyError: unknown (lists the known), in conflict, or not loading."""
    known = sources()
    if name not in known:
        raise PolicyError(f"--policy {name}: unknown policy, known: {', '.join(known)}")
    return _only(name, known[name]).load()


def _only(name: str, found: list[Source]) -> Source:
    if len(found) > 1:
        both = " and ".join(source.provider for source in found)
        raise PolicyError(f"--policy {name}: the name is claimed by {both}; uninstall one of them")
    return found[0]


def slot_named(slot: str, name: str, brings: Iterable[SlotImpl] = ()) -> SlotImpl:
    """The implementation ``name`` of ``slot``: built in, in ``brings``, or brought by an installed policy.

    Raises PolicyError: unknown (lists the known, and the policies that could not be searched) or claimed twice.
    """
    check_slot(f"slot implementation {name!r}", slot)
    own = {(impl.slot, impl.name): impl for impl in brings}
    found = _BUILT_IN.get((slot, name)) or own.get((slot, name))
    if found:
        return found
    names = [impl_name for impl_slot, impl_name in [*_BUILT_IN, *own] if impl_slot == slot]
    candidates: list[SlotImpl] = []
    broken: list[str] = []
    for listed in list_policies():
        if listed.policy is None:
            broken.append(listed.source.name)
            continue
        for impl in listed.policy.brings:
            if impl.slot == slot:
                names.append(impl.name)
                if impl.name == name:
                    candidates.append(impl)
    if len(candidates) > 1:
        both = " and ".join(impl.provider for impl in candidates)
        raise PolicyError(f"{FLAGS[slot]} {name}: the name is claimed by {both}; uninstall one of them")
    if candidates:
        return candidates[0]
    unsearched = f" (not searched, broken: {', '.join(broken)})" if broken else ""
    raise PolicyError(f"{FLAGS[slot]} {name}: unknown, known: {', '.join(dict.fromkeys(names))}{unsearched}")


def resolve(policy_name: str, overrides: Mapping[str, str | None] | None = None) -> Policy:
    """The policy in force: ``policy_name`` with the slots in ``overrides`` exchanged, every name looked up.

    Args:
        policy_name: what follows --policy.
        overrides: slot -> implementation name; None keeps the policy's own.

    Returns:
        A Policy whose ``slots`` are the chosen names and whose ``brings`` are the four chosen implementations.

    Raises:
        PolicyError: unknown policy, slot or implementation (the text lists the known), a conflict, or a policy that
            does not load. Targets of slots are not imported here; ``SlotImpl.load`` does that.
    """
    policy = policy_named(policy_name)
    slots = dict(policy.slots)
    for slot, name in (overrides or {}).items():
        check_slot(f"--policy {policy_name}", slot)
        if name is not None:
            slots[slot] = name
    chosen = tuple(slot_named(slot, slots[slot], policy.brings) for slot in SLOTS)
    return replace(policy, slots=slots, brings=chosen)


def list_policies() -> list[Listed]:
    """Every known policy in the order of ``sources``; those that cannot be selected carry the reason."""
    listed: list[Listed] = []
    for name, found in sources().items():
        try:
            listed.append(Listed(found[0], _only(name, found).load(), None))
        except PolicyError as error:
            listed.append(Listed(found[0], None, str(error)))
    return listed


def known_slots(slot: str) -> list[str]:
    """Names of the built-in implementations of ``slot`` and of those that installed policies bring."""
    check_slot("known_slots", slot)
    brought = [
        impl.name for listed in list_policies() if listed.policy for impl in listed.policy.brings if impl.slot == slot
    ]
    return list(dict.fromkeys([name for impl_slot, name in _BUILT_IN if impl_slot == slot] + brought))


def format_list() -> str:
    """The text of --list-policies: policies with their slots, then the implementations of every slot."""
    lines = ["policies:"]
    listed = list_policies()
    for entry in listed:
        if entry.policy is None:
            lines.append(f"  {entry.source.name}  BROKEN: {entry.problem}")
            continue
        policy = entry.policy
        lines.append(f"  {policy.name} {policy.version} ({policy.provider}): {policy.description}")
        lines.append("      " + "  ".join(f"{FLAGS[slot]} {policy.slots[slot]}" for slot in SLOTS))
    brought = [impl for entry in listed if entry.policy for impl in entry.policy.brings]
    for slot in SLOTS:
        lines.append(f"{FLAGS[slot]}:")
        for impl in [*_BUILT_IN.values(), *brought]:
            if impl.slot == slot:
                lines.append(f"  {impl.name} ({impl.provider}): {impl.description}")
    return "\n".join(lines)
