"""The stock policy: SGLang's own scheduling, and the plain form of every other slot."""

from __future__ import annotations

from policies.base import STOCK, Policy

policy = Policy(
    name="sglang",
    version="1.0",
    description="SGLang's own scheduler: prefill-first batches, one chunked request",
    slots=STOCK,
)
