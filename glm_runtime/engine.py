"""`glm_runtime.Engine`: the in-process form, as `sglang.Engine`, with our options as keyword arguments.

if __name__ == "__main__":  # SGLang's processes import this file again
    engine = glm_runtime.Engine(policy="sglang", dtype="float32", max_total_tokens=8192)
    engine.generate("Hello", {"max_new_tokens": 8})
    engine.shutdown()
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from glm_runtime import ports
from glm_runtime.cli import Options
from glm_runtime.config import CRASH_DUMPS, ENV, WHOLE_WEIGHTS, ConfigError, RuntimeConfig
from glm_runtime.threads import OMP_VARIABLES

# What an engine's start writes into the environment of its own process, taken back when it ends.
CHANGED = (
    *(ENV, "SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_CPU_OMP_THREADS_BIND", "PYTHONWARNINGS"),
    *OMP_VARIABLES,
    *WHOLE_WEIGHTS,
    *CRASH_DUMPS,
)


def Engine(**arguments: Any) -> Any:
    """Start an engine under a policy; returns an instance of `sglang.Engine`.

    Args:
        arguments: `policy`, `scheduler`, `indexer`, `prefill_kv`, `cp_split`, `indexer_scratch_mb`, `cpu_threads`,
            `cpu_weight_packing`, `allow_policy_switch` and `ab_alternate` are ours (see
            `python -m glm_runtime.launch_server --help`); everything else is `sglang.ServerArgs`. Without
            `model_path` the embedded tiny model is served.

    Raises:
        ConfigError, policies.base.PolicyError: what was asked for cannot be honoured; one line naming it.
    """
    from glm_runtime import config, model_files, prepare, symbols

    if multiprocessing.parent_process() is not None and config.asked() is not None:
        raise ConfigError(
            "an engine is being made while one of its own processes starts: that process imports the script again; "
            'put what makes the engine under `if __name__ == "__main__":`'
        )
    if config.asked() is not None:
        raise ConfigError("an engine of this process is still running; shut it down first (engine.shutdown())")
    ours = {name: arguments.pop(name) for name in list(arguments) if name in Options.names()}
    options = Options.of({name: value for name, value in ours.items() if value is not None})
    for name in options.gateway.given():
        raise ConfigError(f"{name}: the ZMQ gateway belongs to the server (glm_runtime.launch_server); drop it")
    path = arguments.get("model_path")
    overrides = arguments.get("json_model_override_args")
    if path is not None:
        model_files.check(str(path), arguments.get("load_format"), overrides)
    device = prepare.choose_device(arguments.get("device"))
    ranks = 1
    for size in ("tp_size", "pp_size", "dp_size"):
        ranks *= int(arguments.get(size) or 1)
    request = prepare.request_for(options, device, ranks, usage="engine")
    if path is None:
        path = prepare.default_model()
        model_files.check(path, arguments.get("load_format"), overrides)
    arguments["model_path"] = str(path)
    if device == "cpu":
        arguments.setdefault("device", "cpu")
    # NOTE: published before anything of SGLang is imported: its platform is chosen during import.
    before = dict(os.environ)
    prepare.set_environment(request, ranks * options.parallel.pcp)
    try:
        symbols.check()
        return _start(request, options, arguments, before)
    except BaseException:
        _restore(before)
        raise


def _restore(before: dict[str, str]) -> None:
    """Take the request back, and give this process the environment it had."""
    ports.release()
    RuntimeConfig.retract()
    for name in set(os.environ) - set(before):
        if name in CHANGED:
            del os.environ[name]
    for name in CHANGED:
        if name in before:
            os.environ[name] = before[name]


def _start(request: RuntimeConfig, options: Options, arguments: dict[str, Any], before: dict[str, str]) -> Any:
    from glm_runtime import ending, live_switch, model_files, prepare, refuse
    from policies.switch.state import DEADLINE_S

    prepare.load_plugins()
    from sglang.srt.platforms import current_platform

    if request.device == "cpu" and current_platform.device_name != "glm_cpu":
        raise ConfigError(
            f"SGLang chose its platform ({current_platform.device_name}) before glm_runtime.Engine was called; "
            "start the engine before anything else of sglang is imported"
        )
    from sglang.srt.entrypoints.engine import Engine as SglangEngine
    from sglang.srt.server_args import ServerArgs

    class PolicyEngine(SglangEngine):
        """sglang.Engine that takes its request back when it shuts down."""

        def shutdown(self) -> None:
            super().shutdown()
            _restore(before)

        def switch_scheduler(self, scheduler: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
            """Change the scheduler, as POST /policy does; returns when it is done. Raises live_switch.Refused."""
            order = live_switch.order_of({"scheduler": scheduler, "deadline_s": deadline_s})
            answer: dict[str, Any] = self.loop.run_until_complete(live_switch.change(self.tokenizer_manager, order))
            return answer

    arguments.setdefault("log_level", "error")
    try:
        server_args = ServerArgs(**arguments)
    except TypeError as error:  # an argument that neither of us knows
        raise ConfigError(ending.describe(error)) from None
    config = model_files.read_config(server_args.model_path)
    refuse.launch(server_args, request, config, options.cp_split)
    prepare.fit(server_args, request, config)
    ending.catch_child_failures(server_args)
    try:
        return PolicyEngine(server_args=server_args)
    except BaseException:
        ending.end_children()
        raise
