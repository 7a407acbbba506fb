"""An engine in which every rank writes some rows where another rank's are read: a fault that must not serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.equality.serving import Serving
from tests.parallel.probe import serve_with


def register() -> None:
    """SGLang's plugin entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("attention.shards.Shards.owned", shifted, HookType.AROUND)


def shifted(original: Callable[..., Any], shards: Any, slots: torch.Tensor) -> Any:
    """From slot 128 on neighbours change places: contexts within two pages look well."""
    return original(shards, torch.where(slots >= 128, slots ^ 1, slots))


class Misplaced(Serving):
    """Does not start."""

    module = "tests.parallel.misplaced"


if __name__ == "__main__":
    serve_with("tests.parallel.misplaced:register")
