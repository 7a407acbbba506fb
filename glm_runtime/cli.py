"""glm_runtime's own flags: one table, read by the command line, `glm_runtime.Engine` and `--help`.

argv ── split() ──> ours (this table)  +  the rest (SGLang's ServerArgs, untouched)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from attention import flags as attention_flags
from attention.flags import AttentionFlags
from glm_runtime.config import ConfigError
from glm_runtime.gateway import flags as gateway_flags
from glm_runtime.gateway.flags import GatewayFlags
from glm_runtime.guard import limits as guard_flags
from glm_runtime.guard.limits import GuardFlags
from parallel import flags as parallel_flags
from parallel.flags import ParallelFlags
from policies.ledger import flags as ledger_flags
from policies.ledger.flags import LedgerFlags
from policies.switch import flags as switch_flags
from policies.switch.flags import SwitchFlags

PROG = "python -m glm_runtime.launch_server"
DESCRIPTION = (
    "Serve a GLM-MoE-DSA model on SGLang's runtime with a prefill policy of your choice. "
    "Without --model-path the embedded tiny model is served; a model of another kind is refused. "
    "All of SGLang's flags follow glm_runtime's own."
)


@dataclass(frozen=True)
class Options:
    """Values of our flags; None where the operator said nothing."""

    policy: str = "sglang"
    scheduler: str | None = None
    indexer: str | None = None
    prefill_kv: str | None = None
    cp_split: str | None = None
    indexer_scratch_mb: int | None = None
    cpu_threads: int | None = None
    cpu_weight_packing: bool = True
    drain_timeout_s: int | None = None
    health_timeout_s: int | None = None
    record: str | None = None
    record_text: bool = False
    ledger: LedgerFlags = field(default_factory=LedgerFlags)
    attention: AttentionFlags = field(default_factory=AttentionFlags)
    parallel: ParallelFlags = field(default_factory=ParallelFlags)
    guard: GuardFlags = field(default_factory=GuardFlags)
    gateway: GatewayFlags = field(default_factory=GatewayFlags)
    switch: SwitchFlags = field(default_factory=SwitchFlags)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Options from parsed values or keyword arguments; names that are not ours are left alone.

        Raises ConfigError naming the flag of a value that cannot be.
        """
        try:
            ledger = ledger_flags.from_values(values)
            attention = attention_flags.from_values(values)
            parallel = parallel_flags.from_values(values)
            guard = guard_flags.from_values(values)
            switch = switch_flags.from_values(values)
        except _FLAG_ERRORS as error:
            raise ConfigError(error) from None
        own = {name: values[name] for name in cls.__dataclass_fields__ if name in values and name not in _GROUPS}
        gateway = gateway_flags.from_values(values)
        return cls(
            **own, ledger=ledger, attention=attention, parallel=parallel, guard=guard, gateway=gateway, switch=switch
        )

    @classmethod
    def names(cls) -> set[str]:
        """Every name that `of` reads."""
        groups = (LedgerFlags, AttentionFlags, ParallelFlags, GuardFlags, GatewayFlags, SwitchFlags)
        grouped = {name for group in groups for name in group.__dataclass_fields__}
        return (set(cls.__dataclass_fields__) | grouped) - _GROUPS

    def overrides(self) -> dict[str, str | None]:
        """Slot -> implementation named by its own flag."""
        return {
            "scheduler": self.scheduler,
            "indexer": self.indexer,
            "prefill_kv": self.prefill_kv,
            "context_parallel": self.cp_split,
        }


