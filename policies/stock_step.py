"""The record of a step of SGLang's own scheduling, read off its batch. Duck-typed: it imports nothing of SGLang."""

from __future__ import annotations

import time
from typing import Any

from policies.steps import Sharing, Step


class StockSteps:
    """Reads one step after another of a scheduler. `sharing`: how prefills are shared among ranks."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._half: str | None = None  # the prompt that is half way, by its request id

    def read(self, scheduler: Any, batch: Any, number: int, detailed: bool) -> Step:
        """The step that `batch` is; called before it runs.

        Args:
            scheduler: SGLang's Scheduler. batch: its ScheduleBatch, decode, extend or mixed.
            number: of the step. detailed: with its rows by request and the KV tokens left.
        """
        decode = batch.forward_mode.is_decode()
        lens = [1] * len(batch.reqs) if decode else list(batch.extend_lens)
        decoding = len(batch.reqs) if decode else len(batch.decoding_reqs or ())
        chunked = scheduler.chunked_req
        step = Step(
            number=number,
            at=time.monotonic(),
            mode=batch.forward_mode.name.lower(),
            prefill_tokens=sum(lens) - decoding,
            decode_rows=decoding,
            left_out=0 if decode or decoding else len(scheduler.running_batch.reqs),
            chunks=int(chunked is not None),
            running=len({id(req) for req in (*scheduler.running_batch.reqs, *batch.reqs)}),
            waiting=len(scheduler.waiting_queue),
            free_tokens=int(
                scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
            ),
        )
        if decode:
            self._sharing.note(step, lens, [length - 1 for length in batch.seq_lens_cpu.tolist()])
        else:
            self._sharing.note(step, lens, batch.prefix_lens)
        if detailed:
            step.rows = {req.rid: rows for req, rows in zip(batch.reqs, lens, strict=True)}
            if not decode:
                prompts = zip(batch.reqs[: len(batch.reqs) - decoding], batch.prefix_lens, strict=False)
                step.hits = {req.rid: int(prefix) for req, prefix in prompts if req.rid != self._half}
                self._half = None if chunked is None else chunked.rid
        return step
