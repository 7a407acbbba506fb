"""glm_runtime's own flags: one table, read by the command line, `glm_runtime.Engine` and `--help`.

argv ── split() ──> ours (this table)  +  the rest (SGLang's ServerArgs, untouched)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

PROG = "python -m glm_runtime.launch_server"
DESCRIPTION = (
    "Serve a GLM-MoE-DSA model on SGLang's runtime with a prefill policy of your choice. "
    "Without --model-path the embedded tiny model is served. All of SGLang's flags follow glm_runtime's own."
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

    def overrides(self) -> dict[str, str | None]:
        """Slot -> implementation named by its own flag."""
        return {
            "scheduler": self.scheduler,
            "indexer": self.indexer,
            "prefill_kv": self.prefill_kv,
            "context_parallel": self.cp_split,
        }


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
        help="OpenMP threads of each rank on CPU (default: OMP_NUM_THREADS, else all usable cores but one, divided by the ranks)",
    )
    group.add_argument(
        "--no-cpu-weight-packing",
        dest="cpu_weight_packing",
        action="store_false",
        help="keep CPU weights unpacked: slower, but online weight updates stay possible",
    )


def split(argv: Sequence[str]) -> tuple[Options, list[str], argparse.Namespace]:
    """Our options, the arguments left for SGLang, and the raw namespace (`list_policies`).

    Exits with code 2 and a usage line where one of our flags has a bad value.
    """
    # NOTE: no abbreviations: --sched could be SGLang's --schedule-policy, and SGLang's parser abbreviates on its own.
    parser = argparse.ArgumentParser(prog=PROG, usage=f"{PROG} [options]", add_help=False, allow_abbrev=False)
    add_arguments(parser)
    ours, rest = parser.parse_known_args(list(argv))
    values = {name: getattr(ours, name) for name in Options.__dataclass_fields__}
    return Options(**values), rest, ours


def help_text() -> str:
    """The whole help: ours on top, then every flag of SGLang."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog=PROG, description=DESCRIPTION, usage=f"{PROG} [options]")
    add_arguments(parser)
    ServerArgs.add_cli_args(parser)
    return parser.format_help()
