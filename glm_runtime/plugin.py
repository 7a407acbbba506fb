"""SGLang's general plugin: runs in the launcher, Engine, scheduler, detokenizer and DP controller processes.

    not asked          nothing happens: somebody else's SGLang in this environment stays untouched
    asked, cpu         backend and operator registrations, hooks, GET /policy, the scheduler slot
    asked, accelerator hooks, GET /policy, the scheduler slot; attention stays SGLang's own, except with `qchunk` or
                       `workspace`: a subclass of its DSA backend, under the same name

SGLang only logs a plugin that raises and then serves stock. Here a failure is remembered instead, and the scheduler's
report (`report.py`) makes the launch end.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from glm_runtime import config, ending

active = False  # whether register() ran to its end in this process
failure: str | None = None  # why it did not


def register() -> None:
    """SGLang's plugin entry point."""
    global active, failure
    request = config.asked()
    if request is None:
        return
    child = multiprocessing.parent_process() is not None
    try:
        if child and request.failures:
            ending.report_reasons(request.failures)
        _register(request)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        if child and request.failures:
            ending.leave_reason(request.failures, f"glm_runtime's plugin did not start: {failure}")
        raise
    active = True


def _register(request: config.RuntimeConfig) -> None:
    from glm_runtime import hooks

    hooks.register(request)
    if request.device == "cpu":
        _register_cpu(request)
    elif config.gpu_slots(request.slots):
        _register_gpu(request)
    _register_endpoint()
    _install_scheduler(request)


def _register_cpu(request: config.RuntimeConfig) -> None:
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from attention.backend_name import NAME
    from glm_runtime.platform import KEY

    add_attention_backend_choices([NAME])

    @register_attention_backend(NAME)
    def create(runner: Any) -> Any:
        from attention.backend import GlmCpuBackend, Slots
        from policies.registry import resolve

        policy = resolve(request.policy, request.slots)
        indexer, prefill = policy.impl("indexer"), policy.impl("prefill_kv")
        slots = Slots(indexer.name, indexer.load(), prefill.name, prefill.load())
        return GlmCpuBackend(runner, slots, request.indexer_scratch_mb, request.knobs)

    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.moe.topk import TopK
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    from attention.backend import index_forward
    from glm_runtime.cpu_rows import expert_forward, route, silu_and_mul

    AttentionBackendRegistry.register(NAME, lambda attn, forward_batch: AttnForwardMethod.MLA)
    BaseFusedOp.register_oot_forward(Indexer, index_forward, KEY)
    BaseFusedOp.register_oot_forward(UnquantizedFusedMoEMethod, expert_forward, KEY)
    BaseFusedOp.register_oot_forward(SiluAndMul, silu_and_mul, KEY)
    BaseFusedOp.register_oot_forward(TopK, route, KEY)


def _register_gpu(request: config.RuntimeConfig) -> None:
    """Our backend under SGLang's own name: its argument handling, graphs and models ask for "dsa" by that name."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend("dsa")
    @register_attention_backend("nsa")
    def create(runner: Any) -> Any:
        from attention.cuda.backend import GlmDsaBackend

        return GlmDsaBackend(runner, request.slots["indexer"], request.slots["prefill_kv"], request.knobs)


def _register_endpoint() -> None:
    """GET /policy on SGLang's HTTP app; only the process that has the app loaded or will load it serves it."""
    if multiprocessing.parent_process() is None:
        from glm_runtime import endpoints

        endpoints.register()


def _install_scheduler(request: config.RuntimeConfig) -> None:
    """Run the scheduler slot's `install`, where it has one; a server that can switch has both schedulers in one."""
    from policies.registry import resolve

    if request.knobs.get("allow_policy_switch"):
        from policies.switch.install import install as install_both

        install_both(request)
        return
    install = resolve(request.policy, request.slots).impl("scheduler").load()
    if install is not None:
        install(request)
