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
    SlotImpl(
        "indexer",
        "qchunk",
        "attention.indexer.qchunk:QChunk",
        "packs requests under a workspace cap and a logits cap, then cuts along queries; rows shared by TP ranks",
        knobs={"sparse_indexer_max_logits_mb": 64, "indexer_strict_cap": True, "indexer_tp_shard_min_rows": None},
    ),
    SlotImpl("prefill_kv", "paged", "attention.paged", "reads the selected rows in place, by page table"),
    SlotImpl(
        "prefill_kv",
        "workspace",
        "attention.workspace_slot:Workspace",
        "gathers and up-converts contexts into a fixed workspace, reads it by remapped ids",
        knobs={"sparse_mla_prefill_workspace_factor": None},
    ),
    # NOTE: with one prefill rank nothing is split, whichever of them is named. The last two are SGLang's own.
    SlotImpl(
        "context_parallel",
        "head-tail",
        "parallel.strategy:HeadTailStrategy",
        "each prefill in 2P segments, rank r owns segments r and 2P - 1 - r; decode rows dealt out",
    ),
    SlotImpl("context_parallel", "interleave", None, "SGLang's interleave: rank r owns rows r, r + P, r + 2P, ..."),
    SlotImpl("context_parallel", "zigzag", None, "SGLang's zigzag: rank r owns blocks r and 2P - 1 - r"),
)
