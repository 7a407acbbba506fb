"""Every place where SGLang is changed through its HookRegistry, with the reason.

A hook is the last choice: a platform method, a registry or a subclass comes first (`platform.py`, `plugin.py`). What is
left has no seam of its own. `symbols.py` checks before launch that each target exists with the signature expected.
"cp": on CPU, with prefill ranks.

| target (sglang.srt.)                           | kind   | on  | why no seam                                          |
|------------------------------------------------|--------|-----|------------------------------------------------------|
| arg_groups.model_hook.handle_model_specific_...| AROUND | cpu | asks torch.cuda for its capability, every DSA model  |
| layers.rotary_embedding.factory.get_rope_cpu   | AROUND | cpu | asserts that rope_scaling is given                   |
| ...DefaultPoolConfigurator._compute_dsa_...    | AROUND | cpu | sizes index keys as fp8 whatever the pool stores     |
| ...DefaultPoolConfigurator._compute_cell_size  | AROUND | cpu | counts whole latent rows: with -dcp only, see below  |
| layers.cp.base.{init,get}_cp_strategy          | AROUND | cp  | two names are known, no registry (`cp_hooks.py`)     |
| ...EagerRunner._execute_extend_cp              | REPLACE| cp  | asks for the current CUDA stream                     |
| ...GroupCoordinator.all_gather_into_tensor     | REPLACE| cp  | an operator without a CPU kernel                     |
| layers.layer_boundary.layout._cp_gathers_...   | REPLACE| cp  | experts would be cut over the prefill ranks          |
| layers.moe.utils.adds_replicated_output_to_... | REPLACE| cp  | the same: shared experts would count on rank 0 only  |
| layers...dsa_indexer.Indexer._get_topk_ragged  | AROUND | gpu | the model makes its Indexer by name; `qchunk` only   |
| managers.scheduler.Scheduler.run_batch         | AROUND | any | stock scheduling has no step record                  |
| managers.scheduler...process_batch_result      | AROUND | any | the same                                             |
| ...output_streamer.SchedulerOutputStreamer...  | BEFORE | any | --record: no callback tells that a request ended     |
| ...req_time_stats.APIServerReqTimeStats.__get..| AFTER  | any | --record: the time of arrival stays behind           |
| managers.scheduler.Scheduler.get_init_info     | AFTER  | any | the handshake has no field for a plugin              |
| managers.scheduler.Scheduler.get_internal_state| AFTER  | any | neither has the state report                         |
| sampling.sampling_params.SamplingParams.norma..| AFTER  | any | its window of tokens misses stop strings             |
| managers...._GenerationStreamAccumulator.accept| AROUND | any | it lets the head of a stop string go every 50 tokens |
| entrypoints.engine.Engine._launch_subprocesses | AFTER  | any | there is no "schedulers are ready" callback          |
| entrypoints.engine.kill_process_tree           | AROUND | any | Engine.shutdown also kills Python's resource tracker |
| managers.tokenizer_manager.TokenizerManager    | AROUND | any | requests are not checked (see guard/hook.py for which|
|   .generate_request and five more              |        |     | methods and why)                                     |
| entrypoints.api_contract.generate_contract_... | AROUND | any | its errors name no field                             |
| ...TokenizerManager.sigterm_watchdog           | AROUND | any | its drain has no deadline                            |
| managers.scheduler.Scheduler.abort_request     | AROUND | any | takes an id for a prefix of ids                      |
| ...handle_generate_request, ..embedding_request| AROUND | any | an exception there ends the server                   |
| ...Scheduler.init_request_dispatcher           | AROUND | any | so does one of any other request (guard/control.py)  |
| ...FanOutCommunicator.queueing_call            | AROUND | any | its answers have no common field for a failure       |
| ...TokenizerControlMixin._execute_profile      | AROUND | any | answers a profile that cannot be with 500            |
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from glm_runtime import cp_hooks, drain, ending, record, report, stock_steps, stops
from glm_runtime.config import RuntimeConfig
from glm_runtime.guard import control as guard_control
from glm_runtime.guard import hook as guard_hook
from glm_runtime.guard import scheduler as guard_scheduler
from policies.steps import Sharing

logger = logging.getLogger(__name__)

MODEL_ADJUSTMENTS = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
ROPE_CPU = "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu"
INDEX_CELL = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_dsa_indexer_cell_size"
CELL = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size"
TOPK_RAGGED = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer._get_topk_ragged"
RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"
RESULT = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
STREAM = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
ARRIVAL = "sglang.srt.observability.req_time_stats.APIServerReqTimeStats.__getstate__"
INIT_INFO = "sglang.srt.managers.scheduler.Scheduler.get_init_info"
INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
NORMALIZE = "sglang.srt.sampling.sampling_params.SamplingParams.normalize"
ACCEPT = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
KILL_TREE = "sglang.srt.entrypoints.engine.kill_process_tree"
LAUNCHED = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"


def register(request: RuntimeConfig) -> None:
    """Register the hooks that this launch needs; SGLang applies them after all plugins have run."""
    if request.device == "cpu":
        HookRegistry.register(MODEL_ADJUSTMENTS, adjust_without_cuda, HookType.AROUND)
        HookRegistry.register(ROPE_CPU, rope_without_scaling, HookType.AROUND)
        HookRegistry.register(INDEX_CELL, index_cell_bytes, HookType.AROUND)
        if request.sharding()[0] > 1:
            HookRegistry.register(CELL, shared_cell_bytes(request.sharding()[0]), HookType.AROUND)
        if request.prefill_ranks > 1:
            cp_hooks.register(request)
    elif request.slots["indexer"] == "qchunk":
        HookRegistry.register(TOPK_RAGGED, topk_ragged, HookType.AROUND)
    own_record = request.slots["scheduler"] == "ledger" or request.knobs.get("allow_policy_switch")
    if not own_record:
        run_batch, process = stock_steps.hooks(request.knobs.get("step_log"), Sharing.of(request))
        HookRegistry.register(RUN_BATCH, run_batch, HookType.AROUND)
        HookRegistry.register(RESULT, process, HookType.AROUND)
    if "record" in request.knobs:
        HookRegistry.register(STREAM, record.hook(request.knobs), HookType.BEFORE)
        HookRegistry.register(ARRIVAL, record.send_arrival, HookType.AFTER)
    HookRegistry.register(NORMALIZE, stops.wide_window, HookType.AFTER)
    HookRegistry.register(ACCEPT, stops.held_back, HookType.AROUND)
    HookRegistry.register(INIT_INFO, add_report, HookType.AFTER)
    HookRegistry.register(INTERNAL_STATE, add_report_to_state, HookType.AFTER)
    HookRegistry.register(LAUNCHED, compare_reports, HookType.AFTER)
    HookRegistry.register(KILL_TREE, spare_tracker, HookType.AROUND)
    for target, hook in (guard_hook.hooks() | guard_scheduler.hooks() | guard_control.hooks()).items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.register(drain.WATCHDOG, drain.drained, HookType.AROUND)


def adjust_without_cuda(original: Callable[..., Any], server_args: Any) -> Any:
    """SGLang's model adjustments as on an NPU: the arm that declares nothing for DSA models and asks no CUDA device."""
    from sglang.srt.runtime_context import override_platform

    with override_platform(is_npu=True):
        return original(server_args)


