"""The rules that size a prefill: threshold, cadence, share, page end. Arithmetic only.

Source of the first two: vLLM 0.33, as told in the project's prefill facts, section 1. The others are ours.
"""

from __future__ import annotations

from policies.ledger.config import LedgerConfig

PAGE_LOSS = 16


def prefill_threshold(config: LedgerConfig, requests: int) -> int:
    """Most tokens one request may take in a step, 0 for no bound; `requests` are all, running and waiting.

    The only request in the engine is exempt. The adaptive floor keeps it from falling below an equal share.
    """
    threshold = config.long_prefill_token_threshold if requests > 1 else 0
    if threshold > 0 and config.long_prefill_token_threshold_adaptive:
        threshold = max(threshold, config.max_num_batched_tokens // requests)
    return threshold


class Cadence:
    """`prefill_schedule_interval`: prefills only every k-th executed step, unless work is left waiting for room.

    A step is counted when it scheduled something, and stamped when a prefill was in it.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.executed = 0
        self.last_prefill = -interval
        self.capacity_bound = False

    def defers(self, throttle: bool, decode_running: bool) -> bool:
        """Whether prefills sit this step out; `throttle` is the same wish from outside (data parallel ranks)."""
        if self.capacity_bound or not decode_running:
            return False
        return throttle or (self.interval > 1 and self.executed + 1 - self.last_prefill < self.interval)

    def stamp(self, ran: bool, prefill_ran: bool) -> None:
        """Count the step that was just scheduled."""
        if ran:
            self.executed += 1
            if prefill_ran:
                self.last_prefill = self.executed


def share(tokens_left: int, contenders: int, others_need: int) -> int:
    """Most tokens a partial prefill may take while others want to run: all that they do not need, and at least 1/n.

    `others_need` is what the other `contenders - 1` prefills still have to compute.
    """
    return max(tokens_left // max(contenders, 1), tokens_left - others_need, 1)


def page_end(computed: int, rows: int, total: int, align: int, strict: bool) -> int:
    """Rows of a chunk cut so that it ends on a multiple of `align`, unless it reaches `total`.

    If strict: 0 where no page end is in reach. Else the rows as they are where a page end would cost more than one in
    `PAGE_LOSS` of them: a budget of 128 beside 8 decodes gives 120 rows, not 64.
    """
    end = computed + rows
    if align == 1 or end >= total:
        return rows
    cut = end - end % align - computed
    if strict:
        return max(0, cut)
    return cut if (rows - cut) * PAGE_LOSS <= rows else rows
