"""vLLM's scheduling philosophy: one ledger of tokens instead of phases."""

from __future__ import annotations

from policies.base import STOCK, Policy

policy = Policy(
    name="vllm-ledger",
    version="1.0",
    description="token ledger: decodes and any number of half-done prompts share each step under one token budget",
    slots={**STOCK, "scheduler": "ledger"},
)
