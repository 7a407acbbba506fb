"""vLLM's prefill philosophy: one ledger of tokens, the indexer in capped query chunks, prefill KV in a workspace, and
prefills shared among ranks head and tail."""

from __future__ import annotations

from policies.base import STOCK, Policy

policy = Policy(
    name="vllm-ledger",
    version="1.0",
    description="token ledger, q-chunked indexer, gathered prefill workspace, head-tail context parallel",
    slots={
        **STOCK,
        "scheduler": "ledger",
        "indexer": "qchunk",
        "prefill_kv": "workspace",
        "context_parallel": "head-tail",
    },
)
