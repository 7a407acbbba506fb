"""Where a comparison ran: facts that a figure is worth nothing without."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores, load, GPU if there is one, versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {"cpu": cpu_model(), "cores": f"{cores} cores", "gpu": _gpu()}
    for name in ("sglang", "torch"):
        found[name] = f"{name} {_version(name)}"
    found["load_1min"] = f"load {os.getloadavg()[0]:.1f} at the end"
    return found


def cpu_model() -> str:
    """Name of the processor as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return ""
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
