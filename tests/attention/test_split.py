"""Indexer chunks: every query row once, both caps kept, and vLLM's exceptions only where they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.indexer.split import (
    Chunk,
    count_launches,
    legal_logits_bytes,
    legal_workspace_rows,
    logits_elements,
    scratch_shape,
    split_chunks,
    workspace_bytes,
    workspace_rows,
)

batches = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 60)), max_size=12)
Batch = list[tuple[int, int]]


def lens_of(batch: Batch) -> tuple[list[int], list[int]]:
    return [old + new for old, new in batch], [new for _, new in batch]


def query_rows(chunks: list[Chunk], query_lens: list[int]) -> list[int]:
    """Rows of the step in the order in which the chunks score them."""
    start = np.concatenate([[0], np.cumsum(query_lens)])
    return [int(start[c.request_start]) + row for c in chunks for row in range(c.query_start, c.query_stop)]


@settings(max_examples=300, deadline=None)
@given(batches, st.integers(0, 2000), st.integers(0, 8000), st.booleans(), st.booleans(), st.integers(0, 9))
def test_every_row_once_in_order(
    batch: Batch, workspace: int, cap: int, strict: bool, fixed: bool, offset: int
) -> None:
    seq_lens, query_lens = lens_of(batch)
    if strict:
        workspace, cap = max(1, workspace), max(4, cap)
    chunks = split_chunks(seq_lens, query_lens, workspace, cap, offset, strict, fixed)
    moved = [Chunk(c.request_start - offset, c.request_stop - offset, c.query_start, c.query_stop) for c in chunks]
    assert query_rows(moved, query_lens) == list(range(sum(query_lens)))


@settings(max_examples=300, deadline=None)
@given(batches, st.integers(1, 2000), st.integers(4, 8000), st.booleans())
def test_caps_are_kept_but_for_a_single_row(batch: Batch, workspace: int, cap: int, fixed: bool) -> None:
    seq_lens, query_lens = lens_of(batch)
    for chunk in split_chunks(seq_lens, query_lens, workspace, cap, fixed_shapes=fixed):
        keys = sum(seq_lens[chunk.request_start : chunk.request_stop])
        rows = chunk.query_stop - chunk.query_start
        assert chunk.key_slices == ()
        assert keys <= workspace or chunk.request_stop - chunk.request_start == 1
        assert keys * rows * 4 <= cap or rows == 1
        if fixed and keys * 4 <= cap:
            assert rows <= scratch_shape(keys, cap // 4)[0]


@settings(max_examples=300, deadline=None)
@given(batches, st.integers(1, 2000), st.integers(4, 8000), st.booleans())
def test_strict_caps_are_always_kept(batch: Batch, workspace: int, cap: int, fixed: bool) -> None:
    seq_lens, query_lens = lens_of(batch)
    strict = split_chunks(seq_lens, query_lens, workspace, cap, strict_cap=True, fixed_shapes=fixed)
    for chunk in strict:
        keys = sum(seq_lens[chunk.request_start : chunk.request_stop])
        rows = chunk.query_stop - chunk.query_start
        slices = chunk.key_slices or ((0, keys),)
        assert [k for start, stop in slices for k in range(start, stop)] == list(range(keys))
        assert max(stop - start for start, stop in slices) * rows * 4 <= cap
        assert chunk.gathers_slices == (keys > workspace)
        if chunk.gathers_slices:
            assert max(stop - start for start, stop in slices) <= workspace
            assert not chunk.skips_gather
        else:
            assert chunk.skips_gather == (chunk.query_start > 0)


@settings(deadline=None)
@given(batches, st.integers(1, 2000), st.integers(4, 8000))
def test_strict_changes_only_what_breaks_a_cap(batch: Batch, workspace: int, cap: int) -> None:
    seq_lens, query_lens = lens_of(batch)

    def within(chunk: Chunk) -> bool:
        return sum(seq_lens[chunk.request_start : chunk.request_stop]) <= min(workspace, cap // 4)

    plain = split_chunks(seq_lens, query_lens, workspace, cap)
    strict = split_chunks(seq_lens, query_lens, workspace, cap, strict_cap=True)
    assert [c for c in strict if within(c)] == [c for c in plain if within(c)]


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "workspace", "cap", "chunks"),
    [
        ([], [], 100, 400, []),
        ([0], [3], 100, 400, [(0, 1, 0, 3)]),
        ([5], [0], 100, 400, []),
        ([10], [3], 100, 36, [(0, 1, 0, 1), (0, 1, 1, 2), (0, 1, 2, 3)]),
        ([10], [2], 100, 0, [(0, 1, 0, 1), (0, 1, 1, 2)]),
        ([10, 0, 0], [10, 1, 1], 10, 480, [(0, 3, 0, 12)]),
        ([10, 1], [10, 1], 10, 4000, [(0, 1, 0, 10), (1, 2, 0, 1)]),
        ([200], [2], 100, 4000, [(0, 1, 0, 2)]),
    ],
)
def test_edges(
    seq_lens: list[int], query_lens: list[int], workspace: int, cap: int, chunks: list[tuple[int, int, int, int]]
) -> None:
    got = split_chunks(seq_lens, query_lens, workspace, cap)
    assert [(c.request_start, c.request_stop, c.query_start, c.query_stop) for c in got] == chunks


def test_one_row_over_the_cap_is_cut_along_keys() -> None:
    chunks = split_chunks([10], [2], 100, 16, strict_cap=True)
    assert [c.key_slices for c in chunks] == [((0, 4), (4, 8), (8, 10))] * 2
    assert [c.skips_gather for c in chunks] == [False, True]
    assert count_launches(chunks) == 6
    (narrow,) = split_chunks([10], [2], 4, 400, strict_cap=True)
    assert (narrow.key_slices, narrow.gathers_slices) == (((0, 4), (4, 8), (8, 10)), True)


@pytest.mark.parametrize("rows", [16384, 8192])
def test_launches_of_a_million_tokens(rows: int) -> None:
    size = workspace_rows(2**20)
    total = sum(count_launches(split_chunks([end], [rows], size, 512 * 2**20)) for end in range(rows, 2**20 + 1, rows))
    assert (total, total * 21) == (4217, 88_557)


def test_sizes() -> None:
    assert workspace_rows(2**20) == 16_777_216
    assert workspace_rows(131_072, factor=5) == 5_242_880
    assert workspace_rows(2**20, compress_ratio=4) == 4_194_304
    assert workspace_bytes(16_777_216) == 2_214_592_512
    assert logits_elements(512 * 2**20) == 134_217_728
    assert legal_workspace_rows(16_777_216, 2**20, max_requests=4) == 4 * 2**20
    assert legal_workspace_rows(4_194_304, 2**20, max_requests=256, compress_ratio=4) == 4_194_304
    assert legal_logits_bytes(16384, 2**20, 512 * 2**20) == 512 * 2**20
    assert legal_logits_bytes(128, 1000, 512 * 2**20) == 512_000


@given(st.integers(1, 2**21), st.integers(1, 2**28))
def test_scratch_shapes_fit_and_are_few(keys: int, elements: int) -> None:
    rows, width = scratch_shape(keys, elements)
    assert rows >= 1
    assert rows * width <= elements
    assert width >= min(keys, elements)
    assert width <= keys * 1.125


def test_eight_shapes_per_doubling() -> None:
    assert len({scratch_shape(keys, 2**27) for keys in range(4097, 8193)}) == 8


def test_bad_input_names_the_field() -> None:
    with pytest.raises(ValueError, match="seq_lens and query_lens differ in length: 1 and 2"):
        split_chunks([1], [1, 1], 10, 40)
    with pytest.raises(ValueError, match="may not be negative"):
        split_chunks([1], [-1], 10, 40)
    with pytest.raises(ValueError, match="--sparse-indexer-max-logits-mb leaves 3 bytes"):
        split_chunks([1], [1], 10, 3, strict_cap=True)
    with pytest.raises(ValueError, match="workspace must have at least 1 row"):
        split_chunks([1], [1], 0, 40, strict_cap=True)
    with pytest.raises(ValueError, match="keys and elements"):
        scratch_shape(0, 4)
