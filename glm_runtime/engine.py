"""`glm_runtime.Engine`: the in-process form, as `sglang.Engine`, with our options as keyword arguments.

engine = glm_runtime.Engine(policy="sglang", dtype="float32", max_total_tokens=8192)
engine.generate("Hello", {"max_new_tokens": 8})
engine.shutdown()
"""

from __future__ import annotations

from typing import Any

from glm_runtime.cli import Options
from glm_runtime.config import ConfigError, RuntimeConfig


def Engine(**arguments: Any) -> Any:
    """Start an engine under a policy; returns an instance of `sglang.Engine`.

    Args:
        arguments: `policy`, `scheduler`, `indexer`, `prefill_kv`, `cp_split`, `indexer_scratch_mb`, `cpu_threads` and
            `cpu_weight_packing` are ours (see `python -m glm_runtime.launch_server --help`); everything else is
            `sglang.ServerArgs`. Without `model_path` the embedded tiny model is served.

    Raises:
        ConfigError, policies.base.PolicyError: what was asked for cannot be honoured; one line naming it.
    """
    from glm_runtime import prepare, symbols

    ours = {name: arguments.pop(name) for name in list(arguments) if name in Options.__dataclass_fields__}
    options = Options(**ours)
    device = prepare.choose_device(arguments.get("device"))
    ranks = 1
    for size in ("tp_size", "pp_size", "dp_size"):
        ranks *= int(arguments.get(size) or 1)
    request = prepare.request_for(options, device, ranks)
    arguments.setdefault("model_path", None)
    if arguments["model_path"] is None:
        arguments["model_path"] = prepare.default_model()
    if device == "cpu":
        arguments.setdefault("device", "cpu")
    config = prepare.model_config(arguments["model_path"])
    prepare.check_architecture(arguments["model_path"], config)
    # NOTE: published before anything of SGLang is imported: its platform is chosen during import.
    prepare.set_environment(request, ranks)
    try:
        symbols.check()
        return _start(request, options, config, arguments)
    except BaseException:
        RuntimeConfig.retract()
        raise


def _start(request: RuntimeConfig, options: Options, config: dict[str, Any], arguments: dict[str, Any]) -> Any:
    from glm_runtime import prepare, refuse

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
            RuntimeConfig.retract()

    arguments.setdefault("log_level", "error")
    server_args = ServerArgs(**arguments)
    refuse.launch(server_args, request, config, options.cp_split)
    return PolicyEngine(server_args=server_args)
