"""The Triton kernels in Triton's interpreter, against the plain torch expression. Run by ``test_triton.py``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.batch import AttentionBatch
from attention.kernels import reference, triton, triton_attend, triton_gather, triton_remap, triton_score, triton_topk
from attention.layouts import INDEX_AMAX_FLOOR, IndexCache, LatentCache, load_index, load_latent, quantise
from attention.scratch import Scratch
from attention.topk_remap import PagedRows, Placement, WorkspaceRows
from attention.topk_remap import remap as plain_remap
from tests.attention.cases import Case, make
from tests.attention.triton_interpreter import repair

repair()

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
KINDS = ("bfloat16", "fp8")
WIDE = triton_attend.SHAPES[10][64]


def scratch(mb: int = 8) -> Scratch:
    return Scratch(mb << 20)


# ---- scores ------------------------------------------------------------------------------------------------------


def queries(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """q and head weights as the kernels take them: quantised with the scale folded in for an fp8 cache."""
    if case.index.kind != "fp8":
        return case.q, case.head_weights
    values, scale = quantise(case.q, INDEX_AMAX_FLOOR)
    return values, case.head_weights * scale


def close_scores(found: torch.Tensor, wanted: torch.Tensor, q: torch.Tensor, w: torch.Tensor, k: torch.Tensor) -> None:
    """Each score within float32 rounding of the sum of the magnitudes that went into it."""
    mass = torch.einsum("mhd,sd->mhs", q.float().abs(), k.abs()) * w.abs().unsqueeze(-1)
    assert ((found - wanted).abs() <= 2e-6 * mass.sum(1) + 1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [4, 16, 32])
@pytest.mark.parametrize("requests", [[(1, 1)], [(3, 64), (1, 65)], [(33, 150)], [(0, 70), (2, 2), (5, 129), (1, 300)]])
def test_scores_over_gathered_keys(kind: str, heads: int, requests: list[tuple[int, int]]) -> None:
    case = make(requests, kind, BF16, index_heads=heads)
    q, w = queries(case)
    slots = torch.cat([case.batch.context_slots(r) for r in range(case.batch.requests)])
    n = slots.shape[0]
    keys = torch.empty((n, 128), dtype=FP8 if kind == "fp8" else BF16)
    scale = torch.empty(n) if kind == "fp8" else None
    triton_gather.gather_index(case.index, slots, keys, scale)
    values, wanted_scale = load_index(case.index, slots)
    assert torch.equal(keys.float(), values)
    assert scale is None or torch.equal(scale, wanted_scale)

    starts = torch.cat([torch.zeros(1, dtype=torch.int32), case.batch.seq_lens.cumsum(0).int()])
    ks = starts[case.batch.row_requests()]
    ke = (ks + case.batch.row_positions() + 1).int()
    out = torch.full((q.shape[0], max(length for _, length in requests) + 3), -77.0)
    triton_score.score_gathered(q, w, keys, scale, ks, ke, out)
    plain = reference.scores(q, w, values, wanted_scale)
    for i in range(q.shape[0]):
        span = slice(int(ks[i]), int(ke[i]))
        seen = span.stop - span.start
        close_scores(out[i : i + 1, :seen], plain[i : i + 1, span], q[i : i + 1], w[i : i + 1], values[span])
        assert (out[i, seen:] == -77.0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("requests", [[(1, 1)], [(2, 64), (1, 65)], [(19, 150)], [(0, 70), (1, 1), (9, 129), (1, 300)]])
def test_scores_over_pages(kind: str, requests: list[tuple[int, int]]) -> None:
    case = make(requests, kind, BF16, index_heads=8)
    q, w = queries(case)
    rows = case.batch.rows
    out = torch.full((rows, max(length for _, length in requests) + 1), -77.0)
    seen = (case.batch.row_positions() + 1).int()
    tiles = triton_score.row_tiles(case.batch, 0, rows)
    triton_score.score_paged(q, w, case.index, case.batch.page_table, tiles, seen, int(seen.max()), out)
    owner = case.batch.row_requests()
    for i in range(rows):
        values, scale = load_index(case.index, case.batch.context_slots(int(owner[i]))[: int(seen[i])])
        plain = reference.scores(q[i : i + 1], w[i : i + 1], values, scale)
        close_scores(out[i : i + 1, : int(seen[i])], plain, q[i : i + 1], w[i : i + 1], values)
        assert (out[i, int(seen[i]) :] == -77.0).all()


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 9), st.data())
@settings(max_examples=100, deadline=None)
def test_tiles_cover_the_rows_once(counts: list[int], size: int, data: st.DataObject) -> None:
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    batch = AttentionBatch(
        starts, torch.tensor(counts, dtype=torch.int32), torch.zeros((len(counts), 1), dtype=torch.int32)
    )
    first = data.draw(st.integers(0, batch.rows))
    stop = data.draw(st.integers(first, batch.rows))
    row, length, request = triton_score.row_tiles(batch, first, stop, size)
    covered = [i for a, n in zip(row.tolist(), length.tolist(), strict=True) for i in range(a, a + n)]
    assert covered == list(range(first, stop))
    assert (length <= size).all() and (length >= 1).all()
    owner = batch.row_requests()
    for a, n, r in zip(row.tolist(), length.tolist(), request.tolist(), strict=True):
        assert (owner[a : a + n] == r).all()


# ---- top-k -------------------------------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 150),
    k=st.integers(1, 16),
    ties=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=25, deadline=None)
def test_topk_is_the_stable_sort(rows: int, width: int, k: int, ties: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn((rows, width), generator=rng)
    if ties:
        scores = scores.round() * torch.where(torch.rand((rows, width), generator=rng) < 0.5, -1.0, 1.0)
    lengths = torch.randint(0, width + 1, (rows,), generator=rng).int()
    for i in range(rows):
        scores[i, int(lengths[i]) :] = float("nan")
    out = torch.full((rows, k), -9, dtype=torch.int32)
    kept = torch.full((rows, k), -9.0)
    triton_topk.topk(scores, lengths, k, out, scratch().take, out_scores=kept, segment=32)
    for i in range(rows):
        found = reference.best(scores[i, : int(lengths[i])], k)
        assert out[i, : len(found)].tolist() == found.tolist()
        assert (out[i, len(found) :] == -1).all()
        assert torch.equal(kept[i, : len(found)], scores[i, found.long()])


@pytest.mark.parametrize("width", [7, 8, 9, 31, 32, 33, 64, 65, 257])
def test_topk_at_the_borders_of_segments(width: int) -> None:
    scores = torch.zeros((3, width))
    scores[1] = -torch.arange(width)
    scores[2] = torch.arange(width)
    out = torch.empty((3, 8), dtype=torch.int32)
    triton_topk.topk(scores, torch.full((3,), width, dtype=torch.int32), 8, out, scratch().take, segment=32)
    first = [*range(min(8, width))] + [-1] * (8 - min(8, width))
    assert out.tolist() == [first, first, ([*range(width)][-8:] + [-1] * 8)[:8]]


def test_topk_merges_earlier_results() -> None:
    """A running top-k over two slices of the keys equals the top-k of all of them, ties included."""
    scores = torch.randint(-3, 3, (5, 90), generator=torch.Generator().manual_seed(1)).float()
    k = 12
    ids, best = [], []
    for low, high in ((0, 50), (50, 90)):
        out = torch.empty((5, k), dtype=torch.int32)
        kept = torch.empty((5, k))
        sizes = torch.full((5,), high - low, dtype=torch.int32)
        triton_topk.topk(scores[:, low:high], sizes, k, out, scratch().take, out_scores=kept, segment=32)
        ids.append(out + low)
        best.append(kept)
    merged = torch.empty((5, k), dtype=torch.int32)
    triton_topk.topk(
        torch.cat(best, 1),
        torch.full((5,), 2 * k, dtype=torch.int32),
        k,
        merged,
        scratch().take,
        ids=torch.cat(ids, 1),
        segment=32,
    )
    assert merged.tolist() == [reference.best(row, k).tolist() for row in scores]


def test_topk_refuses_what_does_not_fit() -> None:
    scores, sizes = torch.zeros((2, 9)), torch.full((2,), 9, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^k: 17"):
        triton_topk.topk(scores, sizes, 17, torch.empty((2, 17), dtype=torch.int32), scratch().take, segment=32)
    with pytest.raises(ValueError, match=r"^out:"):
        triton_topk.topk(scores, sizes, 3, torch.empty((2, 3), dtype=torch.int64), scratch().take)


def test_topk_takes_no_more_scratch_than_stated() -> None:
    for width in (5, 33, 400):
        room = scratch()
        out = torch.empty((3, 16), dtype=torch.int32)
        triton_topk.topk(
            torch.rand((3, width)), torch.full((3,), width, dtype=torch.int32), 16, out, room.take, segment=32
        )
        assert room.peak <= triton_topk.scratch_bytes(3, width, 16, 32)


# ---- gather and remap --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 130])
def test_latent_rows_are_gathered_bit_for_bit(kind: str, length: int) -> None:
    case = make([(1, length)], kind, BF16)
    slots = case.batch.context_slots(0)
    out = torch.empty((length, 576), dtype=BF16)
    triton.gather(case.latent, slots, out)
    assert torch.equal(out, load_latent(case.latent, slots, BF16))


def test_raw_fp8_rows_are_scaled_by_the_layer() -> None:
    raw = torch.randn((40, 576), generator=torch.Generator().manual_seed(0)).to(FP8)
    slots = torch.tensor([3, 39, 0, 3])
    out = torch.empty((4, 576), dtype=BF16)
    triton_gather.gather_latent(raw, slots, out, layer_scale=0.37)
    wanted = (raw[slots].float() * torch.tensor(0.37)).to(BF16)
    assert torch.equal(out, wanted)


def test_gather_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^cache:"):
        triton_gather.gather_latent(torch.zeros((4, 576)), torch.zeros(1).long(), torch.empty((1, 576), dtype=BF16))
    with pytest.raises(ValueError, match=r"^out:"):
        triton_gather.gather_latent(torch.zeros((4, 576), dtype=BF16), torch.zeros(1).long(), torch.empty((1, 576)))
    with pytest.raises(ValueError, match=r"^cache: float32"):
        cache = IndexCache(torch.zeros((4, 128)), "float32")
        triton_gather.gather_index(cache, torch.zeros(1).long(), torch.empty((1, 128)), None)


@given(
    st.integers(0, 5),
    st.sampled_from([(1, 1), (2, 1), (2, 4), (4, 2)]),
    st.sampled_from([None, "some", "all"]),
    st.booleans(),
    st.integers(0, 1 << 16),
)
@settings(max_examples=25, deadline=None)
def test_remap_is_the_plain_remap(
    rows: int, world: tuple[int, int], gathered: str | None, compact: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    size, run = world
    requests, width, k = 3, 4, 11
    place = Placement(size, seed % size, run)
    table = torch.randint(0, 50, (requests, width), generator=rng).int()
    topk = torch.randint(-1, width * 4 * size + 9, (rows, k), generator=rng).int()
    request = torch.randint(0, requests, (rows,), generator=rng).int()
    low = 0 if gathered == "all" else -1
    prefill = None if gathered is None else torch.randint(low, requests, (rows,), generator=rng).int()
    starts = torch.tensor([0, 70, 145], dtype=torch.int32)
    out, counts = torch.empty_like(topk), torch.empty(rows, dtype=torch.int32)
    triton_remap.remap(topk, request, prefill, table, 4, 7, starts, 300, out, counts, size, place.rank, run, compact)
    wanted, wanted_counts = plain_remap(
        topk.numpy(),
        request.numpy(),
        None if prefill is None else prefill.numpy(),
        PagedRows(table.numpy(), 4, 7),
        WorkspaceRows(starts.numpy(), 300),
        place,
        compact,
    )
    assert out.tolist() == wanted.tolist()
    assert counts.tolist() == wanted_counts.tolist()


def test_remap_gives_the_golden_ids(shared: Path) -> None:
    cases = json.loads((shared / "golden" / "topk_index_remap_open.json").read_text())["cases"]
    assert cases
    for case in cases:
        topk, request, table, starts, prefill = (
            None if case[name] is None else torch.tensor(case[name], dtype=torch.int32)
            for name in ("topk", "req_id", "block_table", "workspace_starts", "prefill_request_id")
        )
        out, counts = torch.empty_like(topk), torch.empty_like(request)
        triton_remap.remap(
            topk,
            request,
            prefill,
            table,
            case["block_size"],
            case["block_stride_rows"],
            starts,
            case["workspace_rank_stride"] or 0,
            out,
            counts,
            case["dcp_size"],
            case["dcp_rank"],
            case["interleave"],
            case["compact_to_front"],
        )
        assert out.tolist() == case["out"], case["id"]
        assert counts.tolist() == case["valid_counts"], case["id"]


# ---- sparse MLA --------------------------------------------------------------------------------------------------


def chosen(case: Case, k: int, seed: int = 0) -> torch.Tensor:
    """Random ids of each row's context, int32 [n, k], with -1 in any place; row 0 has none."""
    rng = torch.Generator().manual_seed(seed)
    seen = case.batch.row_positions() + 1
    ids = torch.full((case.batch.rows, k), -1, dtype=torch.int32)
    for i in range(1, case.batch.rows):
        count = min(k, int(seen[i]))
        places = torch.randperm(k, generator=rng)[:count]
        ids[i, places] = torch.randperm(int(seen[i]), generator=rng)[:count].int()
    return ids


