"""`python -m glm_runtime.ab`: see `cli.py`.

Exit codes: 0 the arms answer the same (or differ within their own noise), 1 failed, 2 refused, 3 they differ for real.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from glm_runtime import quiet
from glm_runtime.config import ConfigError
from glm_runtime.ending import fail

if TYPE_CHECKING:
    from glm_runtime.ab.cli import Plan
    from glm_runtime.ab.fleet import Fleet
    from glm_runtime.ab.runs import Run

REAL = 3


def main(argv: Sequence[str] | None = None) -> None:
    """Run a comparison; ends the process with its exit code."""
    from policies.base import PolicyError

    try:
        code = run(list(sys.argv[1:] if argv is None else argv))
    except (ConfigError, PolicyError) as error:
        fail(error)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (OSError, RuntimeError) as error:  # a server that failed, a file that cannot be written
        fail(error, code=1)
    raise SystemExit(code)


def run(argv: list[str]) -> int:
    """Play, compare, report. Returns the exit code."""
    from glm_runtime.ab import servers, workloads
    from glm_runtime.ab.cli import parse
    from glm_runtime.ab.fleet import Fleet

    plan = parse(argv)
    values = plan.values
    text = workloads.with_trace_flags(values.workload, divide_lengths=values.divide_lengths, limit=values.limit)
    workloads.check(text)
    for arm in plan.servers:
        servers.check(arm)
    folder = Path(values.out or time.strftime("ab-%Y%m%d-%H%M%S"))
    if any(folder.glob("runs/*.json")):
        raise ConfigError(f"--out {folder} holds runs of an earlier comparison; name a new folder")
    if values.svg and not Path(values.svg).parent.is_dir():
        raise ConfigError(f"--svg {values.svg}: there is no folder {Path(values.svg).parent}")
    earlier = _earlier(values.against, [arm.name for arm in plan.arms])

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    quiet.here()
    with Fleet(plan.arms, folder, values.start_timeout, plan.keep) as fleet:
        return _compare(plan, text, fleet, folder, earlier)


def _compare(plan: Plan, text: str, fleet: Fleet, folder: Path, earlier: list[Run]) -> int:
    values = plan.values
    # SGLang's client takes a while to load; the first server starts meanwhile.
    from glm_runtime.ab import host, model, workloads
    from glm_runtime.ab.outcome import outcome
    from glm_runtime.ab.report import files, page, table
    from glm_runtime.ab.runner import rounds

    path = model.path_of(plan.arms[0])
    tokens = model.tokenizer(path)
    vocab = model.vocabulary(path, tokens.all_special_ids, len(tokens))
    workload = workloads.load(text, values.speed, vocab, lambda: tokens, values.seed)
    for one in earlier:
        if one.workload != workload.fingerprint:
            raise ConfigError(f"--against {values.against}: it asked for something else; repeat its workload and seed")
    runs = rounds(
        plan.arms,
        workload,
        workloads.warm_up(workload, values.warmup, vocab, values.seed),
        values.rounds,
        fleet,
        folder,
        logprobs=values.logprobs,
        max_concurrency=values.max_concurrency,
        quiet=values.quiet,
    )
    found = outcome(
        [*earlier, *runs], workload, tokens, plan.slo, values.tolerance, host.machine(), plan.command, values.seed
    )
    print(table.text(found), flush=True)
    files.write(found, folder)
    (folder / "report.html").write_text(page.page(found))
    if values.svg:
        Path(values.svg).write_text(page.picture(found))
    print(f"\nreport: {folder / 'report.html'}")
    if found.failed:
        print(f"glm_runtime: {found.failed} requests had no answer: {found.first_error}", file=sys.stderr)
    if found.real:
        print(f"glm_runtime: {found.real} answers differ, and noise does not explain it", file=sys.stderr)
        return REAL
    return 0


def _earlier(folder: str | None, names: Sequence[str]) -> list[Run]:
    from glm_runtime.ab.runs import load_folder

    if folder is None:
        return []
    found = load_folder(folder)
    for run in found:
        if run.arm in names:
            raise ConfigError(f"--against {folder}: it has an arm {run.arm!r}, too; give this one another name")
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers are stopped on the way out
    main()
