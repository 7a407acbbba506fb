"""Readers of the four trace formats, scaling, and prompts that share what the trace says they share."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_runtime.traces import Request, TraceError, block_names, header, prompts, read, reuse, row, scale


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_azure_times_count_from_the_first_row(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.0319600,3180,8",
    )
    assert read(path) == [Request(0.0, 4808, 10), Request(0.052, 3180, 8)] == read(path, "azure")


def test_csv_with_blocks(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_ms,input_tokens,output_tokens,prefix_block_ids_16", "40,33,2,0 7 9", "0,16,1,4")
    assert read(path) == [Request(0.0, 16, 1, (4,), 16), Request(0.04, 33, 2, (0, 7, 9), 16)] == read(path, "mooncake")


def test_mooncake_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}',
        '{"timestamp": 1500, "input_length": 512, "output_length": 6, "hash_ids": [0]}',
    )
    expected = [Request(0.0, 600, 5, (0, 1), 512), Request(1.5, 512, 6, (0,), 512)]
    assert read(path) == expected
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(packed) == expected


def test_a_record_comes_back(tmp_path: Path) -> None:
    tokens = [3 * i % 101 for i in range(130)]
    lines = [header(64), row(0.25, 130, 4, block_names(tokens, 64), "r1"), row(0.5, 7, 1, [])]
    found = read(write(tmp_path, *map(json.dumps, lines)))
    names = tuple(int(name, 16) for name in block_names(tokens, 64))
    assert len(names) == 2
    assert found == [Request(0.25, 130, 4, names, 64, "r1"), Request(0.5, 7, 1)]


def test_a_name_covers_everything_before_it() -> None:
    one, other = block_names([1] * 8 + [2] * 4, 4), block_names([1] * 4 + [3] * 4 + [2] * 4, 4)
    assert one[0] == other[0] and one[1] != one[0] and one[2] != other[2]


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
RELATIVE = "arrival_ms,input_tokens,output_tokens"
HEAD = json.dumps(header(16))


@pytest.mark.parametrize(
    ("lines", "line", "text"),
    [
        ((AZURE, "2023-11-16 18:17:03.97,10,2", "yesterday,10,2"), 3, "'yesterday' is no time"),
        ((RELATIVE, "0,10"), 2, "2 columns"),
        ((RELATIVE, "0,10,2", "", "1,ten,2"), 4, "'ten'"),
        ((RELATIVE, "0,0,2"), 2, "prompt_tokens is 0"),
        ((RELATIVE, "-1,5,2"), 2, "arrival"),
        ((RELATIVE + ",prefix_block_ids_16", "0,16,2,1 2"), 2, "2 blocks of 16"),
        (('{"timestamp": 0, "input_length": 5}',), 1, "output_length is missing"),
        (('{"timestamp": 0, "input_length": 5, "output_length": 1.5}',), 1, "output_length 1.5"),
        (('{"timestamp": 0, "input_length": 5, "output_length": 1}', "{"), 2, "no JSON"),
        (('{"timestamp": 0, "input_length": 5, "output_length": 1}', "[]"), 2, "no JSON object"),
        (('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}',), 1, "hash_ids"),
        ((HEAD, '{"t": 0, "prompt_tokens": 5, "output_tokens": 1, "blocks": ["zz"]}'), 2, "block 'zz'"),
        ((HEAD.replace("1,", "2,", 1),), 1, "version 2"),
        (("when,what",), 1, "no known kind"),
        (('{"timestamp": 1' + "0" * 400 + ', "input_length": 5, "output_length": 1}',), 1, "too large"),
        (('{"input_length": ' + "[" * 100_000,), 1, "no JSON"),
        ((HEAD, '{"t": 1' + "0" * 400 + ', "prompt_tokens": 5, "output_tokens": 1}'), 2, "arrival"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, lines: tuple[str, ...], line: int, text: str) -> None:
    path = write(tmp_path, *lines)
    with pytest.raises(TraceError) as refused:
        read(path)
    assert str(refused.value).startswith(f"{path}:{line}: ") and text in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    for path, text in ((tmp_path / "absent", "No such file"), (write(tmp_path, RELATIVE), "no requests")):
        with pytest.raises(TraceError, match=text):
            read(path)
    packed = bytearray(gzip.compress(RELATIVE.encode() + b"\n0,1,1" * 999))
    packed[12:32] = b"\xff" * 20
    (tmp_path / "broken.gz").write_bytes(packed)
    with pytest.raises(TraceError, match="decompressing"):
        read(tmp_path / "broken.gz")
    with pytest.raises(TraceError, match="kind 'csv' is unknown"):
        read(tmp_path, "csv")
    with pytest.raises(TraceError, match="prefix_block_ids_N"):
        read(write(tmp_path, RELATIVE, "0,1,1"), "mooncake")


def test_scaling() -> None:
    trace = [Request(3.2, 6758, 500, tuple(range(14)), 512)]
    assert scale(trace, 10, 32) == [Request(0.32, 212, 16, tuple(range(14)), 16)]
    with pytest.raises(ValueError, match="--divide-lengths 30 does not divide"):
        scale(trace, divide_lengths=30)
    with pytest.raises(ValueError, match="--speed 0"):
        scale(trace, speed=0)


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    size = draw(st.integers(1, 9))
    found = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 60))
        most = -(-length // size)
        ids = draw(st.lists(st.integers(0, 3), max_size=most))
        found.append(Request(0.0, length, 1, tuple(ids), size if ids else 0))
    return found


@given(traces(), st.integers(2, 1 << 40), st.integers())
def test_equal_blocks_are_equal_tokens(trace: list[Request], vocab: int, seed: int) -> None:
    made = prompts(trace, vocab, seed=seed)
    blocks: dict[int, list[int]] = {}
    for request, tokens in zip(trace, made, strict=True):
        assert len(tokens) == request.prompt_tokens
        assert all(0 <= token < vocab for token in tokens)
        for i, block in enumerate(request.block_ids):
            part = tokens[i * request.block_size : (i + 1) * request.block_size]
            longer = blocks.setdefault(block, part)
            assert part[: len(longer)] == longer[: len(part)]
            if len(part) > len(longer):
                blocks[block] = part
    assert made == prompts(trace, vocab, seed=seed)


def test_different_blocks_and_tails_differ() -> None:
    trace = [Request(0, 64, 1, (0, 1), 16), Request(0, 64, 1, (0, 2), 16)]
    first, second = prompts(trace, range(5, 205), seed=3)
    assert first[:16] == second[:16] and first[16:32] != second[16:32] and first[32:] != second[32:]
    assert set(first) <= set(range(5, 205))
    assert first != prompts(trace, range(5, 205), seed=4)[0]


def test_reuse_counts_leading_blocks_only() -> None:
    trace = [Request(0, 40, 1, (0, 1, 2), 16), Request(0, 40, 1, (0, 3, 2), 16), Request(0, 40, 1, (0, 1, 2), 16)]
    assert reuse(trace) == (16 + 40) / 120


def test_the_shared_traces(shared: Path) -> None:
    folder = shared / "traces"
    if not folder.is_dir():
        pytest.skip(f"traces absent: {folder}")
    lengths = {path.name: len(read(path)) for path in sorted(folder.iterdir()) if path.name != "README.md"}
    assert lengths["AzureLLMInferenceTrace_code.csv"] == 8819
    assert lengths["mooncake_conversation_trace.jsonl.gz"] == 12031
    assert lengths["mooncake_synthetic_tiny32_first150.csv"] == 150
    whole = read(folder / "mooncake_conversation_300s.csv")
    # The derived file was cut from the whole one, rounded the same way.
    tiny = read(folder / "mooncake_conversation_tiny32_first150.csv")
    assert tiny == scale(whole[:150], divide_lengths=32)
    assert reuse(tiny) == pytest.approx(reuse(whole[:150]), abs=0.02)
