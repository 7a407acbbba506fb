"""Who plans, who is to plan next, and when.

    idle ──ask──> draining ──handed over──> idle            to the ledger: at the next step
                     └─ deadline: sent_back ─┘              to sglang: once at most one prompt is half done

One object a scheduler process; all ranks of one server go through the same changes. Pure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from policies.switch.flags import KNOWN

DEADLINE_S = 30.0  # of a turn that an alternating server takes by itself


class Switch:
    """The state.

    Args:
        active: who plans from the start. alternate_s: seconds of a turn; None: switched by hand only.
    """

    def __init__(self, active: str, alternate_s: float | None = None) -> None:
        self.active = active
        self.alternate_s = alternate_s
        self.target: str | None = None
        self.forced = False  # half-done prompts go back to the line
        self.switches: dict[str, int] = dict.fromkeys(KNOWN, 0)
        self.sent_back = 0
        self.last: dict[str, Any] | None = None
        self.asked: dict[str, Any] | None = None  # the newest order that was not refused
        self._asked = 0.0
        self._deadline = 0.0
        self._steps = 0
        self._turned = time.monotonic()

    @property
    def other(self) -> str:
        """The one that does not plan now."""
        return KNOWN[1 - KNOWN.index(self.active)]

    @property
    def draining(self) -> bool:
        """Whether a switch is under way."""
        return self.target is not None

    def ask(self, scheduler: str, deadline_s: float) -> bool:
        """Start a switch; False where one is under way or the server alternates by itself. To who plans: no switch."""
        if self.draining or self.alternate_s is not None:
            return False
        changes = scheduler != self.active
        self.asked = {"scheduler": scheduler, "changed": changes}
        if changes:
            self._start(deadline_s)
        return True

    def turn(self) -> None:
        """An alternating server's time is up."""
        if not self.draining:
            self._start(min(DEADLINE_S, self.alternate_s or DEADLINE_S))

    def _start(self, deadline_s: float) -> None:
        self.target = self.other
        self.forced = deadline_s == 0
        self._asked = time.monotonic()
        self._deadline = deadline_s
        self._steps = 0

    def waited(self) -> None:
        """A step passed in which it could not be done yet."""
        self._steps += 1

    def force(self) -> None:
        """The deadline has come."""
        self.forced = self.draining

    def done(self) -> None:
        """The target plans from here on."""
        assert self.target is not None
        now = time.monotonic()
        self.last = {
            "to": self.target,
            "at": time.time(),
            "took_ms": (now - self._asked) * 1e3,
            "steps_waited": self._steps,
        }
        self.active = self.target
        self.switches[self.active] += 1
        self.target = None
        self.forced = False
        self._turned = now

    def overdue(self) -> bool:
        """Whether rank 0 should say that the deadline has come."""
        return self.draining and not self.forced and time.monotonic() - self._asked > self._deadline

    def due(self) -> bool:
        """Whether rank 0 should say that an alternating server's turn is over."""
        return not self.draining and self._left() == 0

    def _left(self) -> float | None:
        if self.alternate_s is None:
            return None
        return max(0.0, self._turned + self.alternate_s - time.monotonic())

    def facts(self, arms: Mapping[str, Any]) -> dict[str, Any]:
        """For GET /policy, plain JSON values. `arms`: what each scheduler has done so far."""
        return {
            "allowed": True,
            "active": self.active,
            "state": "draining" if self.draining else "idle",
            "target": self.target,
            "switches": sum(self.switches.values()),
            "switches_to": dict(self.switches),
            "prompts_sent_back": self.sent_back,
            "asked": self.asked,
            "last": self.last,
            "alternate_s": self.alternate_s,
            "next_turn_in_s": self._left(),
            "arms": dict(arms),
        }
