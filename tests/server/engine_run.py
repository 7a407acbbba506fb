"""What the Engine tests run in a process of its own: two engines, one after the other, and refusals between them.

Prints one JSON object. SGLang starts its children by importing this file again, hence the guard at its end.
"""

from __future__ import annotations

import json
import os
from typing import Any

import glm_runtime
from glm_runtime.config import ConfigError
from policies.base import PolicyError

ARGUMENTS: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096}
PROMPTS = ["one", "The way of a request " * 20]
WATCHED = ("GLM_RUNTIME_CONFIG", "SGLANG_PLUGINS", "PYTHONWARNINGS", "OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND")


def refusal(**arguments: Any) -> str:
    """Type and text of what an engine's start raises; "started" where it does not."""
    try:
        engine = glm_runtime.Engine(**(ARGUMENTS | arguments))
    except (ConfigError, PolicyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    engine.shutdown()
    return "started"


def tokens(engine: Any) -> list[list[int]]:
    """Greedy tokens of PROMPTS."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return [output["output_ids"] for output in engine.generate(PROMPTS, sampling)]


def run() -> dict[str, Any]:
    """Everything, in order."""
    before = {name: os.environ.get(name) for name in WATCHED}
    result: dict[str, Any] = {
        "policy": refusal(policy="nonsense"),
        "indexer": refusal(indexer="nonsense"),
        "path": refusal(model_path="/no/such/folder"),
        "threads": refusal(device="cuda", cpu_threads=2),
        "page_size": refusal(page_size=16),
        "unknown": refusal(no_such_argument=1),
        "context": refusal(context_length=10**6),
        "heads": refusal(json_model_override_args='{"num_attention_heads": 2}'),
    }
    engine = glm_runtime.Engine(**ARGUMENTS, policy="sglang", indexer_scratch_mb=32)
    result["first"] = tokens(engine)
    result["second_at_once"] = refusal()
    info = engine.get_server_info()
    result["report"] = [state["glm_runtime"] for state in info["internal_states"]]
    result["still"] = tokens(engine)
    engine.shutdown()
    result["restored"] = {name: os.environ.get(name) for name in WATCHED} == before
    result["child"] = refusal(model_loader_extra_config='{"nonsense": 1}')
    with glm_runtime.Engine(**ARGUMENTS, allow_policy_switch=True) as again:
        result["again"] = tokens(again)
        result["switch"] = again.switch_scheduler("ledger")
        result["switched"] = tokens(again)
    return result


if __name__ == "__main__":
    print("RESULT " + json.dumps(run()), flush=True)
