"""Flags of context parallelism: vLLM's names. Pure.

    command line, Engine keywords --> ParallelFlags --knobs()--> launcher: SGLang's sizes; scheduler process: the split

| flag                                    | default | means                                                            |
|-----------------------------------------|---------|------------------------------------------------------------------|
| --prefill-context-parallel-size, -pcp N | 1       | each prefill's rows are dealt over N ranks (--cp-split says how) |
| --decode-context-parallel-size, -dcp N  | 1       | KV is dealt over N of the ranks that are there                   |
| --cp-kv-cache-interleave-size N         | 1       | tokens that lie on one rank in a row, with -dcp                  |

    processes = tp * pp * dp * PCP         DCP adds none
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from parallel.limits import Sizes, check_sizes

FLAG_OF: Mapping[str, str] = {
    "prefill_context_parallel_size": "--prefill-context-parallel-size",
    "decode_context_parallel_size": "--decode-context-parallel-size",
    "cp_kv_cache_interleave_size": "--cp-kv-cache-interleave-size",
}


class FlagError(ValueError):
    """A flag that cannot be honoured; one line naming it."""


def check(knobs: Mapping[str, Any], tp: int, pp: int, dp: int, page_size: int = 64) -> None:
    """Raises FlagError for sizes that do not go together.

    Args:
        knobs: from `ParallelFlags.knobs`.
        tp, pp, dp: SGLang's sizes without the prefill ranks.
        page_size: tokens a page.
    """
    pcp, dcp, interleave = (knobs[name] for name in FLAG_OF)
    try:
        check_sizes(Sizes(tp, pcp, dcp, pp, dp, interleave, page_size))
    except ValueError as error:
        raise FlagError(error) from None


@dataclass(frozen=True)
class ParallelFlags:
    """Values of the flags; None: not given."""

    prefill_context_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    cp_kv_cache_interleave_size: int | None = None

    def given(self) -> list[str]:
        """Names of the fields that the operator set."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]

    @property
    def pcp(self) -> int:
        """Prefill ranks."""
        return self.prefill_context_parallel_size or 1

    @property
    def dcp(self) -> int:
        """Ranks over which KV is dealt."""
        return self.decode_context_parallel_size or 1

    def knobs(self) -> dict[str, int]:
        """Effective sizes, by field name; JSON values. Raises FlagError for a run length without a decode split."""
        interleave = self.cp_kv_cache_interleave_size
        if interleave is not None and self.dcp == 1:
            raise FlagError(
                f"--cp-kv-cache-interleave-size {interleave} has nothing to deal with "
                "--decode-context-parallel-size 1; raise it, or drop --cp-kv-cache-interleave-size"
            )
        return asdict(ParallelFlags(self.pcp, self.dcp, interleave or 1))


def from_values(values: Mapping[str, Any]) -> ParallelFlags:
    """Flags from parsed values or keyword arguments (None: not given). Raises FlagError naming the flag."""
    given = {name: values[name] for name in FLAG_OF if values.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FlagError(f"{FLAG_OF[name]} {value}: a whole number of at least 1 is needed")
    return ParallelFlags(**given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to `parser`."""
    group = parser.add_argument_group("glm_runtime, context parallelism (names are vLLM's)")

    def add(text: str, *flags: str) -> None:
        group.add_argument(*flags, type=int, default=None, help=text, metavar="N")

    add(
        "ranks that share each prefill's rows, as --cp-split says; multiplies the processes (default 1)",
        "--prefill-context-parallel-size",
        "-pcp",
    )
    add(
        "ranks over which the KV of a request is dealt, of those that are there (default 1)",
        "--decode-context-parallel-size",
        "-dcp",
    )
    add("tokens in a row on one rank under -dcp; divides the page (default 1)", "--cp-kv-cache-interleave-size")
