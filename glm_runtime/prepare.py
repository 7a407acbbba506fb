"""From options to a published request: everything that can be refused is refused here, before a process is started.

    options, SGLang's arguments ─> device ─> policy and slots ─> symbols ─> model ─> threads ─> publish ─> plugins on?

Shared by the launcher and by `glm_runtime.Engine`. Refusals are ConfigError or PolicyError: one line each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from attention import flags as attention_flags
from attention.sizes import PAGE_SIZE
from glm_runtime import decode_ranks, drain, ending, health, ports, quiet, record, refuse
from glm_runtime.cli import Options
from glm_runtime.config import CRASH_DUMPS, PLUGIN, WHOLE_WEIGHTS, ConfigError, RuntimeConfig
from glm_runtime.threads import OMP_VARIABLES, binding, given_threads, threads_per_rank, usable_cores
from parallel import flags as parallel_flags
from policies.base import FLAGS, Policy
from policies.ledger.flags import FlagError, Usage, flag_of

SCRATCH_MB = 64
GPU_SLOTS = {"indexer": ("ragged", "qchunk"), "prefill_kv": ("paged", "workspace")}


def accelerator() -> str | None:
    """Name of a usable accelerator, or None."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    for name in ("xpu", "npu", "musa", "mps", "hpu"):
        module = getattr(torch, name, None)
        if module is not None and hasattr(module, "is_available") and module.is_available():
            return name
    return None


def choose_device(asked: str | None) -> str:
    """ "cpu" or "accelerator" from SGLang's --device value (None: not given)."""
    if asked is not None and asked.split(":")[0] != "cpu":
        return "accelerator"
    if asked is None and accelerator() is not None:
        return "accelerator"
    return "cpu"


def default_model() -> str:
    """Folder of the embedded tiny model, built on first use."""
    from glm_runtime.model import ensure

    return str(ensure("tiny"))


def resolve_threads(options: Options, ranks: int) -> int:
    """Threads a rank: --cpu-threads, else the operator's OMP_NUM_THREADS, else an even share of the cores."""
    if options.cpu_threads is not None:
        return options.cpu_threads
    return given_threads() or threads_per_rank(len(usable_cores()), ranks)


def ledger_knobs(options: Options, policy: Policy, device: str, ranks: int, usage: Usage) -> dict[str, Any]:
    """Knobs of the ledger slot, defaults by device filled in; another scheduler has only `step_log`.

    A server that can switch has both schedulers, so the ledger's flags count whichever it starts with.
    """
    given = [name for name in options.ledger.given() if name != "step_log"]
    try:
        options.switch.check(policy.slots["scheduler"])
    except FlagError as error:
        raise ConfigError(error) from None
    if policy.slots["scheduler"] != "ledger" and not options.switch.wanted:
        if given:
            raise ConfigError(
                f"{flag_of(given[0])} belongs to the ledger; --scheduler {policy.slots['scheduler']} cannot honour it: "
                "use --policy vllm-ledger or --scheduler ledger, or --allow-policy-switch"
            )
        return {"step_log": options.ledger.step_log}
    memory, name = 0.0, ""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(0).total_memory / 2**30
            name = torch.cuda.get_device_name(0)
    flags = options.ledger.with_defaults(usage, device, ranks, memory, name)
    if options.switch.wanted and flags.scheduling_policy != "fcfs":
        raise ConfigError(f"--scheduling-policy {flags.scheduling_policy} is not supported with {options.switch.flag}")
    try:
        flags.config(max_model_len=2**31, max_running_requests=2**31, page_size=64, overlap=True)
    except ValueError as error:
        raise ConfigError(f"{options.policy}: {error}") from None
    return flags.knobs() | options.switch.knobs()


def attention_knobs(options: Options, policy: Policy, device: str, ranks: int) -> dict[str, Any]:
    """Knobs of the indexer and prefill-KV slots. Refuses the flags of slots that are not chosen."""
    if device != "cpu":
        for slot, known in GPU_SLOTS.items():
            if policy.slots[slot] not in known:
                flag = FLAGS[slot]
                raise ConfigError(
                    f"{flag} {policy.slots[slot]} works on CPU only; on a GPU choose {flag} {' or '.join(known)}, "
                    "or add --device cpu"
                )
    try:
        return options.attention.knobs(policy.slots, device, ranks)
    except attention_flags.FlagError as error:
        raise ConfigError(error) from None


def parallel_knobs(options: Options, policy: Policy, device: str) -> dict[str, Any]:
    """Sizes of context parallelism. Refuses what is not built; `refuse.prefill_ranks` says what goes together."""
    try:
        knobs = options.parallel.knobs()
    except parallel_flags.FlagError as error:
        raise ConfigError(error) from None
    split = policy.slots["context_parallel"]
    if options.parallel.pcp > 1 and device != "cpu" and split != "interleave":
        raise ConfigError(
            f"--cp-split {split} with --prefill-context-parallel-size {options.parallel.pcp} works on CPU only so far: "
            "SGLang's own DSA attention on a GPU knows interleave; add --cp-split interleave, or --device cpu"
        )
    return knobs