def close_attention(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.allclose(found[1], wanted[1], rtol=1e-4, atol=1e-4)
    # Probabilities and results are rounded to bfloat16: 2^-8 of values that are averages of unit normals.
    assert torch.allclose(found[0].float(), wanted[0].float(), rtol=2**-7, atol=2**-6)


def plain_attention(
    batch: AttentionBatch | None, case: Case, cache: LatentCache, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    n, heads = case.q_nope.shape[:2]
    out, lse = torch.empty((n, heads, 512), dtype=BF16), torch.empty((n, heads))
    reference.attend(batch, case.q_nope, case.q_rope, cache, ids, 0.04, scratch(), out, lse)
    return out, lse


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 64, 70])
def test_sparse_mla_of_pages(kind: str, heads: int) -> None:
    case = make([(2, 70), (0, 3), (1, 1), (1, 200)], kind, BF16, heads=heads)
    ids = chosen(case, 50)
    out, lse = torch.empty((4, heads, 512), dtype=BF16), torch.empty((4, heads))
    triton.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids, 0.04, scratch(), out, lse)
    close_attention((out, lse), plain_attention(case.batch, case, case.latent, ids))
    assert (out[0] == 0).all() and (lse[0] == float("-inf")).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("splits", "shape"), [(1, WIDE), (2, None), (3, WIDE), (8, None)])
