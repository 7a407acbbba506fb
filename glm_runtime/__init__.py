"""GLM-MoE-DSA models on SGLang's runtime, with the prefill philosophy as a choice.

`glm_runtime.Engine` is the in-process form; `python -m glm_runtime.launch_server` the server.
Importing this package imports neither torch nor SGLang: SGLang chooses its platform while it is imported, and the
request has to be published before that.
"""

from __future__ import annotations

from typing import Any

from glm_runtime.version import __version__

__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from glm_runtime.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
