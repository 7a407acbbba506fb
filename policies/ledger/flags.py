"""The ledger's flags: vLLM's names and defaults, our own beside them, and SGLang's flags that mean nothing here. Pure.

    command line, Engine keywords --> LedgerFlags --knobs()--> scheduler process --> LedgerConfig

Defaults of the two budgets follow vLLM 0.33's table by device memory (prefill facts, section 1); a server and an
in-process engine differ there. W is tensor times pipeline ranks.

    device                                    tokens: engine / server       requests: engine / server
    >= 160 GiB                                16,384 / 16,384               1,024 / 1,024
    >= 70 GiB, no A100, not compute 12.1      16,384 / 8,192                1,024 / 1,024
    other GPU                                  8,192 / 2,048                  256 / 256
    CPU                                        4,096 W / 2,048 W              256 W / 128 W
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from policies.ledger.config import LedgerConfig, SchedulingPolicy
from policies.ledger.step_time import StepPacer

Usage = Literal["engine", "server"]

# SGLang field -> (its flag, its neutral values, what to use instead). The first neutral value is SGLang's default.
REPLACED: Mapping[str, tuple[str, tuple[Any, ...], str]] = {
    "chunked_prefill_size": ("--chunked-prefill-size", (None,), "--max-num-batched-tokens"),
    "max_prefill_tokens": ("--max-prefill-tokens", (16384, None), "--max-num-batched-tokens"),
    "enable_mixed_chunk": ("--enable-mixed-chunk", (False, None), "nothing: the ledger always mixes"),
    "prefill_decode_interval": ("--prefill-decode-interval", (None, 0), "--prefill-schedule-interval"),
    "prefill_decode_interval_min_bs": ("--prefill-decode-interval-min-bs", (0, None), "--prefill-schedule-interval"),
    "schedule_conservativeness": ("--schedule-conservativeness", (1.0, None), "--watermark"),
    "schedule_policy": ("--schedule-policy", ("fcfs", None), "--scheduling-policy"),
    "enable_priority_scheduling": ("--enable-priority-scheduling", (False, None), "--scheduling-policy priority"),
    "schedule_low_priority_values_first": (
        "--schedule-low-priority-values-first",
        (False, None),
        "--scheduling-policy priority, where low values always go first",
    ),
    "priority_scheduling_preemption_threshold": (
        "--priority-scheduling-preemption-threshold",
        (10, None),
        "--scheduling-policy priority, which preempts for room only",
    ),
    "disable_priority_preemption": (
        "--disable-priority-preemption",
        (False, None),
        "--scheduling-policy priority, which preempts for room only",
    ),
    "prefill_max_requests": ("--prefill-max-requests", (None,), "--max-num-partial-prefills"),
    "enable_dynamic_chunking": ("--enable-dynamic-chunking", (False, None), "--target-step-ms"),
    "enable_prefill_delayer": ("--enable-prefill-delayer", (False, None), "--prefill-schedule-interval"),
    "min_free_slots_delay": ("--min-free-slots-delay", (None,), "--prefill-schedule-interval"),
    "retraction_policy": ("--retraction-policy", ("length", None), "--scheduling-policy"),
}

# SGLang field -> (its flag, neutral values): features whose scheduling the ledger does not do. Beam search has no flag:
# scheduler.py refuses it a request at a time. Pools of two kinds (sliding window, Mamba) have none either: a
# GLM-MoE-DSA model has one pool.
UNSUPPORTED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "pp_size": ("--pp-size", (1, None)),
    "disaggregation_mode": ("--disaggregation-mode", ("null", None)),
    "enable_dp_attention": ("--enable-dp-attention", (False, None)),
    "speculative_algorithm": ("--speculative-algorithm", (None,)),
    "enable_lora": ("--enable-lora", (None, False)),
    "lora_paths": ("--lora-paths", (None,)),
    "enable_hierarchical_cache": ("--enable-hierarchical-cache", (False, None)),
    "enable_hisparse": ("--enable-hisparse", (False, None)),
    "enable_lmcache": ("--enable-lmcache", (False, None)),
    "enable_flexkv": ("--enable-flexkv", (False, None)),
    "enable_unified_cache_external_linker": ("--enable-unified-cache-external-linker", (False, None)),
    "enable_unified_memory": ("--enable-unified-memory", (False, None)),
    "enable_kv_cache_sharding": ("--enable-kv-cache-sharding", (False, None)),
    "enable_pdmux": ("--enable-pdmux", (False, None)),
    "dllm_algorithm": ("--dllm-algorithm", (None,)),
    "enable_two_batch_overlap": ("--enable-two-batch-overlap", (False, None)),
    "enable_multimodal": ("--enable-multimodal", (None, False)),
    "is_embedding": ("--is-embedding", (False, None)),
    "prefill_only_disable_kv_cache": ("--prefill-only-disable-kv-cache", (False, None)),
    "enable_streaming_session": ("--enable-streaming-session", (False, None)),
}


# Fields of REPLACED that SGLang's own side honours on a server that can switch to it.
STOCK_SIDE = frozenset(
    {
        "max_prefill_tokens",
        "enable_mixed_chunk",
        "prefill_decode_interval",
        "prefill_decode_interval_min_bs",
        "schedule_conservativeness",
        "schedule_policy",
        "prefill_max_requests",
        "min_free_slots_delay",
        "retraction_policy",
    }
)


class FlagError(ValueError):
    """A flag that the ledger cannot honour; one line naming it."""


@dataclass(frozen=True)
class LedgerFlags:
    """Values of the ledger's flags; None where a default depends on the device."""

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_scheduled_tokens: int | None = None
    max_num_active_seqs: int | None = None
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    prefill_schedule_interval: int = 1
    scheduling_policy: SchedulingPolicy = "fcfs"
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    decode_first: bool = True
    max_num_partial_prefills: int = 0
    max_long_partial_prefills: int = 0
    target_step_ms: float | None = None
    step_log: str | None = None

    @classmethod
    def from_knobs(cls, knobs: Mapping[str, Any]) -> LedgerFlags:
        """From `knobs()` of another process; names that are not ours are left alone."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in knobs.items() if name in names})

    def knobs(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def given(self) -> list[str]:
        """Names of the fields that differ from their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]

    def with_defaults(
        self, usage: Usage, device: str, ranks: int, memory_gib: float = 0.0, name: str = ""
    ) -> LedgerFlags:
        """The two budgets filled in from the device, where they were not given."""
        tokens, seqs = default_budgets(usage, device, ranks, memory_gib, name)
        batched = self.max_num_batched_tokens if self.max_num_batched_tokens is not None else tokens
        running = self.max_num_seqs if self.max_num_seqs is not None else min(seqs, batched)
        values = asdict(self) | {"max_num_batched_tokens": batched, "max_num_seqs": running}
        return LedgerFlags(**values)

    def config(self, max_model_len: int, max_running_requests: int, page_size: int, overlap: bool) -> LedgerConfig:
        """The core's settings in a scheduler process. ValueError naming the field that contradicts another."""
        if self.max_num_batched_tokens is None or self.max_num_seqs is None:
            raise ValueError("max_num_batched_tokens and max_num_seqs must be resolved before the scheduler is made")
        return LedgerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=min(self.max_num_seqs, max_running_requests),
            # NOTE: the ledger leaves one position for the sampled token; SGLang's own length checks do so already.
            max_model_len=max_model_len + 1,
            max_num_scheduled_tokens=self.max_num_scheduled_tokens,
            max_num_active_seqs=self.max_num_active_seqs,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=self.long_prefill_token_threshold_adaptive,
            prefill_schedule_interval=self.prefill_schedule_interval,
            scheduling_policy=self.scheduling_policy,
            scheduler_reserve_full_isl=self.scheduler_reserve_full_isl,
            watermark=self.watermark,
            decode_first=self.decode_first,
            max_num_partial_prefills=self.max_num_partial_prefills,
            max_long_partial_prefills=self.max_long_partial_prefills,
            chunk_align=page_size,
            fail_unfit=True,
            async_scheduling=overlap,
        )

    def pacer(self, page_size: int) -> StepPacer | None:
        """Chooses prefill rows by time, None without --target-step-ms. Its floor is one page a step."""
        if self.target_step_ms is None:
            return None
        return StepPacer(self.target_step_ms, floor=page_size)


