"""What travels to the scheduler processes: one entry in SGLang's SetInternalStateReq, a name with a number.

    POST /policy ──{"glm_runtime.switch.to.ledger": 30.0}──> rank 0 ──broadcast, in order with the requests──> all ranks
    rank 0's clock ──{"glm_runtime.switch.send_back": 1}──────────────────────^
                                                             answer: one truth value (rank 0's)

Time is read on rank 0 only, and its decisions ride the same broadcast: every rank switches at the same step. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from policies.switch.flags import KNOWN

PREFIX = "glm_runtime.switch."
OWN = "glm_runtime"  # request id of what rank 0 sends itself; nobody waits for its answer

Verb = Literal["to", "done", "send_back", "turn"]


@dataclass(frozen=True)
class Message:
    """`to`: switch to `scheduler`, prompts may take `deadline_s` seconds to finish. `done`: is no switch under way?

    `send_back`: the deadline has come. `turn`: an alternating server's time is up.
    """

    verb: Verb
    scheduler: str = ""
    deadline_s: float = 0.0

    def values(self) -> dict[str, float]:
        """For SetInternalStateReq."""
        if self.verb == "to":
            return {f"{PREFIX}to.{self.scheduler}": self.deadline_s}
        return {PREFIX + self.verb: 1}


def read(values: Mapping[str, float]) -> Message | None:
    """The message among a SetInternalStateReq's values; None where it is not ours. ValueError where it is malformed."""
    ours = [name for name in values if name.startswith(PREFIX)]
    if not ours:
        return None
    if len(values) != 1:
        raise ValueError(f"{ours[0]} travels alone")
    name = ours[0].removeprefix(PREFIX)
    if name in ("done", "send_back", "turn"):
        return Message(name)  # type: ignore[arg-type]
    verb, _, scheduler = name.partition(".")
    if verb != "to" or scheduler not in KNOWN:
        raise ValueError(f"{ours[0]} means nothing")
    deadline = float(values[ours[0]])
    if not deadline >= 0:
        raise ValueError(f"{ours[0]}: {deadline} is no number of seconds")
    return Message("to", scheduler, deadline)
