"""`python -m glm_runtime.launch_server`: SGLang's server under a glm_runtime policy.

    argv ─> our flags ─> checks ─> request published ─> SGLang's own argument parsing and launch_server
                 any refusal: one line on standard error, exit code 2, no process left

Exit codes: 0 stopped normally, 1 failed while starting or serving, 2 refused.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from glm_runtime import config_file, ending
from glm_runtime.cli import Options, help_text, once, split
from glm_runtime.config import ConfigError, RuntimeConfig
from glm_runtime.ending import fail
from glm_runtime.threads import given_threads

SIZES = {
    "tp_size": ("--tp-size", "--tensor-parallel-size", "--tp"),
    "pp_size": ("--pp-size", "--pipeline-parallel-size", "--pp"),
    "dp_size": ("--dp-size", "--data-parallel-size", "--dp"),
}
MODEL = ("--model-path", "--model")
DEFAULT_PORT = 30000


class Given:
    """SGLang's arguments as far as they are needed before SGLang reads them: command line first, then --config."""

    def __init__(self, argv: Sequence[str], content: Mapping[str, Any] | None = None) -> None:
        self.argv = list(argv)
        self.content = dict(content or {})

    def value(self, *flags: str) -> str | None:
        """Last value given to any of `flags`, as `--flag value` or `--flag=value`."""
        found = None
        for i, argument in enumerate(self.argv):
            name, equals, value = argument.partition("=")
            if name in flags:
                found = value if equals else (self.argv[i + 1] if i + 1 < len(self.argv) else None)
        if found is None:
            found = config_file.text_of(self.content, *(flag.removeprefix("--") for flag in flags))
        return found

    def ranks(self) -> int:
        """Model processes that SGLang's size flags ask for."""
        ranks = 1
        for flags in SIZES.values():
            text = self.value(*flags)
            if text is not None and text.isdigit() and int(text) > 0:
                ranks *= int(text)
        return ranks


def main(argv: Sequence[str] | None = None) -> None:
    """Run the server until it is stopped."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if any(a in ("-h", "--help") for a in arguments):
            print(help_text())
            return
        once(arguments)
        path, arguments = config_file.path_in(arguments)
        content: dict[str, Any] = {}
        if path is not None:
            content = config_file.read(path)
            arguments = config_file.our_flags(path, content) + arguments
        options, rest, raw = split(arguments)
        if raw.list_policies:
            from policies.registry import format_list

            print(format_list())
            return
        serve(options, Given(rest, content))
    except (ConfigError, policy_error()) as error:
        fail(error)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:  # --help into a reader that has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Exception as error:
        if Given(arguments).value("--log-level") == "debug":
            raise
        fail(f"{ending.describe(error)} (--log-level debug shows where)", code=1)


def policy_error() -> type[Exception]:
    """policies.base.PolicyError."""
    from policies.base import PolicyError

    return PolicyError


def serve(options: Options, given: Given) -> None:
    """Check, publish and hand over to SGLang. Raises ConfigError or PolicyError before any process is started."""
    given_threads()  # before anything loads OpenMP
    from glm_runtime import model_files, ports, prepare, refuse, symbols
    from glm_runtime.gateway import flags as gateway_flags
    from glm_runtime.gateway import listen, mount

    # What can be refused without SGLang is refused first: it is quick, and nothing else has been said by then.
    path = given.value(*MODEL)
    if path is not None:
        model_files.check(path, given.value("--load-format"), given.value("--json-model-override-args"))
    port = given.value("--port") or str(DEFAULT_PORT)
    if port.removeprefix("-").isdecimal():
        refuse.port(given.value("--host") or "127.0.0.1", int(port))
        if not ports.hold(int(port)):
            raise ConfigError(f"--port {port}: another server is starting on it; choose another")
    gateway = gateway_flags.settings_of(options.gateway)
    device = prepare.choose_device(given.value("--device"))
    ranks = given.ranks()
    request = prepare.request_for(options, device, ranks)
    argv = given.argv
    if path is None:
        path = prepare.default_model()
        model_files.check(path, given.value("--load-format"), given.value("--json-model-override-args"))
        argv = ["--model-path", path, *argv]
    if device == "cpu" and given.value("--device") is None:
        argv = [*argv, "--device", "cpu"]

    # NOTE: published before anything of SGLang is imported: its platform is chosen during import.
    prepare.set_environment(request, ranks * options.parallel.pcp)
    listeners = listen.listen_all(gateway.endpoints) if gateway is not None else []
    try:
        symbols.check()
        prepare.load_plugins()
        server_args = parse(argv, given.content)
        spelled_out(server_args, given, ranks, device)
        config = model_files.read_config(server_args.model_path)
        refuse.launch(server_args, request, config, options.cp_split)
        prepare.fit(server_args, request, config)
        if gateway is not None:
            mount.check(server_args)
            mount.mount(gateway, listeners, request)
    except BaseException:
        for listener in listeners:
            listener.close()
        RuntimeConfig.retract()
        raise
    if device == "cpu":
        world = ranks * options.parallel.pcp
        print(
            f"glm_runtime: policy {request.policy}, CPU, {world} rank(s) of {request.threads} OpenMP thread(s) "
            f"on cores {os.environ['SGLANG_CPU_OMP_THREADS_BIND']}",
            flush=True,
        )
    try:
        run(server_args)
    finally:
        for listener in listeners:
            listener.close()


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """SGLang's parser prints its whole usage and exits; here only its reason remains, as a ConfigError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        lines = [line for line in said.getvalue().splitlines() if line.strip()]
        reason = lines[-1].partition("error: ")[2] or lines[-1] if lines else "SGLang refused the arguments"
        raise ConfigError(reason) from None
    except (ValueError, AssertionError, argparse.ArgumentError) as error:
        raise ConfigError(ending.describe(error)) from None
    sys.stderr.write(said.getvalue())