def test_sparse_mla_in_shares(kind: str, splits: int, shape: triton_attend.Shape | None) -> None:
    case = make([(3, 260)], kind, BF16, heads=4 if shape is None else 66)
    heads = case.q_nope.shape[1]
    slots = case.batch.context_slots(0)
    ids = chosen(case, 256)
    rows = torch.where(ids >= 0, slots[ids.clamp_min(0).long()].int(), -1)
    out, lse = torch.empty((3, heads, 512), dtype=BF16), torch.empty((3, heads))
    triton_attend.attend(
        case.q_nope,
        case.q_rope,
        case.latent.buffer,
        rows,
        0.04,
        out,
        lse,
        splits=splits,
        take=scratch(16).take,
        shape=shape,
    )
    close_attention((out, lse), plain_attention(case.batch, case, case.latent, ids))


def test_sparse_mla_of_raw_fp8_rows() -> None:
    case = make([(4, 90)], "bfloat16", BF16, heads=4)
    raw = torch.nan_to_num(case.latent.buffer.float()).to(FP8)
    wide = LatentCache((raw.float() * torch.tensor(0.5)).to(BF16), "bfloat16")
    ids = torch.tensor([[-1, -1, -1], [0, 5, 89], [89, -1, 3], [7, 7, -1]], dtype=torch.int32)
    out, lse = torch.empty((4, 4, 512), dtype=BF16), torch.empty((4, 4))
    triton_attend.attend(case.q_nope, case.q_rope, raw, ids, 0.04, out, lse, layer_scale=0.5)
    close_attention((out, lse), plain_attention(None, case, wide, ids))


