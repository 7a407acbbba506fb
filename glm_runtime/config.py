"""What the operator asked glm_runtime for, and how it reaches every process.

    launcher / Engine --RuntimeConfig.publish()--> environment --asked()--> scheduler, detokenizer, DP controller

SGLang chooses its platform and loads its plugins while modules are imported, before any ServerArgs object has arrived
in a child process. The environment is the one channel that exists by then, so the launcher writes the whole request
there as one JSON value. It is a wire between our own processes, not a knob: users set flags.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from attention.sizes import PAGE_SIZE
from glm_runtime.errors import ConfigError as ConfigError
from parallel.dcp import page_tokens

ENV = "GLM_RUNTIME_CONFIG"
PLUGIN = "glm_runtime"  # our entry-point name in both of SGLang's plugin groups
# SGLang's dumps of a server that is about to end; on CPU they are off unless the operator says otherwise.
CRASH_DUMPS = ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "SGLANG_PYSPY_DUMP_BEFORE_CRASH")
# SGLang's own switches for shared experts and an embedding that each rank holds whole (`cp_hooks.py` says why).
WHOLE_WEIGHTS = {"SGLANG_SHARED_EXPERT_TP1": "1", "SGLANG_ENABLE_EMBED_REPLICATION": "1"}


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One launch.

    Attributes:
        policy: name of the policy.
        slots: slot name -> implementation name, after overrides.
        device: "cpu" (our CPU platform) or "accelerator" (SGLang's own platform).
        threads: OpenMP threads a rank; 0 where SGLang decides (accelerator).
        indexer_scratch_mb: MiB of scratch for the CPU indexer and sparse attention; 0 on an accelerator.
        pack_weights: whether CPU weights are packed for oneDNN.
        knobs: settings of the scheduler and attention slots, by name; JSON values.
        failures: folder in which a failing child process leaves its reason (see `ending.py`).
    """

    policy: str
    slots: dict[str, str]
    device: str
    threads: int = 0
    indexer_scratch_mb: int = 0
    pack_weights: bool = True
    knobs: dict[str, Any] = {}
    failures: str = ""

    def sharding(self) -> tuple[int, int]:
        """Ranks that share a KV cache under decode context parallel, and the tokens of a run; (1, 1): nobody does."""
        dcp, run = self.knobs.get("decode_context_parallel_size"), self.knobs.get("cp_kv_cache_interleave_size")
        return int(dcp or 1), int(run or 1)

    def page_tokens(self) -> int:
        """Tokens of a page of the KV allocator on CPU."""
        return page_tokens(*self.sharding(), PAGE_SIZE)

    @property
    def prefill_ranks(self) -> int:
        """Ranks that share a prefill."""
        return int(self.knobs.get("prefill_context_parallel_size", 1))

    def publish(self) -> None:
        """Make this the request of every process started from here, and let SGLang find our plugins."""
        os.environ[ENV] = msgspec.json.encode(self).decode()
        listed = os.environ.get("SGLANG_PLUGINS")
        if listed:
            # NOTE: when set, SGLANG_PLUGINS filters platform plugins too; leaving ours out would serve stock silently.
            names = [name.strip() for name in listed.split(",") if name.strip()]
            if PLUGIN not in names:
                os.environ["SGLANG_PLUGINS"] = ",".join([*names, PLUGIN])

    @staticmethod
    def retract() -> None:
        """Undo publish(): the launch was refused, or has ended."""
        from glm_runtime.ending import discard

        request = asked()
        if request is not None and request.failures:
            discard(request.failures)
        os.environ.pop(ENV, None)


def gpu_slots(slots: Mapping[str, str]) -> bool:
    """Whether attention on an accelerator is not wholly SGLang's: `qchunk` or `workspace` is chosen."""
    return slots["indexer"] == "qchunk" or slots["prefill_kv"] == "workspace"


def asked() -> RuntimeConfig | None:
    """The request this process runs under; None where nobody asked for glm_runtime."""
    raw = os.environ.get(ENV)
    return msgspec.json.decode(raw, type=RuntimeConfig) if raw else None
