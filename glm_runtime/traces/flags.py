"""The trace flags that `ab` and `simulate` share."""

from __future__ import annotations

import argparse

from glm_runtime.traces.read import KINDS, read
from glm_runtime.traces.request import Request
from glm_runtime.traces.scale import scale


def add_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add --trace and what reshapes it."""
    group = parser.add_argument_group("trace")
    group.add_argument("--trace", metavar="FILE", required=required, help="CSV or JSON lines, also .gz")
    group.add_argument("--trace-kind", choices=KINDS, help="default: by the first line")
    group.add_argument("--speed", type=float, default=1.0, metavar="X", help="X times as fast (default 1)")
    group.add_argument(
        "--divide-lengths", type=int, default=1, metavar="D", help="lengths and blocks divided by D, rounded up"
    )
    group.add_argument("--limit", type=int, metavar="N", help="the first N requests only")


def load(values: argparse.Namespace) -> list[Request]:
    """The trace that the flags of `add_arguments` name. ValueError (TraceError among them) for what cannot be."""
    requests = read(values.trace, values.trace_kind)
    if values.limit is not None:
        if values.limit < 1:
            raise ValueError(f"--limit {values.limit}: a whole number of at least 1 is needed")
        requests = requests[: values.limit]
    return scale(requests, values.speed, values.divide_lengths)
