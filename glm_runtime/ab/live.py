"""`--live-switch`: all arms on one running server, whose scheduler is changed between them (POST /policy).

    start once ─> [scheduler of A] play  [scheduler of B] play  [A] play  [B] play ─> stop

For a model that takes an hour to load this is the comparison that can be afforded. Arms may differ in their scheduler
only: everything else of a server is made when it starts.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence

from glm_runtime.ab.arms import Arm, flag_name, is_ledger, split_flags
from glm_runtime.ab.servers import Server, ServerFailed
from glm_runtime.config import ConfigError

ALLOW = "--allow-policy-switch"
SCHEDULER = "--scheduler"


def scheduler_of(arm: Arm) -> str:
    """The scheduler that the arm asks for."""
    return "ledger" if is_ledger(arm.flags) else "sglang"


def one_server(arms: Sequence[Arm]) -> Arm:
    """The server that all arms share. Raises ConfigError where they differ in more than their scheduler."""
    rests = [[words for words in split_flags(arm.flags) if flag_name(words) != SCHEDULER] for arm in arms]
    for arm, rest in zip(arms, rests, strict=True):
        odd = [words for words in rest if words not in rests[0]] or [words for words in rests[0] if words not in rest]
        if odd:
            raise ConfigError(
                f"--live-switch: arms {arms[0].name} and {arm.name} differ in {flag_name(odd[0])}, too; "
                "only --scheduler can be changed while a server runs"
            )
    # NOTE: started as the ledger, whose flags stock scheduling would refuse.
    start = "ledger" if any(scheduler_of(arm) == "ledger" for arm in arms) else "sglang"
    words = [word for part in rests[0] for word in part]
    more = () if ALLOW in map(flag_name, rests[0]) else (ALLOW,)
    return Arm("live", (*words, SCHEDULER, start, *more))


def switch(server: Server, arm: Arm) -> None:
    """Have `server` schedule as the arm asks. ServerFailed where it does not."""
    body = json.dumps({"scheduler": scheduler_of(arm)}).encode()
    request = urllib.request.Request(f"{server.url}/policy", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600):
            return
    except urllib.error.HTTPError as error:
        said = " ".join(error.read().decode(errors="replace").split())
        raise ServerFailed(f"arm {arm.name}: POST /policy answered {error.code}: {said[:300]}") from None
