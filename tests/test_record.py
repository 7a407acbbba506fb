"""--record: its flags, and the lines of a scheduler process's file."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glm_runtime import record
from glm_runtime.cli import Options, split
from glm_runtime.config import ConfigError
from glm_runtime.traces import read


def ended(prompt: list[int], produced: int, rid: str, new: int = 16) -> Any:
    """The fields of SGLang's Req that are read."""
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=prompt,
        output_ids=list(range(produced)),
        finished_len=None,
        sampling_params=SimpleNamespace(max_new_tokens=new),
        time_stats=SimpleNamespace(created_time=time.perf_counter(), scheduler_recv_time=time.perf_counter() + 9),
    )


def decode(tokens: list[int]) -> str:
    return record.WARM_UP if tokens == [1, 2, 3] else " ".join(map(str, tokens))


def test_a_record_reads_as_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    kept = record.Record(str(path), 4, False, decode)
    kept.add(ended([1, 2, 3], 8, "warm", new=8))  # SGLang's own
    kept.add(ended([1, 2, 3], 8, "same words", new=8))
    kept.add(ended(list(range(10)), 5, "a"))
    kept.add(ended([*range(8), 90, 91, 92, 93], 1, "b"))
    kept.add(ended([7], 0, "ended in the line"))
    requests = read(path)
    assert [r.rid for r in requests] == ["same words", "a", "b", "ended in the line"]
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(3, 8), (10, 5), (12, 1), (1, 1)]
    _, a, b, _ = requests
    assert a.block_ids == b.block_ids[:2] and len(b.block_ids) == 3 and a.block_size == 4
    assert all(earlier.arrival_s <= later.arrival_s for earlier, later in itertools.pairwise(requests))
    assert "text" not in path.read_text()


def test_text_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record.Record(str(path), 4, True, decode).add(ended([5, 6], 1, "a"))
    assert json.loads(path.read_text().splitlines()[1])["text"] == "5 6"


def test_flags(tmp_path: Path) -> None:
    options, rest, _ = split(["--record", "x.jsonl", "--record-text", "--tp-size", "2"])
    assert (options.record, options.record_text, rest) == ("x.jsonl", True, ["--tp-size", "2"])
    assert {"record", "record_text"} <= Options.names()
    assert record.knobs(None, False) == {}
    path = tmp_path / "new.jsonl"
    assert record.knobs(str(path), True) == {"record": str(path), "record_text": True}
    path.write_text("something\n")
    for bad, word in ((str(path), "exists already"), (str(tmp_path / "no" / "x"), "there is no folder")):
        with pytest.raises(ConfigError, match=f"--record .*{word}"):
            record.knobs(bad, False)
    with pytest.raises(ConfigError, match="--record-text"):
        record.knobs(None, True)
