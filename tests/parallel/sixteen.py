"""Every scheduler, indexer and prefill KV on two head-tail ranks against one rank's tokens, in float32.

    python -m tests.parallel.sixteen

The eight combinations that the suite serves on one rank, here on two; of these the suite itself has the two of
`tests/parallel/pcp.py`. Takes about five minutes on two cores; exit code 1 where an answer differs.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

from tests.equality.prompts import prompt
from tests.equality.serving import Ask, Serving
from tests.parallel.pcp import CHUNKED, LEDGER, NEW, QCHUNK

ASKS = [Ask(prompt(length), NEW) for length in (1, 3, 40, 100, 500, 1500)]
SLOTS = tuple(itertools.product(("sglang", "ledger"), ("ragged", "qchunk"), ("paged", "workspace")))


def tokens(**flags: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Answers of an engine to each prompt alone, and to all at once."""
    with Serving(**flags) as serving:
        alone = [serving.alone(ask).tokens for ask in ASKS]
        serving.fresh()
        return alone, [reply.tokens for reply in serving.together(ASKS)]


def main() -> int:
    """One line a combination."""
    expected = tokens(**CHUNKED)
    wrong = 0
    for scheduler, indexer, prefill_kv in SLOTS:
        flags = (CHUNKED if scheduler == "sglang" else LEDGER) | {"indexer": indexer, "prefill_kv": prefill_kv}
        flags |= {"prefill_context_parallel_size": 2, "cp_split": "head-tail"} | (QCHUNK if indexer == "qchunk" else {})
        same = tokens(**flags) == expected
        wrong += not same
        print(f"{scheduler:8}{indexer:8}{prefill_kv:11}{'equal' if same else 'DIFFERENT'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
