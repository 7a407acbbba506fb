"""Prompt logprobs of a step among whose requests one has been preempted meanwhile. Duck-typed: no import of SGLang.

rows of the step      a a a a | b b b | c c c c c        b was preempted while it ran; SGLang passes it over
input logprobs        a a a a   b b b   c c c c c        but leaves its values in, so c would read from b's
after cut()           a a a a           c c c c c
"""

from __future__ import annotations

from typing import Any


def cut(batch: Any, result: Any) -> None:
    """Take the values of preempted requests out of a step's input logprobs, before SGLang hands them out.

    Args:
        batch: SGLang's ScheduleBatch of the step. result: its GenerationBatchResult.
    """
    lens, starts = result.extend_input_len_per_req, result.extend_logprob_start_len_per_req
    if not batch.return_logprob or lens is None or starts is None:
        return
    if not batch.forward_mode.is_extend() or not any(req.is_retracted for req in batch.reqs):
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()
    logits = result.logits_output
    logits.finalize_input_logprobs()
    if logits.input_token_logprobs is None:
        return
    keep: list[int] = []
    at = 0
    for req, length, start in zip(batch.reqs, lens, starts, strict=True):
        count = max(0, length - start)
        if not req.is_retracted:
            keep += range(at, at + count)
        at += count
    logits.input_token_logprobs = logits.input_token_logprobs[keep]
