"""Decode context parallelism at launch: what --decode-context-parallel-size excludes, and what SGLang is told of it.

    CPU           SGLang sees a whole cache in pages of whole rounds; pool and attention share it (attention/shards.py)
    accelerator   SGLang's own: --dcp-size

NOTE: on CPU SGLang's `dcp_size` stays 1. Its own form widens the slot space outside its books (the leak check lets any
difference pass then), deals single tokens only, and refuses prefill ranks beside it (arg_groups/parallel_hook.py).
"""

from __future__ import annotations

from typing import Any

from glm_runtime.config import ConfigError, RuntimeConfig
from policies.base import FLAGS

DCP = "--decode-context-parallel-size"
PCP = "--prefill-context-parallel-size"
RUN = "--cp-kv-cache-interleave-size"


def check(server_args: Any, request: RuntimeConfig) -> None:
    """Raise ConfigError, naming both flags and the way out, for what cannot be combined.

    Args:
        server_args: what the operator said, before SGLang has resolved it.
    """
    if request.device != "cpu":
        _check_accelerator(server_args, request)
    elif request.sharding()[0] > 1:
        _check_cpu(server_args, request)


def _check_accelerator(server_args: Any, request: RuntimeConfig) -> None:
    (ranks, run), own = request.sharding(), server_args.dcp_size or 1
    said, prefill = f"{DCP} {max(ranks, own)}", request.knobs["prefill_context_parallel_size"]
    if ranks > 1 and own not in (1, ranks):
        raise ConfigError(f"{DCP} {ranks} and --dcp-size {own} differ; drop --dcp-size")
    if max(ranks, own) == 1:
        return
    if prefill > 1:
        raise ConfigError(
            f"{said} with {PCP} {prefill} works on CPU only so far: SGLang refuses the pair on a GPU "
            "(--dcp-size with --enable-prefill-cp); set one of them to 1, or add --device cpu"
        )
    if run > 1:
        raise ConfigError(
            f"{RUN} {run} with {said} works on CPU only so far: on a GPU SGLang deals single tokens; "
            f"drop {RUN}, or add --device cpu"
        )
    for slot, stock in (("indexer", "ragged"), ("prefill_kv", "paged")):
        flag, name = FLAGS[slot], request.slots[slot]
        if name != stock:
            raise ConfigError(
                f"{said} with {flag} {name} works on CPU only so far: on a GPU the shares are read by SGLang's own "
                f"attention; add {flag} {stock}, or --device cpu"
            )
    if request.slots["scheduler"] == "ledger":
        raise ConfigError(
            f"{said} with --scheduler ledger works on CPU only so far: on a GPU SGLang's pages are wider than "
            "its books, by which the ledger counts; add --scheduler sglang, or --device cpu"
        )


def _check_cpu(server_args: Any, request: RuntimeConfig) -> None:
    ranks, run = request.sharding()
    said, prefill = f"{DCP} {ranks}", request.knobs["prefill_context_parallel_size"]
    from policies.registry import resolve

    slot = resolve(request.policy, request.slots).impl("prefill_kv")
    loaded = slot.load()
    if not getattr(loaded, "READS_SHARDS", False):
        raise ConfigError(
            f"--prefill-kv {slot.name} reads a whole cache, {said} leaves a share on each rank; use --prefill-kv paged "
            f"or workspace, or drop {DCP}"
        )
    if prefill > 1 and not getattr(loaded, "READS_PARTS", False):
        raise ConfigError(
            f"--prefill-kv {slot.name} merges rows that all ranks have, but {PCP} {prefill} deals them out; "
            f"with {said} use --prefill-kv workspace, or set one of {PCP} and {DCP} to 1"
        )
    page = request.page_tokens()
    pages = f"whole pages of {page} tokens ({said}, {RUN} {run})"
    given = server_args.page_size
    if given not in (None, page):
        raise ConfigError(f"--page-size {given}: ranks share {pages}; drop --page-size, or lower {RUN}")
    chunk = server_args.chunked_prefill_size
    if chunk is not None and chunk > 0 and chunk % page:
        raise ConfigError(f"--chunked-prefill-size {chunk}: chunks end with {pages}; choose a multiple, or lower {RUN}")


def fit(server_args: Any, request: RuntimeConfig) -> None:
    """Write what follows from the request into SGLang's arguments."""
    ranks, _ = request.sharding()
    if ranks == 1:
        return
    if request.device == "cpu":
        server_args.page_size = request.page_tokens()
    else:
        server_args.dcp_size = ranks
