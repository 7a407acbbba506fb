"""Flags that describe a launch, for the planner and the simulator."""

from __future__ import annotations

import argparse

import attention.flags
import policies.ledger.flags
from glm_runtime.plan.devices import GPUS, Device, parse
from glm_runtime.plan.setup import KV_KINDS, SPLITS, WEIGHT_BYTES, Setup
from glm_runtime.plan.shapes import KNOWN, model
from parallel.limits import Sizes


def add_launch(made: argparse.ArgumentParser, gpus_required: bool = True) -> None:
    """Model, devices, parallel sizes, cache, and the slots' flags."""
    add = made.add_argument
    add("--model", required=True, metavar="NAME|PATH", help=f"{', '.join(KNOWN)}, a preset, or a config.json")
    add("--gpus", required=gpus_required, metavar="8xH200", help=f"{', '.join(GPUS)}, or CPU (measured here)")
    add("--tp-size", "--tp", type=int, default=1, metavar="N")
    add("--prefill-context-parallel-size", "-pcp", type=int, default=1, metavar="N")
    add("--decode-context-parallel-size", "-dcp", type=int, default=1, metavar="N")
    add("--cp-kv-cache-interleave-size", type=int, default=1, metavar="N")
    add("--cp-split", choices=SPLITS, default="head-tail")
    add("--dp-size", "--dp", type=int, default=1, metavar="N")
    add("--ep-size", "--ep", type=int, default=1, metavar="N", help="1, or all ranks that share the experts")
    add("--max-model-len", "--context-length", type=int, metavar="TOKENS", help="positions; default: the model's")
    add("--kv-cache-dtype", choices=KV_KINDS, help="default bfloat16; float32 on CPU")
    add("--weights", choices=tuple(WEIGHT_BYTES), help="default fp8; float32 on CPU")
    add("--indexer", choices=("qchunk", "ragged"), default="qchunk")
    add("--prefill-kv", choices=("workspace", "paged"), default="workspace")
    add("--mem-fraction-static", type=float, default=0.9, metavar="F", help="share of a device's memory (default 0.9)")
    policies.ledger.flags.add_arguments(made)
    attention.flags.add_arguments(made)


def launch(
    values: argparse.Namespace,
    *,
    context: int = 1,
    output: int = 1,
    cached: int = 0,
    decodes: int = 0,
    decode_context: int = 0,
    devices: tuple[int, Device] | None = None,
) -> Setup:
    """The launch that the flags of `add_launch` describe. PlanError or a FlagError for what cannot be.

    `devices`: count and kind in place of --gpus.
    """
    named = model(values.model)
    count, device = parse(values.gpus) if devices is None else devices
    sizes = Sizes(
        tp=values.tp_size,
        pcp=values.prefill_context_parallel_size,
        dcp=values.decode_context_parallel_size,
        dp=values.dp_size,
        interleave=values.cp_kv_cache_interleave_size,
    )
    plain = "float32" if device.is_cpu else "bfloat16"
    return Setup(
        model=named,
        device=device,
        devices=count,
        sizes=sizes,
        ep=values.ep_size,
        context=context,
        output=output,
        cached=cached,
        decodes=decodes,
        decode_context=decode_context,
        max_model_len=values.max_model_len,
        ledger=policies.ledger.flags.from_values(vars(values)),
        attention=attention.flags.from_values(vars(values)),
        qchunk=values.indexer == "qchunk",
        workspace=values.prefill_kv == "workspace",
        split=values.cp_split,
        kv=values.kv_cache_dtype or plain,
        weights=values.weights or ("float32" if device.is_cpu else "fp8"),
        memory_share=values.mem_fraction_static,
    )
