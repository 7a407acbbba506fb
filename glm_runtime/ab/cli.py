"""Command line of `python -m glm_runtime.ab`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from glm_runtime.ab import datasets, mixes
from glm_runtime.ab.arms import Arm, arms, flag_name, split_flags
from glm_runtime.ab.fleet import Keep
from glm_runtime.ab.live import one_server
from glm_runtime.ab.slo import Slo
from glm_runtime.config import ConfigError

PROG = "python -m glm_runtime.ab"
DESCRIPTION = "Serve one workload under several policies, in turn, and compare answers, latencies and steps."
EXIT_CODES = "exit codes: 0 answers equal (or within noise), 1 failed, 2 refused, 3 answers differ for real"


@dataclass(frozen=True)
class Plan:
    """What was asked for. `values`: the parsed flags; `arms`: with all their server flags."""

    values: argparse.Namespace
    arms: list[Arm]
    command: str

    @property
    def keep(self) -> Keep:
        """Which servers are alive."""
        return "live" if self.values.live_switch else "all" if self.values.keep_servers else "one"

    @property
    def servers(self) -> list[Arm]:
        """What is started: an arm each, or what all arms share."""
        return [one_server(self.arms)] if self.values.live_switch else self.arms

    @property
    def slo(self) -> Slo:
        """Limits of goodput."""
        return Slo(self.values.slo_ttft_ms, self.values.slo_itl_ms)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _at_least(least: float, kind: type[int] | type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' * (kind is int)}number") from None
        if not least <= value < 1e12:
            raise argparse.ArgumentTypeError(f"{text} is below {least:g}" if value < least else f"{text} is too large")
        return value

    return read


def parser() -> argparse.ArgumentParser:
    """All flags."""
    made = _Parser(
        prog=PROG,
        description=DESCRIPTION,
        epilog=f"built-in workloads and their own flags:\n{mixes.help_text()}\n"
        f"  SGLang's datasets, with the flags of its benchmark: {', '.join(datasets.NAMES)}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = made.add_argument_group("arms")
    what.add_argument("--policies", metavar="A,B", help="one arm for each policy, at its defaults")
    what.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar='"NAME: FLAGS"',
        help="an arm with flags of glm_runtime.launch_server; may be given many times",
    )
    what.add_argument(
        "--budget",
        type=_at_least(1, int),
        metavar="N",
        help="tokens of a step in every arm: --chunked-prefill-size or the ledger's --max-num-batched-tokens",
    )
    what.add_argument("--against", metavar="FOLDER", help="runs of an earlier comparison go first, and are the base")
    load = made.add_argument_group("workload")
    load.add_argument(
        "--workload",
        default="interference",
        metavar='"W [FLAGS]"',
        help="a built-in mix, a dataset of SGLang's, or a trace file (default: interference)",
    )
    load.add_argument("--speed", type=float, default=1.0, metavar="X", help="arrivals X times as fast (default 1)")
    load.add_argument("--divide-lengths", type=int, metavar="D", help="of a trace: lengths divided by D, rounded up")
    load.add_argument("--limit", type=int, metavar="N", help="of a trace: the first N requests only")
    load.add_argument("--seed", type=int, default=0, help="of prompts and of the servers (default 0)")
    load.add_argument(
        "--max-concurrency",
        type=_at_least(1, int),
        metavar="N",
        help="requests at once (default: as they arrive)",
    )
    run = made.add_argument_group("rounds")
    run.add_argument(
        "--rounds",
        type=_at_least(1, int),
        default=2,
        metavar="N",
        help="times that every arm plays the workload; two or more give the noise floor (default 2)",
    )
    run.add_argument(
        "--warmup",
        type=_at_least(0, int),
        default=4,
        metavar="N",
        help="requests before the clock runs, of lengths spread over the workload's (default 4)",
    )
    keep = run.add_mutually_exclusive_group()
    keep.add_argument("--keep-servers", action="store_true", help="all servers stay up, instead of one at a time")
    keep.add_argument(
        "--live-switch",
        action="store_true",
        help="one server for all arms, whose scheduler is changed between them; they may differ in --scheduler only",
    )
    run.add_argument(
        "--start-timeout",
        type=_at_least(1, float),
        default=1800.0,
        metavar="S",
        help="seconds that a server may take to start (default 1800)",
    )
    said = made.add_argument_group("comparison")
    said.add_argument("--slo-ttft-ms", type=_at_least(0, float), metavar="T", help="limit of goodput")
    said.add_argument(
        "--slo-itl-ms",
        type=_at_least(0, float),
        metavar="T",
        help="limit of goodput, for 99 of 100 gaps of a request",
    )
    said.add_argument(
        "--no-logprobs",
        dest="logprobs",
        action="store_false",
        help="tokens only: less work for the servers, but no noise floor and no gaps",
    )
    said.add_argument(
        "--tolerance",
        type=_at_least(0, float),
        default=0.0,
        metavar="X",
        help="logprob gap that counts as noise in any case (default 0)",
    )
    out = made.add_argument_group("output")
    out.add_argument("--out", metavar="FOLDER", help="where report, figures, runs and logs go (default: ab-DATE-TIME)")
    out.add_argument("--svg", metavar="FILE", help="the steps' picture alone")
    out.add_argument("--quiet", action="store_true", help="no progress bar")
    return made


def parse(argv: Sequence[str]) -> Plan:
    """The plan of a command line. Flags that are not ours go to every arm's server. Raises ConfigError."""
    ours, common = parser().parse_known_args(list(argv))
    policies = [name.strip() for name in (ours.policies or "").split(",") if name.strip()]
    if not any(flag_name(words) == "--random-seed" for words in split_flags(common)):
        common = [*common, "--random-seed", str(ours.seed)]
    if ours.live_switch and ours.budget is not None:
        raise ConfigError(
            "--budget: with --live-switch all arms have one server's budget; use --max-num-batched-tokens"
        )
    made_arms = arms(policies, ours.arm, common, ours.budget)
    if len(made_arms) < 2 and ours.against is None:
        raise ConfigError("one arm only: name a second one, or an earlier comparison with --against")
    return Plan(ours, made_arms, f"{PROG} {shlex.join(argv)}")
