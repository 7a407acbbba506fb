"""Flags of the live switch. Pure."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from policies.ledger.flags import FlagError

KNOWN = ("sglang", "ledger")  # schedulers that can be switched between
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
LEAST_S = 0.1
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")


def duration(flag: str, text: object) -> float:
    """Seconds of "60s", "500ms", "2m", "1h"; FlagError naming `flag` for anything else, and below 100 ms."""
    found = _DURATION.fullmatch(str(text))
    if found is None:
        raise FlagError(f"{flag} {text}: a duration such as 60s is needed (units: {', '.join(UNITS)})")
    seconds = float(found[1]) * UNITS[found[2]]
    if seconds < LEAST_S:
        raise FlagError(f"{flag} {text}: at least 100ms is needed")
    return seconds


@dataclass(frozen=True)
class SwitchFlags:
    """Values of the switch's flags."""

    allow_policy_switch: bool = False
    ab_alternate: str | None = None

    @property
    def wanted(self) -> bool:
        """Whether this server can switch; alternating asks for it."""
        return self.allow_policy_switch or self.ab_alternate is not None

    @property
    def flag(self) -> str:
        """The flag that asked for it, for messages."""
        return "--allow-policy-switch" if self.ab_alternate is None else "--ab-alternate"

    def knobs(self) -> dict[str, Any]:
        """Plain JSON values; empty where nothing can switch."""
        if not self.wanted:
            return {}
        alternate = None if self.ab_alternate is None else duration("--ab-alternate", self.ab_alternate)
        return {"allow_policy_switch": True, "ab_alternate_s": alternate}

    def check(self, scheduler: str) -> None:
        """FlagError where the scheduler slot is filled by somebody who cannot be switched."""
        if self.wanted and scheduler not in KNOWN:
            raise FlagError(
                f"{self.flag} switches between {' and '.join(KNOWN)} only; drop it, or --scheduler {scheduler}"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the switch's flags to `parser`."""
    group = parser.add_argument_group("glm_runtime, changing the scheduler of a running server")
    group.add_argument(
        "--allow-policy-switch",
        action="store_true",
        default=None,
        help='POST /policy {"scheduler": "sglang" or "ledger"} changes who plans, without losing a request',
    )
    group.add_argument(
        "--ab-alternate",
        default=None,
        metavar="TIME",
        help="change the scheduler by itself every TIME (60s, 5m), for a live A/B; GET /policy shows both arms",
    )


def from_values(values: Mapping[str, Any]) -> SwitchFlags:
    """Flags from parsed values or keyword arguments (None: not given). FlagError naming the flag."""
    given = {name: values[name] for name in asdict(SwitchFlags()) if values.get(name) is not None}
    allow = given.get("allow_policy_switch", False)
    if not isinstance(allow, bool):
        raise FlagError(f"--allow-policy-switch is true or false, not {allow!r}")
    if "ab_alternate" in given:
        duration("--ab-alternate", given["ab_alternate"])
    return SwitchFlags(**given)