def default_budgets(usage: Usage, device: str, ranks: int, memory_gib: float = 0.0, name: str = "") -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of vLLM 0.33's table.

    Args:
        device: "cpu" or anything else for a GPU. ranks: tensor times pipeline parallel size.
        memory_gib: memory of one GPU. name: its name, as the driver gives it.
    """
    engine = usage == "engine"
    if device == "cpu":
        return (4096 * ranks, 256 * ranks) if engine else (2048 * ranks, 128 * ranks)
    if memory_gib >= 160:
        return 16384, 1024
    if memory_gib >= 70 and "a100" not in name.lower():
        return (16384 if engine else 8192), 1024
    return (8192 if engine else 2048), 256


def check_sglang(server_args: Any, scheduler: str, switchable: bool = False) -> None:
    """Raise FlagError for the first SGLang flag that the ledger replaces or does not support.

    Args:
        server_args: raw ServerArgs, as the operator gave them.
        scheduler: the flag that chose the ledger, for the message.
        switchable: whether SGLang's own scheduling may take over later; then its own flags have a meaning.
    """
    for field, (flag, neutral, instead) in REPLACED.items():
        value = getattr(server_args, field, None)
        if value not in neutral and not (switchable and field in STOCK_SIDE):
            raise FlagError(f"{flag} {value} has no meaning with {scheduler}; use {instead}")
    for field, (flag, neutral) in UNSUPPORTED.items():
        value = getattr(server_args, field, None)
        if value not in neutral:
            raise FlagError(f"{flag} {value} is not supported with {scheduler}; drop it, or use --scheduler sglang")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ledger's flags to `parser`."""
    group = parser.add_argument_group(
        "glm_runtime, scheduler slot 'ledger' (names and defaults are vLLM's, unless marked)"
    )

    def add(flag: str, type_: Any, text: str, **more: Any) -> None:
        group.add_argument(flag, type=type_, default=None, help=text, **more)

    add("--max-num-batched-tokens", int, "tokens of a step; default by device, see docs", metavar="N")
    add("--max-num-seqs", int, "requests that may run at once; default by device", metavar="N")
    add("--max-num-scheduled-tokens", int, "tokens scheduled a step, if fewer than the above", metavar="N")
    add("--max-num-active-seqs", int, "requests that may run at once, if other than --max-num-seqs", metavar="N")
    add("--long-prefill-token-threshold", int, "rows of one prompt a step at most; 0: no bound (default)", metavar="N")
    group.add_argument(
        "--long-prefill-token-threshold-adaptive",
        action="store_true",
        default=None,
        help="raise that bound to an even share of the step",
    )
    add("--prefill-schedule-interval", int, "steps between prefills while something decodes (default 1)", metavar="K")
    add("--scheduling-policy", str, "order of the line and of preemption (default fcfs)", choices=("fcfs", "priority"))
    group.add_argument(
        "--no-scheduler-reserve-full-isl",
        dest="scheduler_reserve_full_isl",
        action="store_false",
        default=None,
        help="admit a prompt when its first chunk fits, not only when the whole would",
    )
    add("--watermark", float, "fraction of the KV pool kept free at admission (default 0.0)", metavar="F")
    group.add_argument(
        "--decode-first",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="[ours] every running decode gets its token before any prefill (default on; off is vLLM's order)",
    )
    add("--max-num-partial-prefills", int, "[ours] prompts half way at once; 0: no cap (default)", metavar="N")
    add("--max-long-partial-prefills", int, "[ours] of these, long ones; 0: no cap (default)", metavar="N")
    add("--target-step-ms", float, "[ours] choose each step's prefill tokens so that it takes about T ms", metavar="T")
    add("--step-log", str, "[ours] append one JSON line a step to FILE", metavar="FILE")


