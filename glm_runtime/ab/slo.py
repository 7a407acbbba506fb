"""What a good request keeps. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from glm_runtime.ab.runs import Reply
from glm_runtime.ab.stats import Sample


@dataclass(frozen=True)
class Slo:
    """Limits in ms: `ttft` to the first token; `itl` for 99 of 100 gaps of a request's tokens. None: no limit."""

    ttft: float | None = None
    itl: float | None = None

    def __bool__(self) -> bool:
        return self.ttft is not None or self.itl is not None

    def met(self, reply: Reply) -> dict[str, bool]:
        """Limit by limit; a request without an answer meets none."""
        found = {}
        if self.ttft is not None:
            found["ttft"] = not reply.error and reply.ttft * 1e3 <= self.ttft
        if self.itl is not None:
            worst = Sample([reply.itl]).quantile(0.99) * 1e3 if reply.itl else 0.0
            found["itl"] = not reply.error and worst <= self.itl
        return found