def rope_without_scaling(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`get_rope_cpu` serves scaled RoPE only; plain RoPE takes SGLang's generic `get_rope`."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    names = ("head_size", "rotary_dim", "max_position", "base", "is_neox_style", "rope_scaling", "dtype")
    given = dict(zip(names, args, strict=False)) | kwargs
    scaling = given.get("rope_scaling")
    if scaling is not None and scaling.get("rope_type") == "deepseek_yarn":
        return original(*args, **kwargs)
    given.pop("device", None)
    return get_rope(**given)


def index_cell_bytes(original: Callable[..., Any], self: Any, *, kvc: Any, num_layers: int, **kwargs: Any) -> int:
    """Bytes of index keys a token as our pool stores them: in the cache dtype, fp8 as SGLang sizes it."""
    import torch

    fp8 = original(self, kvc=kvc, num_layers=num_layers, **kwargs)
    if kvc.kv_cache_dtype == torch.float8_e4m3fn:
        return int(fp8)
    fp8_row = 128 + 4
    return int(fp8 // fp8_row * 128 * torch.empty((), dtype=kvc.kv_cache_dtype).element_size())


def shared_cell_bytes(ranks: int) -> Callable[..., int]:
    """Bytes of a token where `ranks` share the latent rows; index keys are whole on each.

    NOTE: SGLang's own decode context parallel counts a token as `ranks` of them, so its books cannot be compared with
    its pool and its leak check lets any difference pass. Here a token is a token, and a rank's share of it is smaller.
    """

    def cell_bytes(original: Callable[..., Any], self: Any, kvc: Any, num_layers: int) -> int:
        whole = int(original(self, kvc, num_layers))
        index = int(self._compute_dsa_indexer_cell_size(kvc=kvc, num_layers=num_layers))
        return index + -(-(whole - index) // ranks)

    return cell_bytes


def topk_ragged(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The `qchunk` slot on a GPU; imported where it runs, since SGLang's attention is not loaded in every process."""
    from attention.cuda import backend

    return backend.topk_ragged(original, *args, **kwargs)


def add_report(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """The scheduler's handshake carries what it really runs."""
    info["glm_runtime"] = report.of(scheduler)
    return info


def add_report_to_state(output: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> Any:
    """`/server_info` and `GET /policy` ask the running scheduler, not the launcher's memory."""
    output.internal_state["glm_runtime"] = report.of(scheduler)
    output.internal_state["glm_runtime_steps"] = report.last_steps(scheduler)
    return output


def compare_reports(launched: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Refuse to serve unless every scheduler reports exactly what was asked for; then a later end is ours to tell."""
    manager, result = launched[0], launched[3]
    wait = getattr(result, "wait_for_ready", None)
    if not getattr(result, "scheduler_infos", None) and wait is not None:
        wait()
    for rank, info in enumerate(result.scheduler_infos):
        report.require(info.get("glm_runtime"), rank)
    logger.info("glm_runtime: %s", report.summary(result.scheduler_infos[0]["glm_runtime"]))
    if hasattr(manager, "signal_handler_class"):
        manager.signal_handler_class = ending.running_handler(manager.signal_handler_class)
    return launched


def spare_tracker(
    original: Callable[..., Any], parent_pid: int | None, include_parent: bool = True, *args: Any, **kwargs: Any
) -> Any:
    """Where a process ends its own children, Python's resource tracker stays: killed, it complains loudly."""
    if not include_parent and parent_pid in (None, os.getpid()) and not args and kwargs.get("skip_pid") is None:
        kwargs["skip_pid"] = ending.resource_tracker_pid()
    return original(parent_pid, include_parent, *args, **kwargs)
