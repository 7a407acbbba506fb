"""The CPU platform: how SGLang runs a GLM-MoE-DSA model where no accelerator is.

activate() -> None                      nobody asked for glm_runtime, or an accelerator serves: SGLang's own platform
           -> CpuPlatform               asked by our launcher or Engine, device "cpu"

CpuPlatform   KV pool class, server-argument defaults, row padding and packed weights, out-of-tree operator forwards
"""

from __future__ import annotations

import logging
import os
from typing import Any

import psutil
import torch
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, PlatformEnum, SRTPlatform

from glm_runtime import config, quiet

logger = logging.getLogger(__name__)

KEY = "glm_cpu"  # operator dispatch key: forwards registered under it never touch another platform's


def activate() -> str | None:
    """SGLang's platform entry point: the class to use, or None to stay out of the way."""
    request = config.asked()
    if request is None or request.device != "cpu":
        return None
    quiet.here()  # the first of our code that runs in a child process of an Engine
    return "glm_runtime.platform.CpuPlatform"


class CpuPlatform(SRTPlatform):
    """A plain CPU: torch, numba and gloo; no graphs, no Triton."""

    _enum = PlatformEnum.OOT
    device_name = "glm_cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Defaults that a CPU needs; what the operator set stays (the launcher has refused what cannot work).

        NOTE: SGLang has already filled `attention_backend` with its own CPU choice by now, hence the plain assignment.
        """
        server_args.attention_backend = "glm_cpu"
        server_args.sampling_backend = "pytorch"
        request = config.asked()
        server_args.page_size = 64 if request is None else request.page_tokens()
        server_args.disable_cuda_graph = True
        server_args.sleep_on_idle = True
        if server_args.chunked_prefill_size is None:
            server_args.chunked_prefill_size = 2048
        if server_args.mem_fraction_static is None:
            ranks = server_args.tp_size * server_args.pp_size * server_args.dp_size
            server_args.mem_fraction_static = round(0.5 / ranks, 3)

    def get_default_attention_backend(self) -> str:
        return "glm_cpu"

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        if kind == "dsa":
            from attention.pool import pool_class

            request = config.asked()
            return pool_class(*((1, 1) if request is None else request.sharding()))
        return None

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_dispatch_key_name(self) -> str:
        return KEY

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_device(self, device_id: int | None = 0) -> str:
        return "cpu"

    def set_device(self, device: torch.device) -> None:
        """A CPU has no current device."""

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        return float(psutil.Process().memory_info().rss)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Once per worker process: threads as the launcher chose them."""
        request = config.asked()
        if request is not None and request.threads:
            torch.set_num_threads(request.threads)
        logger.info("glm_runtime: CPU platform, %d OpenMP threads, pid %d", torch.get_num_threads(), os.getpid())

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Row padding (equal bits alone and in a batch) and packed weights."""
        from glm_runtime import cpu_rows

        request = config.asked()
        packing = request is None or request.pack_weights
        dtype = next(model.parameters()).dtype
        if not cpu_rows.invariant_rows(dtype):
            logger.warning(
                "glm_runtime: this CPU's %s GEMM changes a row's last bits with the batch; "
                "a request alone and in a batch may differ in near-tied tokens",
                dtype,
            )
        cpu_rows.install(model, packing)