@pytest.mark.parametrize("shape", [None, WIDE])
def test_sparse_mla_goes_over_tiles_without_an_id(shape: triton_attend.Shape | None) -> None:
    case = make([(2, 90)], "bfloat16", BF16, heads=4)
    slots = case.batch.context_slots(0)
    ids = torch.full((2, 150), -1, dtype=torch.int32)
    ids[0, 70], ids[1, 40], ids[1, 149] = slots[5], slots[80], slots[0]
    out, lse = torch.empty((2, 4, 512), dtype=BF16), torch.empty((2, 4))
    triton_attend.attend(case.q_nope, case.q_rope, case.latent.buffer, ids, 0.04, out, lse, shape=shape)
    close_attention((out, lse), plain_attention(None, case, case.latent, ids))


def test_sparse_mla_takes_strided_queries_and_padding_rows() -> None:
    case = make([(2, 70)], "bfloat16", BF16, heads=4)
    both = torch.randn((5, 4, 576), generator=torch.Generator().manual_seed(3)).to(BF16)
    case.q_nope, case.q_rope = both[..., :512], both[..., 512:]
    ids = torch.tensor([[0, 68], [69, 1], [5, 6], [7, 8], [9, 1]], dtype=torch.int32)
    out, lse = torch.empty((5, 4, 512), dtype=BF16), torch.empty((5, 4))
    triton.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids, 0.04, scratch(), out, lse)
    close_attention((out, lse), plain_attention(case.batch, case, case.latent, ids))
    assert (out[2:] == 0).all() and (lse[2:] == float("-inf")).all()


