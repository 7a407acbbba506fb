"""Messages of SGLang that are true on every CPU start and say nothing to the operator.

    kind      begins with                                        said because
    warning   Only CUDA                                          AWQ and GGUF kernels are imported, not used
    warning   Triton is not supported on current platform        linear-attention models are imported, not used
    warning   resource_tracker (child processes only)            SGLang kills them; the tracker frees what they held
    record    Cannot detect CUDA architecture                    the JIT kernels look for a GPU while imported
    record    Ignore import error when loading sglang.srt.models models of other kinds need GPU packages

Only these; every other warning passes.
"""

from __future__ import annotations

import logging
import os
import warnings

WARNINGS = ("Only CUDA", "Triton is not supported on current platform")
CHILD_WARNINGS = (*WARNINGS, "resource_tracker")
RECORDS = {
    "sglang.kernels.jit.utils.arch": "Cannot detect CUDA architecture",
    "sglang.srt.models.registry": "Ignore import error when loading sglang.srt.models",
}


class Drop(logging.Filter):
    """Drops the records that begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.prefix)


def warnings_variable(given: str) -> str:
    """PYTHONWARNINGS for child processes: ours first, then what the operator gave, which therefore wins."""
    ours = [f"ignore:{prefix}:UserWarning" for prefix in CHILD_WARNINGS]
    listed = [part for part in given.split(",") if part]
    return ",".join([part for part in ours if part not in listed] + listed)


def here() -> None:
    """Quieten this process."""
    for prefix in WARNINGS:
        warnings.filterwarnings("ignore", message=prefix, category=UserWarning)
    for name, prefix in RECORDS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, Drop) for known in logger.filters):
            logger.addFilter(Drop(prefix))


def children() -> None:
    """Quieten processes started from here; their log records are dropped by the launcher module they import."""
    os.environ["PYTHONWARNINGS"] = warnings_variable(os.environ.get("PYTHONWARNINGS", ""))
