"""Workloads: the same for every arm, seeded, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm_runtime.ab import mixes, workloads
from glm_runtime.ab.asks import Ask, Workload
from glm_runtime.config import ConfigError

VOCAB = range(5, 200)


def no_tokenizer() -> Any:
    raise AssertionError("not needed")


def load(text: str, seed: int = 0, speed: float = 1.0) -> Workload:
    return workloads.load(text, speed, VOCAB, no_tokenizer, seed)


@pytest.mark.parametrize("name", list(mixes.MIXES))
def test_mixes_are_seeded(name: str) -> None:
    made = load(name)
    assert made.fingerprint == load(name).fingerprint != load(name, seed=1).fingerprint
    assert [ask.at for ask in made.asks] == sorted(ask.at for ask in made.asks)
    assert all(set(ask.prompt) <= set(VOCAB) for ask in made.asks)  # type: ignore[arg-type]


def test_flags_of_a_mix() -> None:
    made = load("interference --streams 2 --long 50 --long-count 2 --after 0.5 --every 1")
    assert made.kinds == ("stream", "long prompt")
    assert [(ask.at, ask.prompt_tokens) for ask in made.asks if ask.kind == "long prompt"] == [(0.5, 50), (1.5, 50)]
    shared = load("shared-prefix --groups 2 --per-group 3 --prefix 40 --question 8")
    assert len({ask.prompt[:40] for ask in shared.asks}) == 2 and len(shared.asks) == 6
    assert [ask.at for ask in load("burst --every 4", speed=2.0).asks][-1] == 2.0


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("nothing-here", "nothing-here"),
        ("burst --size 0", "--size"),
        ("burst --sise 3", "--sise"),
        ("burst --size many", "--size"),
        ("", "empty"),
        ("trace", "--trace"),
        ("trace missing.csv", "missing.csv"),
    ],
)
def test_what_is_no_workload(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load(text)


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_ms,input_tokens,output_tokens,prefix_block_ids_16\n500,40,3,0 1 2\n900,33,2,0 1\n")
    made = load(str(path), speed=2.0)
    assert [ask.at for ask in made.asks] == [0.0, 0.2]
    a, b = (ask.prompt for ask in made.asks)
    assert a[:32] == b[:32] and (len(a), len(b)) == (40, 33)
    assert made.reuse == pytest.approx(32 / 73)
    half = load(workloads.with_trace_flags(str(path), divide_lengths=2, limit=1))
    assert [(ask.prompt_tokens, ask.new) for ask in half.asks] == [(20, 2)]
    with pytest.raises(ConfigError, match="--limit"):
        workloads.with_trace_flags("burst", limit=3)
    path.write_text("arrival_ms,input_tokens,output_tokens,prefix_block_ids_16\n500,40,3,0 1 2\n900,none,2,0 1\n")
    with pytest.raises(ConfigError, match=r"t\.csv:3"):
        load(str(path))


def test_recorded_text_is_asked_as_text(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    rows = [
        {"format": "glm_runtime-record", "version": 1, "block_size": 4},
        {"t": 9.0, "prompt_tokens": 5, "output_tokens": 2, "blocks": ["ab"], "text": "Hello"},
        {"t": 8.0, "prompt_tokens": 6, "output_tokens": 1, "blocks": ["ab"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    late, early = sorted(load(str(path)).asks, key=lambda ask: ask.at)[::-1]
    assert (late.prompt, late.at, late.prompt_tokens) == ("Hello", 1.0, 5)
    assert isinstance(early.prompt, tuple) and early.at == 0.0


def test_warm_up_asks_other_tokens_of_all_lengths() -> None:
    load_ = Workload("w", "", tuple(Ask(0.0, tuple(range(5, 5 + n)), 40) for n in (3, 30, 60, 100)))
    asks = workloads.warm_up(load_, 3, VOCAB, 0)
    assert sorted(ask.prompt_tokens for ask in asks)[0] == 3 and max(ask.prompt_tokens for ask in asks) == 100
    assert len(asks) == 3 and all(ask.new <= 16 for ask in asks)
    assert not {ask.prompt[:3] for ask in asks} & {ask.prompt[:3] for ask in load_.asks}
    assert workloads.warm_up(load_, 0, VOCAB, 0) == []
    assert [ask.prompt_tokens for ask in workloads.warm_up(load_, 1, VOCAB, 0)] == [100]


def test_sglangs_datasets() -> None:
    from glm_runtime.ab import model
    from glm_runtime.prepare import default_model

    path = default_model()
    tokenizer = model.tokenizer(path)
    vocab = model.vocabulary(path, tokenizer.all_special_ids, len(tokenizer))
    assert vocab == range(480)  # the embedded model's special tokens are its last ids
    text = "random-ids --num-prompts 6 --random-input-len 50 --random-output-len 9 --request-rate 3"
    made = [workloads.load(text, 1.0, vocab, lambda: tokenizer, seed) for seed in (0, 0, 1)]
    assert made[0].fingerprint == made[1].fingerprint != made[2].fingerprint
    assert len(made[0].asks) == 6 and max(ask.prompt_tokens for ask in made[0].asks) <= 50
    assert 0 < made[0].asks[-1].at < 20
    text = "generated-shared-prefix --gsp-num-groups 2 --gsp-prompts-per-group 2 --gsp-system-prompt-len 40"
    groups = workloads.load(text, 1.0, vocab, lambda: tokenizer, 0).asks
    assert len(groups) == 4 and all(isinstance(ask.prompt, str) and ask.prompt_tokens > 40 for ask in groups)
    for bad, word in (("--num-promts 3", "--num-promts"), ("--request-rate 0", "--request-rate")):
        with pytest.raises(ConfigError, match=word):
            workloads.load(f"random-ids {bad}", 1.0, vocab, lambda: tokenizer, 0)