def request_for(options: Options, device: str, ranks: int, usage: Usage = "server") -> RuntimeConfig:
    """The request of this launch; policy and slots looked up, our flags checked against the device.

    Args:
        ranks: what SGLang's size flags ask for, without the prefill ranks.
    """
    from policies.registry import resolve

    policy = resolve(options.policy, options.overrides())
    knobs = ledger_knobs(options, policy, device, ranks, usage) | attention_knobs(options, policy, device, ranks)
    knobs |= record.knobs(options.record, options.record_text)
    knobs |= parallel_knobs(options, policy, device) | options.guard.knobs()
    knobs |= {
        "drain_timeout_s": options.drain_timeout_s or drain.DEFAULT_S,
        "health_timeout_s": options.health_timeout_s or health.DEFAULT_S,
    }
    for slot in ("scheduler", "indexer", "prefill_kv"):  # the split is SGLang's to import: see refuse.prefill_ranks
        policy.impl(slot).load()
    if device != "cpu":
        for name, flag in (("indexer_scratch_mb", "--indexer-scratch-mb"), ("cpu_threads", "--cpu-threads")):
            if getattr(options, name) is not None:
                raise ConfigError(f"{flag} works on CPU only; drop it, or add --device cpu")
        if not options.cpu_weight_packing:
            raise ConfigError("--no-cpu-weight-packing works on CPU only; drop it, or add --device cpu")
        return RuntimeConfig(policy=policy.name, slots=dict(policy.slots), device=device, knobs=knobs)
    return RuntimeConfig(
        policy=policy.name,
        slots=dict(policy.slots),
        device=device,
        threads=resolve_threads(options, ranks * options.parallel.pcp),
        indexer_scratch_mb=options.indexer_scratch_mb or SCRATCH_MB,
        pack_weights=options.cpu_weight_packing,
        knobs=knobs,
    )


def set_environment(request: RuntimeConfig, ranks: int) -> None:
    """Publish the request, and what SGLang and the math libraries of every process read at import time."""
    platform = os.environ.get("SGLANG_PLATFORM")
    if platform and platform != PLUGIN:
        # NOTE: SGLang then leaves out the plugins of every other package that brings a platform, ours among them.
        raise ConfigError(f"SGLANG_PLATFORM={platform} keeps SGLang from loading glm_runtime; unset it")
    structs.replace(request, failures=ending.failures_folder()).publish()
    if request.device != "cpu":
        return
    quiet.here()
    quiet.children()
    if request.prefill_ranks > 1:
        os.environ.update(WHOLE_WEIGHTS)
    # NOTE: a server that has lost a process would wait for a minute for core files of GPUs that are not there.
    for name in CRASH_DUMPS:
        os.environ.setdefault(name, "0")
    os.environ["SGLANG_PLATFORM"] = PLUGIN  # another package's platform may find itself usable, too
    for name in OMP_VARIABLES:
        os.environ[name] = str(request.threads)
    # NOTE: without it SGLang refuses more ranks than NUMA nodes, and binds one rank to a whole node.
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding(usable_cores(), ranks, request.threads))


def fit(server_args: Any, request: RuntimeConfig, config: Mapping[str, Any]) -> None:
    """Values of SGLang's arguments that follow from the request, written before SGLang resolves them.

    On CPU "auto" becomes the dtype that `refuse.model_dtype` names. Under the ledger SGLang's own limits are made to
    fit: rows for every request it may run, buffers for its largest step. A server that can switch has them so from the
    start, and SGLang's own scheduling then cuts its chunks by the ledger's budget.
    """
    if request.device == "cpu":
        server_args.dtype = refuse.model_dtype(server_args, config)
    if server_args.nccl_port is None and (server_args.nnodes or 1) == 1 and (server_args.dp_size or 1) == 1:
        server_args.nccl_port = ports.inner()
    prefill_ranks(server_args, request)
    decode_ranks.fit(server_args, request)
    if request.slots["scheduler"] != "ledger" and not request.knobs.get("allow_policy_switch"):
        return
    seqs, tokens = request.knobs["max_num_seqs"], request.knobs["max_num_batched_tokens"]
    if server_args.max_running_requests is None:
        server_args.max_running_requests = seqs
    # NOTE: SGLang wants whole pages here; the ledger's own budget may end inside one.
    page = server_args.page_size or PAGE_SIZE
    server_args.chunked_prefill_size = -(-tokens // page) * page
    if request.knobs["scheduling_policy"] == "priority":
        server_args.enable_priority_scheduling = True
        server_args.schedule_low_priority_values_first = True


def prefill_ranks(server_args: Any, request: RuntimeConfig) -> None:
    """SGLang's names for the prefill ranks: its --tp-size counts all ranks, --attn-cp-size those that share a prefill.

    On CPU every rank holds the whole feed-forward part and runs it on its own rows, as with one rank: the rows' bits
    are those of one rank, and only keys travel between layers.
    """
    ranks = request.prefill_ranks
    if ranks == 1:
        return
    server_args.tp_size = (server_args.tp_size or 1) * ranks
    server_args.attn_cp_size = ranks
    server_args.enable_prefill_cp = True
    server_args.cp_strategy = request.slots["context_parallel"]
    if request.device == "cpu":
        server_args.moe_dp_size = ranks
        server_args.moe_dense_tp_size = 1
        server_args.disable_attn_tp_gather = True  # the rows of a batch are not padded for a gather that never comes


def load_plugins() -> None:
    """Load SGLang's plugins here and make sure that ours ran: SGLang itself only logs one that failed."""
    from sglang.srt.plugins import load_plugins as load

    from glm_runtime import plugin

    load()
    if plugin.failure is not None:
        raise ConfigError(f"glm_runtime's plugin did not start: {plugin.failure}")
    if not plugin.active:
        raise ConfigError(
            "SGLang did not load glm_runtime's plugin; install the package in this environment (pip install .) "
            "so that its entry points are found"
        )
