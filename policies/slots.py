"""The slot implementations that come with the package, one row each."""

from __future__ import annotations

from policies.base import SlotImpl

BUILT_IN_SLOTS: tuple[SlotImpl, ...] = (
    SlotImpl("scheduler", "sglang", None, "prefill-first batches, one chunked request, untouched"),
    SlotImpl(
        "scheduler",
        "ledger",
        "policies.ledger.install:install",
        "one ledger of tokens: decodes and half-done prompts share each step",
    ),
    SlotImpl(
        "indexer",
        "ragged",
        "attention.indexer.ragged",
        "gathers all keys once, cuts along queries by one scratch budget",
        knobs={"indexer_scratch_mb": 64},
    ),
    SlotImpl("prefill_kv", "paged", "attention.paged", "reads the selected rows in place, by page table"),
    # NOTE: SGLang's own strategies; with one prefill rank nothing is split, whichever of them is named.
    SlotImpl("context_parallel", "interleave", None, "SGLang's interleave: rank r owns rows r, r + P, r + 2P, ..."),
    SlotImpl("context_parallel", "zigzag", None, "SGLang's zigzag: rank r owns blocks r and 2P - 1 - r"),
)
