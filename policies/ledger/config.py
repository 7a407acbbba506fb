"""The ledger's settings: vLLM's names and defaults, then our own, off unless asked for.

Source: vLLM 0.33 `SchedulerConfig`, as told in the project's prefill facts, section 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True)
class LedgerConfig:
    """Limits of one ledger. Lengths and budgets are counted in tokens.

    `max_num_scheduled_tokens` (None: as `max_num_batched_tokens`) bounds the tokens of a step; `max_num_batched_tokens`
    bounds them together with `draft_slots` more for every scheduled request. `num_spec_tokens` is K, the drafts a
    request gets after each sampled token; K more KV slots are kept ahead of every row.

    Ours (vLLM 0.33 has none of them):
      decode_first              every running decode gets its row before any prefill, however old that one is
      max_num_partial_prefills  prompts that may be half way at once; 0: no cap
      max_long_partial_prefills of these, the long ones (more left than `long_prefill_token_threshold`, or than a whole
                                step where that is 0); 0: no cap. With either cap short prompts overtake: they pass a
                                waiting prompt that the cap holds back, and a long one that runs leaves them what
                                they need of each step, down to 1 / max(2, max_num_partial_prefills) for itself
      chunk_align               a chunk that does not finish its prompt ends on a multiple of this, where that costs
                                little (see budgets.page_end)
      chunk_align_strict        with True it never ends elsewhere, even where the budget ends inside the first page
      fail_unfit                a request that the whole pool cannot hold fails instead of waiting for ever
      async_scheduling          one step may be in flight while the next is scheduled

    Raises ValueError, naming the field, for values that contradict each other.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_num_scheduled_tokens: int | None = None
    max_num_active_seqs: int | None = None
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    prefill_schedule_interval: int = 1
    scheduling_policy: SchedulingPolicy = "fcfs"
    enable_chunked_prefill: bool = True
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    num_spec_tokens: int = 0
    draft_slots: int = 0
    num_prefill_lookahead: int = 0
    decode_first: bool = False
    max_num_partial_prefills: int = 0
    max_long_partial_prefills: int = 0
    chunk_align: int = 1
    chunk_align_strict: bool = False
    fail_unfit: bool = False
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "prefill_schedule_interval",
            "chunk_align",
        ):
            self._least(name, 1)
        for name in ("max_num_scheduled_tokens", "max_num_active_seqs"):
            if getattr(self, name) is not None:
                self._least(name, 1)
        for name in (
            "long_prefill_token_threshold",
            "num_spec_tokens",
            "draft_slots",
            "num_prefill_lookahead",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
        ):
            self._least(name, 0)
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling_policy must be 'fcfs' or 'priority', not {self.scheduling_policy!r}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be at least 0 and below 1, not {self.watermark}")
        if self.long_prefill_token_threshold > self.max_model_len:
            raise ValueError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) must not be above "
                f"max_model_len ({self.max_model_len})"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs})"
            )
        if self.max_num_batched_tokens <= self.draft_slots:
            raise ValueError(
                f"draft_slots ({self.draft_slots}) must be below max_num_batched_tokens ({self.max_num_batched_tokens})"
            )
        if 0 < self.max_num_partial_prefills < self.max_long_partial_prefills:
            raise ValueError(
                f"max_long_partial_prefills ({self.max_long_partial_prefills}) must not be above "
                f"max_num_partial_prefills ({self.max_num_partial_prefills})"
            )
        self._check_align()

    def _least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")

    def _check_align(self) -> None:
        """A strict page end must stay reachable beside a full house of decodes, else a prompt would wait for ever."""
        if self.chunk_align == 1 or not self.chunk_align_strict:
            return
        if not self.enable_chunked_prefill:
            raise ValueError("chunk_align_strict needs enable_chunked_prefill: without chunks nothing is aligned")
        row = 1 + self.num_spec_tokens + self.draft_slots
        left = min(self.token_budget, self.max_num_batched_tokens - self.draft_slots) - (self.active_seqs - 1) * row
        if left < self.chunk_align:
            raise ValueError(
                f"max_num_batched_tokens leaves {left} tokens beside {self.active_seqs - 1} decodes, less than "
                f"chunk_align ({self.chunk_align}): raise it, lower max_num_seqs or clear chunk_align_strict"
            )

    @property
    def token_budget(self) -> int:
        """Tokens that one step may schedule."""
        return self.max_num_batched_tokens if self.max_num_scheduled_tokens is None else self.max_num_scheduled_tokens

    @property
    def active_seqs(self) -> int:
        """Requests that may run at once."""
        return self.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs

    @property
    def long_tokens(self) -> int:
        """More tokens left than this make a prefill a long one."""
        return self.long_prefill_token_threshold or self.token_budget
