"""python -m glm_runtime.plan: see the package."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import attention.flags
import policies.ledger.flags
from glm_runtime.plan.flags import add_launch, launch
from glm_runtime.plan.report import as_json, sections, text
from glm_runtime.plan.shapes import PlanError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m glm_runtime.plan",
        description="Steps, indexer chunks, memory, rank balance, traffic and predicted times of a launch.",
    )
    add = made.add_argument
    add("--context", type=int, required=True, metavar="TOKENS", help="the prompt")
    add("--output", type=int, default=1, metavar="TOKENS")
    add("--cached-prefix", type=int, default=0, metavar="TOKENS", help="of the prompt, found in the prefix cache")
    add("--decodes", type=int, default=0, metavar="N", help="requests that decode meanwhile")
    add("--decode-context", type=int, default=4096, metavar="TOKENS", help="of each of them (default 4096)")
    add("--budgets", metavar="N,N,...", help="compare these values of --max-num-batched-tokens")
    add("--steps", action="store_true", help="tell every step as well")
    add("--no-advice", action="store_true", help="leave out the search for the best knob")
    add("--json", action="store_true", help="JSON instead of text")
    add_launch(made)
    return made


def budgets_of(given: str | None) -> list[int]:
    """Values of --budgets. PlanError where they are no numbers."""
    try:
        found = [int(part) for part in given.split(",")] if given else []
    except ValueError:
        found = [0]
    if any(value < 1 for value in found):
        raise PlanError(f"--budgets {given}: whole numbers of at least 1, separated by commas, are needed")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; 2 where it cannot be made."""
    values = parser().parse_args(arguments)
    try:
        setup = launch(
            values,
            context=values.context,
            output=values.output,
            cached=values.cached_prefix,
            decodes=values.decodes,
            decode_context=values.decode_context if values.decodes else 0,
        )
        parts = sections(setup, budgets_of(values.budgets), advise=not values.no_advice, each_step=values.steps)
    except (PlanError, attention.flags.FlagError, policies.ledger.flags.FlagError) as error:
        print(f"glm_runtime.plan: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(parts), indent=1) if values.json else text(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
