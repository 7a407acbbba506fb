"""From options to a published request: everything that can be refused is refused here, before a process is started.

    options, SGLang's arguments ─> device ─> policy and slots ─> symbols ─> model ─> threads ─> publish ─> plugins on?

Shared by the launcher and by `glm_runtime.Engine`. Refusals are ConfigError or PolicyError: one line each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_runtime.cli import Options
from glm_runtime.config import ConfigError, RuntimeConfig
from glm_runtime.threads import OMP_VARIABLES, binding, threads_per_rank, usable_cores

ARCHITECTURES = ("GlmMoeDsaForCausalLM",)
SCRATCH_MB = 64


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


def model_config(path: str) -> dict[str, Any]:
    """config.json of a model folder or hub id. Raises ConfigError naming --model-path."""
    folder = Path(path).expanduser()
    looks_local = folder.exists() or path.startswith(("/", ".", "~")) or path.count("/") != 1
    if looks_local:
        if not folder.is_dir():
            raise ConfigError(f"--model-path {path}: no such folder")
        file = folder / "config.json"
    else:
        from transformers.utils import cached_file

        try:
            found = cached_file(path, "config.json")
        except Exception as error:  # the hub client raises many kinds; each means "not to be had"
            raise ConfigError(
                f"--model-path {path}: no such folder, and not to be had from the hub: {_first_line(error)}"
            ) from None
        file = Path(str(found))
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--model-path {path}: the folder has no config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model-path {path}: config.json does not read: {_first_line(error)}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--model-path {path}: config.json is no JSON object")
    return config


def check_architecture(path: str, config: Mapping[str, Any]) -> None:
    """Refuse a model that the slots have no meaning for."""
    found = config.get("architectures") or ["none named"]
    if not any(name in ARCHITECTURES for name in found):
        raise ConfigError(
            f"--model-path {path}: architecture {found[0]} is not {' or '.join(ARCHITECTURES)}; glm_runtime serves "
            "GLM-MoE-DSA models only (SGLang itself serves the others: python -m sglang.launch_server)"
        )


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def resolve_threads(options: Options, ranks: int) -> int:
    """Threads a rank: --cpu-threads, else the operator's OMP_NUM_THREADS, else an even share of the cores."""
    if options.cpu_threads is not None:
        return options.cpu_threads
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given:
        if not given.isdigit() or int(given) < 1:
            raise ConfigError(f"OMP_NUM_THREADS={given!r} is not a positive whole number")
        return int(given)
    return threads_per_rank(len(usable_cores()), ranks)


def request_for(options: Options, device: str, ranks: int) -> RuntimeConfig:
    """The request of this launch; policy and slots looked up, our flags checked against the device."""
    from policies.registry import resolve

    policy = resolve(options.policy, options.overrides())
    for slot in ("scheduler", "indexer", "prefill_kv"):
        policy.impl(slot).load()
    if device != "cpu":
        for name, flag in (("indexer_scratch_mb", "--indexer-scratch-mb"), ("cpu_threads", "--cpu-threads")):
            if getattr(options, name) is not None:
                raise ConfigError(f"{flag} works on CPU only; drop it, or add --device cpu")
        if not options.cpu_weight_packing:
            raise ConfigError("--no-cpu-weight-packing works on CPU only; drop it, or add --device cpu")
        return RuntimeConfig(policy=policy.name, slots=dict(policy.slots), device=device)
    return RuntimeConfig(
        policy=policy.name,
        slots=dict(policy.slots),
        device=device,
        threads=resolve_threads(options, ranks),
        indexer_scratch_mb=options.indexer_scratch_mb or SCRATCH_MB,
        pack_weights=options.cpu_weight_packing,
    )


def set_environment(request: RuntimeConfig, ranks: int) -> None:
    """Environment that SGLang and the math libraries of every process read at import time."""
    request.publish()
    if request.device != "cpu":
        return
    for name in OMP_VARIABLES:
        os.environ[name] = str(request.threads)
    # NOTE: without it SGLang refuses more ranks than NUMA nodes, and binds one rank to a whole node.
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding(usable_cores(), ranks, request.threads))


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
