"""The device calls of the GPU slots by the plain expressions, strict about what they are given; and cases for them.

Cells that a call may leave undefined are filled with infinities, and a library's freedom is taken: ids in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.batch import AttentionBatch
from attention.cuda.step import Step
from attention.kernels import reference
from attention.layouts import IndexCache, LatentCache, load_index, load_latent, quantise, store_index
from attention.scratch import Scratch
from attention.sizes import NOPE_DIM, PAGE_SIZE
from attention.topk_remap import PagedRows, WorkspaceRows, remap
from tests.attention.cases import Case, make

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
INF = float("inf")


class ReferenceCalls:
    """See `attention.cuda.calls.Calls`. `largest` is the most scores ever asked for at once."""

    def __init__(self, head_multiple: int = 1, allocates_scores: bool = False, shuffled: bool = True) -> None:
        self.head_multiple, self.allocates_scores, self.shuffled = head_multiple, allocates_scores, shuffled
        self.largest = 0

    def _out(self, rows: int, width: int, room: Tensor) -> Tensor:
        self.largest = max(self.largest, rows * width)
        if self.allocates_scores:
            assert room.numel() == 0
            return torch.full((rows, width), INF)
        assert room.dtype == torch.float32 and room.numel() >= rows * width
        return room[: rows * width].view(rows, width).fill_(INF)

    def gather_keys(self, cache: IndexCache, slots: Tensor, keys: Tensor, scales: Tensor) -> None:
        assert slots.dtype == torch.int64 and keys.dtype == FP8 and keys.shape == (slots.shape[0], 128)
        values, found = load_index(cache, slots)
        keys.copy_(values.to(FP8))
        scales.copy_(found)

    def scores(
        self, q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, ks: Tensor, ke: Tensor, width: int, room: Tensor
    ) -> Tensor:
        assert q.dtype == keys.dtype == FP8 and ks.dtype == ke.dtype == torch.int32
        assert int(ks.min()) >= 0 and int(ke.max()) <= keys.shape[0] and int((ke - ks).max()) == width
        out = self._out(q.shape[0], width, room)
        plain = reference.scores(q, weights, keys, scales)
        for i, (a, b) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
            out[i, : b - a] = plain[i, a:b]
        return out

    def page_scores(
        self, q: Tensor, weights: Tensor, cache: IndexCache, pages: Tensor, seen: Tensor, width: int, room: Tensor
    ) -> Tensor:
        assert pages.shape[0] == seen.shape[0] == q.shape[0] and int(seen.max()) <= width
        assert pages.shape[1] * PAGE_SIZE < width + PAGE_SIZE, "a table wider than these rows need"
        out = self._out(q.shape[0], width, room)
        for i, n in enumerate(seen.tolist()):
            values, scale = load_index(cache, slots_of(pages[i], n))
            out[i, :n] = reference.scores(q[i : i + 1], weights[i : i + 1], values, scale)[0]
        return out

    def topk(self, scores: Tensor, lengths: Tensor, out: Tensor) -> None:
        out.fill_(-1)
        for i, n in enumerate(lengths.tolist()):
            found = reference.best(scores[i, :n], out.shape[1])
            order = torch.randperm(found.shape[0]) if self.shuffled else slice(None)
            out[i, : found.shape[0]] = found[order]

    def best(self, scores: Tensor, lengths: Tensor, ids: Tensor | None, out: Tensor, out_scores: Tensor) -> None:
        assert lengths.dtype == torch.int32 and int(lengths.max()) <= scores.shape[1]
        out.fill_(-1)
        out_scores.fill_(INF)
        for i, n in enumerate(lengths.tolist()):
            found = reference.best(scores[i, :n], out.shape[1]).long()
            out[i, : found.shape[0]] = found.int() if ids is None else ids[i, found]
            out_scores[i, : found.shape[0]] = scores[i, found]

    def gather_rows(self, cache: LatentCache, slots: Tensor, out: Tensor) -> None:
        assert out.dtype == BF16
        out.copy_(load_latent(cache, slots, BF16))

    def remap(self, ids: Tensor, owner: Tensor, starts: Tensor, pages: Tensor, out: Tensor) -> None:
        there, _ = remap(
            ids.numpy(),
            owner.numpy(),
            owner.numpy(),
            PagedRows(pages.numpy(), PAGE_SIZE, PAGE_SIZE),
            WorkspaceRows(starts.numpy()),
        )
        out.copy_(torch.from_numpy(there))

    def attend_rows(self, q: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        self._check(q, ids, counts)
        return plain_attention(None, q, LatentCache(rows, "bfloat16"), ids, scale)

    def attend_pages(
        self, q: Tensor, cache: LatentCache, pages: Tensor, owner: Tensor, ids: Tensor, counts: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        self._check(q, ids, counts)
        slots = ids.clone()
        for i, r in enumerate(owner.tolist()):
            known = ids[i][ids[i] >= 0].long()
            slots[i, ids[i] >= 0] = (pages[r].long()[known // PAGE_SIZE] * PAGE_SIZE + known % PAGE_SIZE).int()
        return plain_attention(None, q, cache, slots, scale)

    def _check(self, q: Tensor, ids: Tensor, counts: Tensor) -> None:
        """Heads as the kernel wants them; the first `counts` ids of each row valid, -1 behind."""
        assert q.dtype == BF16 and q.shape[1] % self.head_multiple == 0
        assert ids.dtype == counts.dtype == torch.int32
        assert torch.equal(ids >= 0, torch.arange(ids.shape[1]) < counts.unsqueeze(1))


def slots_of(pages: Tensor, count: int) -> Tensor:
    """Cache slots of positions 0 to count - 1 of one request."""
    position = torch.arange(count)
    return pages.long()[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


def plain_attention(
    batch: AttentionBatch | None, q: Tensor, cache: LatentCache, ids: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """`reference.attend` over ascending ids, so that the order in which they are listed does not show in the bits."""
    out = torch.empty((*q.shape[:2], NOPE_DIM), dtype=q.dtype)
    lse = torch.empty(q.shape[:2])
    last = torch.iinfo(torch.int32).max
    ordered = torch.where(ids < 0, last, ids).sort(dim=1).values
    ordered = torch.where(ordered == last, -1, ordered)
    reference.attend(batch, q[..., :NOPE_DIM], q[..., NOPE_DIM:], cache, ordered, scale, Scratch(1 << 20), out, lse)
    return out, lse


def step_of(batch: AttentionBatch) -> Step:
    """The same requests as lists and a page table."""
    return Step(batch.seq_lens.tolist(), batch.query_start.diff().tolist(), batch.page_table)


def exact(requests: list[tuple[int, int]], heads: int = 4, seed: int = 0, ties: bool = False) -> Case:
    """An fp8 case of whole numbers: every sum is exact in float32, however it is cut; `ties`: four different keys."""
    case = make(requests, "fp8", BF16, index_heads=heads, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    for r in range(case.batch.requests):
        slots = case.batch.context_slots(r)
        keys = whole(rng, 4 if ties else slots.shape[0], 128, largest=0)
        store_index(case.index, slots, keys[torch.arange(slots.shape[0]) % len(keys)])
    case.q = whole(rng, case.batch.rows, heads, 128, largest=1)
    case.head_weights = whole(rng, case.batch.rows, heads)
    return case


def whole(rng: torch.Generator, *shape: int, largest: int | None = None) -> Tensor:
    """Whole numbers from -2 to 2; `largest` is the place of a 448 in each row, which makes the e4m3 scale 1."""
    values = torch.randint(-2, 3, shape, generator=rng).float()
    if largest is not None:
        values[..., largest] = 448.0
    return values


def quantised(case: Case) -> tuple[Tensor, Tensor]:
    """q and head weights as SGLang's indexer hands them over."""
    values, scale = quantise(case.q, 1e-4)
    return values, case.head_weights * scale


def plain_ids(case: Case, topk: int) -> Tensor:
    """Ids of the unsplit computation."""
    out = torch.empty((case.batch.rows, topk), dtype=torch.int32)
    reference.select(case.batch, case.q, case.head_weights, case.index, topk, Scratch(1 << 24), out)
    return out


def ascending(ids: Tensor) -> Tensor:
    """Each row's ids in order, -1 behind; raises where -1 stands before an id."""
    valid = ids >= 0
    assert (valid[:, 1:] <= valid[:, :-1]).all(), "-1 before an id"
    last = torch.iinfo(torch.int32).max
    ordered = torch.where(valid, ids, last).sort(dim=1).values
    return torch.where(ordered == last, -1, ordered)
