"""What each step did: the record that tests, metrics, A/B timelines and the step-time model read.

    step    12   13   14   15          one entry a step that ran something
    rows    p p  d d  p d  d d         by kind: prefill tokens, decode rows
    ms      41    9   38    9          wall time until its result was processed

A ring of the last `size` steps in memory, totals since start, and, if asked for, one JSON line a step in a file. The
file is bounded: at `limit` bytes it becomes FILE.1 (the one before is dropped) and a new FILE begins. Pure.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import IO, Any

from parallel.balance import Shares, step_shares, whole_shares

LIMIT = 64 << 20  # bytes of one file


@dataclass(slots=True)
class Step:
    """One step.

    Attributes:
        number: counts the steps that ran something, from 1.
        at: seconds on the monotonic clock when it was planned.
        mode: "decode", "extend" or "mixed", as SGLang ran it.
        scheduler: who planned it, where that can change while the server runs; else "".
        rows: request id -> rows; filled only while a file is written.
        prefill_tokens, decode_rows: rows by kind.
        left_out: running decodes that got no row.
        dense_rows: rows that took attention's dense branch (context not above index_topk); None where it is SGLang's.
        chunks: prompts that stay half way after it.
        admitted, preempted, failed: requests that changed place while it was planned.
        hits: of the admitted, request id -> tokens found in the prefix cache; filled with `rows`.
        recomputed: rows of admitted requests that had been computed before a preemption and are lost.
        running, waiting: requests after planning.
        free_tokens: KV tokens left after its promises.
        planned_ms: time to decide it and to build its batch; 0 under stock scheduling, which is not timed.
        ms: wall time of the step (CPU: of its forward; else from result to result); None while in flight.
        predicted_ms: the step-time model's forecast of `ms`; None without one.
        rank_rows, rank_visits: rows of each prefill rank, and the keys that they see; empty with one rank.
        rank_imbalance: largest of `rank_visits` over their mean; None with one rank.
    """

    number: int
    at: float
    mode: str
    prefill_tokens: int
    decode_rows: int
    left_out: int = 0
    dense_rows: int | None = None
    chunks: int = 0
    admitted: int = 0
    preempted: int = 0
    failed: int = 0
    recomputed: int = 0
    running: int = 0
    waiting: int = 0
    free_tokens: int = 0
    planned_ms: float = 0.0
    ms: float | None = None
    predicted_ms: float | None = None
    rank_rows: list[int] = field(default_factory=list)
    rank_visits: list[int] = field(default_factory=list)
    rank_imbalance: float | None = None
    scheduler: str = ""
    rows: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Rows of the step in all."""
        return self.prefill_tokens + self.decode_rows


@dataclass(frozen=True, slots=True)
class Sharing:
    """How prefills are shared among ranks: name of the split, number of ranks, and of those that share a cache."""

    split: str
    ranks: int
    dcp: int = 1

    @classmethod
    def of(cls, request: Any) -> Sharing:
        """From the request of a launch (`slots` and `knobs`)."""
        sizes = (request.knobs.get(f"{what}_context_parallel_size", 1) for what in ("prefill", "decode"))
        return cls(request.slots["context_parallel"], *(int(size) for size in sizes))

    def note(self, step: Step, query_lens: Sequence[int], prefix_lens: Sequence[int]) -> None:
        """Fill in what each rank gets of `query_lens` new rows after `prefix_lens` cached keys (`parallel.balance`)."""
        if self.ranks < 2:
            return
        if step.mode == "decode":
            shares: Shares | None = whole_shares(query_lens, prefix_lens, self.ranks)
        else:
            shares = step_shares(self.split, query_lens, prefix_lens, self.ranks, dcp_size=self.dcp)
        if shares is not None:
            step.rank_rows, step.rank_visits, step.rank_imbalance = shares.rows, shares.visits, shares.imbalance


def file_of_rank(path: str | None, tp_rank: int, dp_rank: int | None) -> str | None:
    """The file that a process writes: tensor-parallel rank 0 only, one file for each data-parallel rank."""
    if path is None or tp_rank != 0:
        return None
    return f"{path}.dp{dp_rank}" if dp_rank else path


class StepLog:
    """The record.

    Args:
        size: steps kept in memory.
        path: append one JSON line a step to this file. OSError where it cannot be opened.
        limit: bytes after which the file is turned over.
        more: further facts for `totals()`, as they are when asked.
    """

    def __init__(
        self,
        size: int = 4096,
        path: str | None = None,
        limit: int = LIMIT,
        more: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1 byte, not {limit}")
        self._steps: deque[Step] = deque(maxlen=size)
        self._path = path
        self._limit = limit
        self._more = more
        self._written = 0
        self._file: IO[str] | None = None
        if path is not None:
            self._open(path)
        self.steps = 0
        self.by_mode: dict[str, int] = {}
        self.prefill_tokens = 0
        self.decode_rows = 0
        self.left_out = 0
        self.preempted = 0
        self.recomputed = 0
        self.failed = 0
        self.most_tokens = 0
        self.rank_rows: list[int] = []
        self.rank_visits: list[int] = []

    @property
    def detailed(self) -> bool:
        """Whether steps should carry their rows by request."""
        return self._file is not None

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def last(self, count: int) -> list[Step]:
        """The last `count` steps that are still in memory, oldest first."""
        if count < 0:
            raise ValueError(f"count must not be negative, not {count}")
        return list(islice(self._steps, max(0, len(self._steps) - count), None))

    def add(self, step: Step) -> None:
        """A step whose result has been processed."""
        self._steps.append(step)
        self.steps += 1
        self.by_mode[step.mode] = self.by_mode.get(step.mode, 0) + 1
        self.prefill_tokens += step.prefill_tokens
        self.decode_rows += step.decode_rows
        self.left_out += step.left_out
        self.preempted += step.preempted
        self.recomputed += step.recomputed
        self.failed += step.failed
        self.most_tokens = max(self.most_tokens, step.tokens)
        if step.rank_rows:
            self.rank_rows = _sums(self.rank_rows, step.rank_rows)
            self.rank_visits = _sums(self.rank_visits, step.rank_visits)
        if self._file is not None:
            self._write(json.dumps(asdict(step)) + "\n")

    def totals(self) -> dict[str, Any]:
        """Counters since start, for GET /policy."""
        facts = {
            "steps": self.steps,
            "steps_by_mode": dict(self.by_mode),
            "prefill_tokens": self.prefill_tokens,
            "decode_rows": self.decode_rows,
            "decode_rows_left_out": self.left_out,
            "preempted": self.preempted,
            "recomputed_tokens": self.recomputed,
            "failed": self.failed,
            "most_tokens_in_a_step": self.most_tokens,
        }
        if self.rank_rows:
            facts |= {"rank_rows": self.rank_rows, "rank_visits": self.rank_visits}
        return facts if self._more is None else facts | self._more()

    def _open(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115
        self._written = self._file.tell()

    def _write(self, line: str) -> None:
        assert self._file is not None and self._path is not None
        if self._written and self._written + len(line) > self._limit:
            self._file.close()
            os.replace(self._path, self._path + ".1")
            self._open(self._path)
        self._file.write(line)
        self._written += len(line)


def _sums(so_far: list[int], more: list[int]) -> list[int]:
    return [a + b for a, b in zip(so_far or [0] * len(more), more, strict=True)]
