"""R28 (vllm#45663): the indexer runs out of memory on a long context when memory is nearly full.

Budgets are fixed at start and nothing is probed later. As they shrink the rows at once shrink to one, then the row is
cut; below that there is one clear error. Buffers that free memory does not hold are refused before anything is served.
"""

from __future__ import annotations

import pytest
import torch

from attention.indexer import ragged
from attention.indexer.qchunk import QChunk
from attention.scratch import Scratch, ScratchTooSmall
from attention.workspace_slot import Workspace
from tests.attention.cases import make
from tests.attention.test_qchunk import LEAST, TOPK, geometry, ids, plain


def test_ragged_shrinks_to_one_row_then_says_so() -> None:
    case = make([(40, 9000)])
    want = plain(case)
    one = 128 << 10  # one row of 9,000 scores and the packed keys of a page
    for nbytes in (1 << 22, 1 << 19, one):
        scratch = Scratch(nbytes)
        found = ragged.select(case.batch, case.q, case.head_weights, case.index, TOPK, scratch)
        assert torch.equal(found, want)
        assert scratch.peak <= nbytes
    with pytest.raises(ScratchTooSmall, match=r"index scores of one row.*--indexer-scratch-mb"):
        ragged.select(case.batch, case.q, case.head_weights, case.index, TOPK, Scratch(32 << 10))


def test_qchunk_shrinks_below_one_row_then_says_so() -> None:
    case = make([(40, 9000)])
    want = plain(case)
    for nbytes in (1 << 22, 1 << 16, 1 << 13, LEAST + 400):
        slot = QChunk(geometry(case), max_logits_bytes=nbytes)
        assert torch.equal(ids(slot, case), want)
        assert 4 * slot.logits.numel() <= nbytes
        assert (slot.counters.key_slices > 0) == (nbytes < 4 * 9000)
    with pytest.raises(ValueError, match="--sparse-indexer-max-logits-mb"):
        QChunk(geometry(case), max_logits_bytes=LEAST - 1)


def test_buffers_beyond_free_memory_are_refused() -> None:
    case = make([(40, 9000)])
    room = geometry(case, free_bytes=64 << 20)
    QChunk(room), Workspace(room)
    tight = geometry(case, free_bytes=1 << 20)
    with pytest.raises(ValueError, match=r"the indexer's workspace needs .* MiB, 1 MiB are free; lower --sparse-mla"):
        QChunk(tight)
    with pytest.raises(ValueError, match=r"the prefill workspace needs .* MiB, 1 MiB are free; lower --sparse-mla"):
        Workspace(tight)
