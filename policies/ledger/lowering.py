"""From a plan to one of SGLang's ScheduleBatches.

    plan.tokens   r1:1  r2:1  r3:64  r4:17
                  |decode rows| extend rows |
    only decode rows                          DECODE   the running batch itself, graph-eligible
    only one-token tails over a context       DECODE   the tail's prompt token is staged like a sampled one
    only extend rows                          EXTEND
    both                                      MIXED    extend rows lead, decode rows follow

What SGLang keeps per batch (sampling state, penalties, logprob bookkeeping) is built by its own `prepare_for_extend`,
`prepare_for_decode` and `mix_with_running`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import RelayPayload
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator

from policies.ledger.plan import StepPlan


class RowList(list[Any]):
    """A list of requests whose `in` is a set look-up: SGLang asks it once a row."""

    def __init__(self, reqs: Iterable[Any]) -> None:
        super().__init__(reqs)
        self._ids = {id(req) for req in self}

    def __contains__(self, req: object) -> bool:
        return id(req) in self._ids


def empty_batch() -> ScheduleBatch:
    """A running batch without requests."""
    return ScheduleBatch(reqs=[], batch_is_full=False)


def lower(scheduler: Any, plan: StepPlan, running: ScheduleBatch) -> tuple[ScheduleBatch | None, ScheduleBatch]:
    """The batch of this step, and the running batch that stays behind (empty where it is mixed in).

    Args:
        scheduler: SGLang's Scheduler (pools, tree, model config, future map).
        plan: what to run. Requests of `plan.extends` are not in `running`, all other planned ones are.
        running: decode requests that take part in this step, nobody else.
    """
    if not plan.extends:
        if running.is_empty():
            return None, running
        running.prepare_for_decode()
        return running, running
    batch = _extend_batch(scheduler, plan, want_logprobs=not running.is_empty() and running.return_logprob)
    # NOTE: the sample of a chunk that is not the last must be thrown away, and only EXTEND results can be.
    if plan.decode_only and not plan.chunks and not batch.return_logprob:
        return _as_decode(scheduler, batch, running)
    if running.is_empty():
        return batch, running
    running.prepare_for_decode()
    decoding = RowList(running.reqs)
    batch.mix_with_running(running)
    batch.decoding_reqs = decoding
    if batch.return_logprob:
        # NOTE: SGLang writes 0 here, which would ask for an input logprob of every decode row.
        batch.extend_logprob_start_lens[-len(decoding) :] = [1] * len(decoding)
    return batch, empty_batch()


def _extend_batch(scheduler: Any, plan: StepPlan, want_logprobs: bool) -> ScheduleBatch:
    """Extend rows of the plan as an EXTEND batch, memory allocated, sampling state built."""
    reqs = []
    for request, rows in plan.extends.items():
        req = request.handle
        end = request.num_computed_tokens
        req.refresh_fill_ids()
        if req.prefix_len != end - rows:
            raise RuntimeError(
                f"{req.rid}: the ledger starts at {end - rows}, SGLang's prefix ends at {req.prefix_len}"
            )
        req.extend_end = end
        reqs.append(req)
    for request in plan.chunks:
        request.handle.inflight_middle_chunks += 1
    batch = ScheduleBatch.init_new(
        reqs,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
        chunked_req=None,
    )
    batch.return_logprob = batch.return_logprob or want_logprobs
    batch.contains_last_prefill_chunk = len(plan.chunks) < len(reqs)
    batch.prepare_for_extend()
    batch.decoding_reqs = None
    restore_penalties(batch, scheduler.enable_overlap)
    return batch


def _as_decode(scheduler: Any, batch: ScheduleBatch, running: ScheduleBatch) -> tuple[ScheduleBatch, ScheduleBatch]:
    """One-token prompt tails join the decode batch: vLLM's `prefill_runs_as_decode`."""
    tokens = batch.prefill_input_ids_cpu.to(batch.device)
    scheduler.future_map.stash(batch.req_pool_indices, RelayPayload(bonus_tokens=tokens))
    slots = batch.out_cache_loc
    batch.prefill_input_ids_cpu = None
    batch.input_ids = None
    batch.forward_mode = ForwardMode.DECODE
    for req in batch.reqs:
        req.time_stats.set_prefill_finished_time()
    if running.is_empty():
        batch.is_prefill_only = False
        return batch, batch
    running.prepare_for_decode()
    taken = running.out_cache_loc
    running.merge_batch(batch)
    running.out_cache_loc = torch.cat([taken, slots])
    running.forward_mode = ForwardMode.DECODE
    return running, running