def test_sparse_mla_refuses_what_does_not_fit() -> None:
    case = make([(1, 5)], "bfloat16", BF16)
    ids, out, lse = torch.zeros((1, 2), dtype=torch.int32), torch.empty((1, 4, 512), dtype=BF16), torch.empty((1, 4))
    with pytest.raises(ValueError, match=r"^q_nope: bfloat16"):
        triton.attend(case.batch, case.q_nope.float(), case.q_rope.float(), case.latent, ids, 1.0, scratch(), out, lse)
    with pytest.raises(ValueError, match=r"^splits"):
        triton_attend.attend(case.q_nope, case.q_rope, case.latent.buffer, ids, 1.0, out, lse, splits=2)


# ---- the whole selection -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("requests", [[(1, 1)], [(1, 16), (2, 17)], [(0, 4), (21, 70), (1, 200)]])
@pytest.mark.parametrize("room", [1 << 16, 1 << 20])
def test_selection_is_the_plain_selection(kind: str, requests: list[tuple[int, int]], room: int) -> None:
    case = make(requests, kind, BF16, index_heads=8, seed=2)
    rows = case.batch.rows
    q = torch.cat([case.q, case.q[:1]])
    w = torch.cat([case.head_weights, case.head_weights[:1]])
    out = torch.full((rows + 1, 16), -9, dtype=torch.int32)
    triton.select(case.batch, q, w, case.index, 16, Scratch(room), out)
    wanted = torch.full((rows + 1, 16), -9, dtype=torch.int32)
    reference.select(case.batch, q, w, case.index, 16, scratch(), wanted)
    assert (out[rows:] == -1).all()
    values, folded = queries(case)
    owner, seen = case.batch.row_requests(), case.batch.row_positions() + 1
    for i in range(rows):
        found, plain = set(out[i].tolist()), set(wanted[i].tolist())
        assert out[i][out[i] >= 0].tolist() == sorted(found - {-1})
        assert len(found - {-1}) == min(16, int(seen[i]))
        # Where the two differ, the scores at the cut must be equal to rounding.
        keys, scale = load_index(case.index, case.batch.context_slots(int(owner[i])))
        score = reference.scores(values[i : i + 1].float(), folded[i : i + 1], keys, scale)[0]
        lost, won = sorted(plain - found), sorted(found - plain)
        assert len(lost) == len(won)
        if lost:
            assert torch.allclose(score[lost].sort().values, score[won].sort().values, rtol=1e-5, atol=1e-5)
