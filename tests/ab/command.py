"""`python -m glm_runtime.ab` as a child process, on the embedded model."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.servers import Run, launch

COMMAND = (sys.executable, "-m", "glm_runtime.ab")
COMMON = ("--dtype", "float32", "--max-total-tokens", "16384", "--quiet")
LIMIT_S = 560.0


def ab(folder: Path, *flags: str) -> Run:
    """Run it to its end; everything it writes goes into `folder`."""
    return launch(*flags, *COMMON, "--out", str(folder), command=COMMAND, limit_s=LIMIT_S)
