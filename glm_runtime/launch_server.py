"""`python -m glm_runtime.launch_server`: SGLang's server under a glm_runtime policy.

    argv ─> our flags ─> checks ─> request published ─> SGLang's own argument parsing and launch_server
                 any refusal: one line on standard error, exit code 2, no process left

Exit codes: 0 stopped normally, 1 failed while starting or serving, 2 refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from glm_runtime.cli import Options, help_text, split
from glm_runtime.config import ConfigError


def fail(text: object, code: int = 2) -> NoReturn:
    """One line on standard error, then exit."""
    line = " ".join(str(text).split())
    print(f"glm_runtime: error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def value_of(argv: Sequence[str], *flags: str) -> str | None:
    """Last value given to any of `flags` in `argv`, as `--flag value` or `--flag=value`."""
    found = None
    for i, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name in flags:
            found = value if equals else (argv[i + 1] if i + 1 < len(argv) else None)
    return found


def rank_count(argv: Sequence[str]) -> int:
    """Model processes that SGLang's size flags ask for."""
    ranks = 1
    for flags in (
        ("--tp-size", "--tensor-parallel-size", "--tp"),
        ("--pp-size", "--pipeline-parallel-size"),
        ("--dp-size", "--data-parallel-size"),
    ):
        text = value_of(argv, *flags)
        if text is not None and text.isdigit() and int(text) > 0:
            ranks *= int(text)
    return ranks


def main(argv: Sequence[str] | None = None) -> None:
    """Run the server until it is stopped."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any(a in ("-h", "--help") for a in arguments):
        print(help_text())
        return
    options, rest, raw = split(arguments)
    if raw.list_policies:
        from policies.registry import format_list

        print(format_list())
        return
    from policies.base import PolicyError

    try:
        serve(options, rest)
    except (ConfigError, PolicyError) as error:
        fail(error)


def serve(options: Options, argv: list[str]) -> None:
    """Check, publish and hand over to SGLang. Raises ConfigError or PolicyError before any process is started."""
    from glm_runtime import prepare, refuse, symbols

    device = prepare.choose_device(value_of(argv, "--device"))
    ranks = rank_count(argv)
    request = prepare.request_for(options, device, ranks)
    # NOTE: published before anything of SGLang is imported: its platform is chosen during import.
    prepare.set_environment(request, ranks)
    symbols.check()
    if value_of(argv, "--model-path", "--model") is None and value_of(argv, "--config") is None:
        argv = ["--model-path", prepare.default_model(), *argv]
    if device == "cpu" and value_of(argv, "--device") is None:
        argv = [*argv, "--device", "cpu"]
    prepare.load_plugins()

    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(argv)
    config = prepare.model_config(server_args.model_path)
    prepare.check_architecture(server_args.model_path, config)
    refuse.launch(server_args, request, config, options.cp_split)
    refuse.port(server_args.host or "127.0.0.1", server_args.port)
    if device == "cpu":
        print(
            f"glm_runtime: policy {request.policy}, CPU, {ranks} rank(s) of {request.threads} OpenMP thread(s) "
            f"on cores {os.environ['SGLANG_CPU_OMP_THREADS_BIND']}",
            flush=True,
        )
    run(server_args)


def run(server_args: object) -> None:
    """SGLang's server; whatever happens, no child outlives this process."""
    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    from glm_runtime.report import PolicyNotActive

    try:
        run_server(server_args)
    except PolicyNotActive as error:
        kill_process_tree(os.getpid(), include_parent=False)
        fail(error, code=1)
    except (ValueError, RuntimeError, OSError) as error:
        kill_process_tree(os.getpid(), include_parent=False)
        fail(error, code=1)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