def from_values(values: Mapping[str, Any]) -> LedgerFlags:
    """Flags from parsed values or keyword arguments (None: not given), checked one by one.

    Raises FlagError naming the flag.
    """
    given = {field.name: values[field.name] for field in fields(LedgerFlags) if values.get(field.name) is not None}
    for name, least in _LEAST.items():
        value = given.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise FlagError(f"{flag_of(name)} {value}: a whole number of at least {least} is needed")
    for name in ("watermark", "target_step_ms"):
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FlagError(f"{flag_of(name)} {value!r} is no number")
        if name == "watermark" and not 0 <= value < 1:
            raise FlagError(f"--watermark {value}: at least 0 and below 1 is needed")
        if name == "target_step_ms" and not 0 < value < 1e9:
            raise FlagError(f"--target-step-ms {value}: a positive number of milliseconds is needed")
    folder = os.path.dirname(given.get("step_log") or "") or "."
    if not os.path.isdir(folder):
        raise FlagError(f"--step-log {given['step_log']}: there is no folder {folder}")
    if given.get("scheduling_policy", "fcfs") not in ("fcfs", "priority"):
        raise FlagError(f"--scheduling-policy {given['scheduling_policy']}: known are fcfs, priority")
    return LedgerFlags(**given)


_LEAST = {
    "max_num_batched_tokens": 1,
    "max_num_seqs": 1,
    "max_num_scheduled_tokens": 1,
    "max_num_active_seqs": 1,
    "long_prefill_token_threshold": 0,
    "prefill_schedule_interval": 1,
    "max_num_partial_prefills": 0,
    "max_long_partial_prefills": 0,
}


def flag_of(name: str) -> str:
    """Command-line form of a field."""
    if name == "scheduler_reserve_full_isl":
        return "--no-scheduler-reserve-full-isl"
    return "--" + name.replace("_", "-")