def take_rows(running: ScheduleBatch, sit_out: set[int]) -> tuple[ScheduleBatch, ScheduleBatch]:
    """Split a running batch: (rows that run this step, rows that sit it out), by `id(req)`.

    Filtering rebinds tensors, it never writes into them, so two shallow copies can be filtered apart.
    """
    runs = [i for i, req in enumerate(running.reqs) if id(req) not in sit_out]
    rests = [i for i, req in enumerate(running.reqs) if id(req) in sit_out]
    resting = copy.copy(running)
    resting.sampling_info = fork_sampling(running.sampling_info, resting)
    running.filter_batch(keep_indices=runs)
    resting.filter_batch(keep_indices=rests)
    return running, resting


def fork_sampling(info: Any, batch: ScheduleBatch) -> Any:
    """A copy of a SamplingBatchInfo that can be filtered on its own; its penalties answer to `batch`."""
    forked = copy.copy(info)
    old = info.penalizer_orchestrator
    orchestrator = copy.copy(old)
    orchestrator.batch = batch
    orchestrator.penalizers = {}
    for kind, penalizer in old.penalizers.items():
        twin = copy.copy(penalizer)
        rebound = kind(orchestrator)
        twin._orchestrator_ref = rebound._orchestrator_ref
        orchestrator.penalizers[kind] = twin
    forked.penalizer_orchestrator = orchestrator
    for name in ("custom_params", "custom_logit_processor", "grammars"):
        value = getattr(forked, name, None)
        if value is not None:
            setattr(forked, name, copy.copy(value))
    return forked


class _Rows:
    """What a penalizer reads of a batch: its requests and device."""

    def __init__(self, reqs: list[Any], device: Any) -> None:
        self.reqs = reqs
        self.device = device


def counted_outputs(req: Any, overlap: bool) -> list[int]:
    """Tokens that SGLang's penalties have counted when the request samples its next one.

    Each decode step counts one token before it samples. Under the overlap schedule that is the last one known, which
    lags by one step: the end of the prompt first, then every output but the newest.
    """
    outputs = list(req.output_ids)
    if not outputs:
        return []
    return [req.origin_input_ids[-1], *outputs[:-1]] if overlap else outputs


def restore_penalties(batch: ScheduleBatch, overlap: bool) -> None:
    """Count again what a preempted request had generated: SGLang starts its penalties at zero when it resumes."""
    orchestrator = batch.sampling_info.penalizer_orchestrator
    resumed = [req for req in batch.reqs if len(req.output_ids)]
    if not orchestrator.is_required or not resumed:
        return
    whole: BatchedPenalizerOrchestrator | None = None
    kinds = set(orchestrator.penalizers)
    done: list[Any] = []
    for req in batch.reqs:
        rows = _Rows([req], batch.device)
        one = BatchedPenalizerOrchestrator(orchestrator.vocab_size, rows, kinds)
        if one.is_required:
            for token in counted_outputs(req, overlap):
                one.cumulate_output_tokens(torch.tensor([token], dtype=torch.int64, device=batch.device))
        if whole is None:
            whole, keep = one, rows
        else:
            seen = _Rows(list(done), batch.device)
            whole.batch = seen
            whole.merge(one)
        done.append(req)
    assert whole is not None
    del keep
    whole.batch = batch
    batch.sampling_info.penalizer_orchestrator = whole