def parse(argv: list[str], content: Mapping[str, Any]) -> Any:
    """SGLang's ServerArgs, unresolved. Raises ConfigError with the reason of SGLang's own parser."""
    from sglang.srt.server_args import prepare_server_args

    rest: str | None = None
    if content:
        rest = config_file.write_rest(dict(content))
        argv = ["--config", rest, *argv]
    try:
        with usage_errors():
            return prepare_server_args(argv)
    finally:
        if rest is not None:
            os.unlink(rest)


def spelled_out(server_args: Any, given: Given, ranks: int, device: str) -> None:
    """Refuse an abbreviated flag that we needed before SGLang's parser, which completes it, had read it."""
    parsed = 1
    for field, flags in SIZES.items():
        size = int(getattr(server_args, field) or 1)
        if size < 1:
            raise ConfigError(f"{flags[0]} {size} is not positive")
        parsed *= size
    if parsed != ranks:
        raise ConfigError("write --tp-size, --pp-size and --dp-size in full: an abbreviation was read by SGLang only")
    if (server_args.device or "cpu").split(":")[0] == "cpu" and device != "cpu":
        raise ConfigError("write --device in full: an abbreviation was read by SGLang only")
    path = given.value(*MODEL)
    if path is not None and path != server_args.model_path:
        raise ConfigError("write --model-path in full, and once")


def run(server_args: Any) -> None:
    """SGLang's server; whatever happens, no child outlives this process."""
    from sglang.launch_server import run_server

    ending.catch_child_failures(server_args)
    debug = str(server_args.log_level).lower() == "debug"
    try:
        run_server(server_args)
    except KeyboardInterrupt:
        pass  # Ctrl-C is how an operator stops a server
    except Exception as error:  # SGLang raises any kind while it resolves arguments and starts
        ending.end_children()
        if debug:
            raise
        fail(ending.describe(error), code=1)
    finally:
        ending.end_children()
        RuntimeConfig.retract()


if __name__ == "__main__":
    try:
        main()
    except SystemExit as stop:
        ending.leave(stop.code)
    except Exception:
        traceback.print_exc()
        ending.leave(1)
elif __name__ == "__mp_main__":
    # A child process imports this module first: from here on it dies with us, also while it still imports SGLang.
    # A terminal's Ctrl-C reaches it too; what then happens is the launcher's to decide.
    from glm_runtime import quiet

    ending.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet.here()
