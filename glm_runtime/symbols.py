"""The SGLang symbols that this package stands on, checked before launch.

SGLang's internals move between releases. A hook on a function that changed its parameters fails far away from its
cause, so each symbol is looked up and its parameter names compared; a mismatch ends the launch with one line.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from glm_runtime.config import ConfigError

WANTED = "0.5.23"


@dataclass(frozen=True)
class Symbol:
    """A dotted path and its parameter names in order; None where only its existence matters."""

    path: str
    parameters: tuple[str, ...] | None = None


SYMBOLS = (
    Symbol("sglang.srt.plugins.load_plugins", ()),
    Symbol("sglang.srt.plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type", "source")),
    Symbol("sglang.srt.platforms.interface.SRTPlatform.get_kv_pool_cls", ("self", "kind")),
    Symbol("sglang.srt.platforms.interface.SRTPlatform.post_load_model", ("self", "model")),
    Symbol("sglang.srt.platforms.interface.SRTPlatform.apply_server_args_defaults", ("self", "server_args")),
    Symbol("sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments", ("server_args",)),
    Symbol(
        "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu",
        (
            "head_size",
            "rotary_dim",
            "max_position",
            "base",
            "is_neox_style",
            "rope_scaling",
            "dtype",
            "partial_rotary_factor",
            "device",
        ),
    ),
    Symbol(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_dsa_indexer_cell_size",
        ("self", "kvc", "num_layers", "allocate_all_layers"),
    ),
    Symbol(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        ("self", "kvc", "num_layers"),
    ),
    Symbol("sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers", ("self",)),
    Symbol("sglang.srt.managers.scheduler.Scheduler.get_init_info", ("self",)),
    Symbol("sglang.srt.managers.scheduler.Scheduler.run_batch", ("self", "batch", "pp_proxy_tensors")),
    Symbol("sglang.srt.managers.scheduler.Scheduler.process_batch_result", ("self", "batch", "result")),
    Symbol("sglang.srt.managers.scheduler.Scheduler.get_internal_state", ("self", "recv_req")),
    Symbol("sglang.srt.managers.scheduler.Scheduler.set_internal_state", ("self", "recv_req")),
    Symbol("sglang.srt.managers.scheduler.Scheduler._poll_timeout_aborts", ("self",)),
    Symbol("sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run", ("self", "running_batch", "last_batch")),
    Symbol("sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.set_internal_state", ("self", "obj")),
    Symbol("sglang.srt.utils.auth.auth_level", ("level",)),
    Symbol(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
        ("self", "reqs", "return_logprob", "skip_req"),
    ),
    Symbol("sglang.srt.observability.req_time_stats.APIServerReqTimeStats.__getstate__", ("self",)),
    Symbol("sglang.srt.observability.req_time_stats.SchedulerReqTimeStats.created_time"),
    Symbol(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        (
            "server_args",
            "init_tokenizer_manager_func",
            "run_scheduler_process_func",
            "run_detokenizer_process_func",
            "port_args",
            "placement_group",
        ),
    ),
    Symbol(
        "sglang.srt.entrypoints.engine.kill_process_tree",
        ("parent_pid", "include_parent", "skip_pid", "wait_timeout"),
    ),
    Symbol(
        "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler", ("self", "signum", "frame")
    ),
    Symbol("sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", ("self", "obj", "request")),
    Symbol(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request", ("self", "obj", "input_ids")
    ),
    Symbol("sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state", ("self", "obj", "request")),
    Symbol("sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request", ("self", "rid", "abort_all")),
    Symbol("sglang.srt.managers.tokenizer_manager.TokenizerManager._mark_state_dispatched", ("self", "rid")),
    Symbol("sglang.srt.sampling.sampling_params.SamplingParams.normalize", ("self", "tokenizer")),
    Symbol(
        "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept", ("self", "req")
    ),
    Symbol("sglang.srt.managers.schedule_batch.Req.check_match_stop_str_prefix", ("self",)),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
        ("self", "request", "is_multimodal", "output_constrained"),
    ),
    Symbol("sglang.srt.managers.tokenizer_manager.TokenizerManager.create_abort_task", ("self", "obj")),
    Symbol("sglang.srt.managers.tokenizer_manager.TokenizerManager.sigterm_watchdog", ("self",)),
    Symbol("sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler", ("self", "signum", "frame")),
    Symbol("sglang.srt.entrypoints.api_contract.generate_contract_error", ("body",)),
    Symbol("sglang.srt.managers.scheduler.Scheduler.abort_request", ("self", "recv_req")),
    Symbol("sglang.srt.managers.scheduler.Scheduler.handle_generate_request", ("self", "recv_req", "mm_input_error")),
    Symbol("sglang.srt.managers.scheduler.Scheduler.handle_embedding_request", ("self", "recv_req", "mm_input_error")),
    Symbol("sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher", ("self",)),
    Symbol("sglang.srt.managers.communicator.FanOutCommunicator.queueing_call", ("self", "obj")),
    Symbol("sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin._execute_profile", ("self", "req")),
    Symbol("sglang.srt.entrypoints.http_server.app"),
    Symbol("sglang.srt.entrypoints.http_server.get_global_state", ()),
    Symbol("sglang.srt.arg_groups.choices.add_attention_backend_choices"),
    Symbol("sglang.srt.layers.attention.attention_registry.register_attention_backend", ("name",)),
    Symbol(
        "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.register",
        ("backend_name", "handler_func"),
    ),
    Symbol("sglang.kernels.fused_op.BaseFusedOp.register_oot_forward", ("op_cls", "fn", "platform_key")),
    Symbol(
        "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_cuda",
        ("self", "x", "q_lora", "positions", "forward_batch", "layer_id", "return_indices", "use_cuda_graph"),
    ),
    Symbol(
        "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer._get_topk_ragged",
        (
            "self",
            "enable_dual_stream",
            "forward_batch",
            "layer_id",
            "q_fp8",
            "weights",
            "metadata",
            "topk_result",
        ),
    ),
    Symbol(
        "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.forward_cpu",
        ("self", "layer", "dispatch_output"),
    ),
    Symbol("sglang.srt.layers.activation.SiluAndMul.forward_cpu", ("self", "x")),
    Symbol(
        "sglang.srt.layers.moe.topk.TopK.forward_cpu",
        (
            "self",
            "hidden_states",
            "router_logits",
            "num_token_non_padded",
            "expert_location_dispatch_info",
            "dynamic_expert_bias",
        ),
    ),
    Symbol("sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply", ("self", "layer", "x", "bias")),
    Symbol("sglang.srt.mem_cache.memory_pool.DSATokenToKVPool._create_index_key_cache", ("self",)),
    Symbol("sglang.srt.mem_cache.index_key_cache.IndexKeyCache._buffer_shape", ("self", "num_pages")),
    Symbol("sglang.srt.layers.cp.base.get_cp_strategy", ()),
    Symbol("sglang.srt.layers.cp.base.init_cp_strategy", ("enable_prefill_cp", "cp_size", "cp_strategy")),
    Symbol("sglang.srt.layers.cp.base.ContextParallelStrategy.can_apply", ("self", "num_tokens", "forward_batch")),
    Symbol(
        "sglang.srt.layers.cp.base.ContextParallelStrategy.build_metadata",
        ("self", "num_tokens", "seqs_len", "extend_seqs_len"),
    ),
    Symbol(
        "sglang.srt.layers.cp.base.ContextParallelStrategy.gather_kv_cache", ("self", "x", "forward_batch", "stream")
    ),
    Symbol("sglang.srt.layers.cp.padding.pad_local_rows", ("x", "metadata", "dim")),
    Symbol("sglang.srt.model_executor.forward_batch_info.ForwardBatch.attn_cp_metadata"),
    Symbol(
        "sglang.srt.model_executor.runner.eager_runner.EagerRunner._execute_extend_cp",
        ("self", "forward_batch", "kwargs"),
    ),
    Symbol(
        "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor", ("self", "output", "input")
    ),
    Symbol("sglang.srt.layers.layer_boundary.layout._cp_gathers_over_attn_cp", ()),
    Symbol("sglang.srt.layers.moe.utils.adds_replicated_output_to_partial", ()),
    Symbol("sglang.srt.server_args.prepare_server_args", ("argv",)),
    Symbol("sglang.launch_server.run_server", ("server_args",)),
)


def found_parameters(target: Any) -> tuple[str, ...] | None:
    """Parameter names of a callable as written (`self` included for methods), or None where there is no signature."""
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return None


def check(symbols: tuple[Symbol, ...] = SYMBOLS) -> None:
    """Raise ConfigError for the first symbol that is missing or has other parameters."""
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"sglang is not installed; glm_runtime needs sglang=={WANTED}") from None
    for symbol in symbols:
        try:
            target = pkgutil.resolve_name(symbol.path)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{symbol.path} is missing in sglang {version}, wanted is {WANTED} ({type(error).__name__}: {error})"
            ) from None
        if symbol.parameters is None:
            continue
        found = found_parameters(target)
        if found != symbol.parameters:
            raise ConfigError(
                f"{symbol.path} takes ({', '.join(found or ('?',))}) in sglang {version}, "
                f"wanted is ({', '.join(symbol.parameters)}) as in {WANTED}"
            )