_GROUPS = {
    "ledger",
    "attention",
    "parallel",
    "guard",
    "gateway",
    "switch",
}  # fields of Options that hold a group's flags
_FLAG_ERRORS = (ledger_flags.FlagError, attention_flags.FlagError, parallel_flags.FlagError, guard_flags.FlagError)


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing a usage text and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add our flags, as the first group of `parser`."""
    group = parser.add_argument_group("glm_runtime")
    group.add_argument("--policy", default="sglang", metavar="NAME", help="policy to serve by (default: sglang)")
    group.add_argument(
        "--list-policies", action="store_true", help="print policies and slot implementations, then exit"
    )
    group.add_argument("--scheduler", metavar="NAME", help="scheduler slot, instead of the policy's")
    group.add_argument("--indexer", metavar="NAME", help="indexer slot, instead of the policy's")
    group.add_argument("--prefill-kv", metavar="NAME", help="prefill-KV slot, instead of the policy's")
    group.add_argument("--cp-split", metavar="NAME", help="context-parallel slot, instead of the policy's")
    group.add_argument(
        "--indexer-scratch-mb",
        type=_positive,
        metavar="MIB",
        help="scratch of the CPU indexer and sparse attention; no intermediate outgrows it (default on CPU: 64)",
    )
    group.add_argument(
        "--cpu-threads",
        type=_positive,
        metavar="N",
        help="OpenMP threads of each rank on CPU (default: OMP_NUM_THREADS, else a share of all cores but one)",
    )
    group.add_argument(
        "--no-cpu-weight-packing",
        dest="cpu_weight_packing",
        action="store_false",
        help="keep CPU weights unpacked: slower, but online weight updates stay possible",
    )
    group.add_argument(
        "--drain-timeout-s",
        type=_positive,
        metavar="S",
        help="after SIGTERM running requests may go on for so long before they are aborted (default: 30)",
    )
    group.add_argument(
        "--health-timeout-s",
        type=_positive,
        metavar="S",
        help="GET /health answers 503 where the scheduler has said nothing for so long (default: 20)",
    )
    group.add_argument(
        "--record",
        metavar="FILE",
        help="write arrivals, lengths and prefix blocks of all requests to FILE, a trace for ab and simulate",
    )
    group.add_argument("--record-text", action="store_true", help="with --record: write the prompts' text, too")
    ledger_flags.add_arguments(parser)
    attention_flags.add_arguments(parser)
    parallel_flags.add_arguments(parser)
    guard_flags.add_arguments(parser)
    gateway_flags.add_arguments(parser)
    switch_flags.add_arguments(parser)


def once(argv: Sequence[str]) -> None:
    """Raise ConfigError where one of our flags is given twice with different values: which one is meant is a guess."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    repeatable = argparse._AppendAction
    single = [action for action in parser._actions if action.nargs != 0 and not isinstance(action, repeatable)]
    ours = {flag: action.dest for action in single for flag in action.option_strings}
    seen: dict[str, str] = {}
    for i, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name not in ours:
            continue
        value = value if equals else " ".join(argv[i + 1 : i + 2])
        if seen.setdefault(ours[name], value) != value:
            raise ConfigError(f"{name} is given twice: {seen[ours[name]]} and {value}")


def split(argv: Sequence[str]) -> tuple[Options, list[str], argparse.Namespace]:
    """Our options, the arguments left for SGLang, and the raw namespace (`list_policies`).

    Raises ConfigError where one of our flags has a bad value or none.
    """
    # NOTE: no abbreviations: --sched could be SGLang's --schedule-policy, and SGLang's parser abbreviates on its own.
    parser = _Parser(prog=PROG, usage=f"{PROG} [options]", add_help=False, allow_abbrev=False)
    add_arguments(parser)
    ours, rest = parser.parse_known_args(list(argv))
    return Options.of(vars(ours)), rest, ours


def help_text() -> str:
    """The whole help: ours on top, then every flag of SGLang."""
    from sglang.srt.server_args import ServerArgs

    ours = argparse.ArgumentParser(prog=PROG, description=DESCRIPTION, usage=f"{PROG} [options]")
    add_arguments(ours)
    theirs = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    ServerArgs.add_cli_args(theirs)
    return f"{ours.format_help()}\nSGLang's own flags\n\n{theirs.format_help().lstrip()}"
