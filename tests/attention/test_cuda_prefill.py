"""The workspace slot of the GPU path, its device calls replaced by the reference: what reading pages gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.cuda.prefill import GatheredPrefill, pad_heads
from attention.geometry import Geometry
from attention.layouts import LatentCache
from attention.workspace_slot import Workspace
from tests.attention.cases import Case, make
from tests.attention.cuda_reference import BF16, FP8, ReferenceCalls, plain_attention, plain_ids, step_of

TOPK, SCALE, CPU = 64, 0.05, torch.device("cpu")
KINDS = ("bfloat16", "fp8_packed", "fp8_raw")


def case_of(requests: list[tuple[int, int]], kind: str, heads: int = 4, seed: int = 0) -> Case:
    case = make(requests, "fp8" if kind == "fp8_packed" else "bfloat16", BF16, heads=heads, seed=seed)
    if kind == "fp8_raw":
        case.latent = LatentCache((case.latent.buffer.float() * 4).to(FP8), kind, 0.25)
    return case


def geometry(case: Case, **changes: object) -> Geometry:
    values: dict[str, object] = {
        "max_model_len": max(1, int(case.batch.seq_lens.max())),
        "max_requests": case.batch.requests,
        "pool_tokens": case.latent.slots,
        "topk": TOPK,
        "index_heads": 4,
        "index_dim": 128,
        "dtype": BF16,
        "index_kind": "fp8",
        "latent_kind": case.latent.kind,
    }
    return Geometry(**values | changes)  # type: ignore[arg-type]


def shuffled(ids: torch.Tensor, seed: int) -> torch.Tensor:
    """Valid ids of each row in any order, -1 behind, as a library's top-k gives them."""
    rng = torch.Generator().manual_seed(seed)
    keys = torch.where(ids >= 0, torch.rand(ids.shape, generator=rng), 2.0)
    return ids.gather(1, keys.argsort(dim=1, stable=True))


@settings(deadline=None, max_examples=30)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([1, 63, 64, 65, 100, 191, 300])), min_size=1, max_size=6
    ),
    kind=st.sampled_from(KINDS),
    heads=st.sampled_from([1, 4, 6]),
    multiple=st.sampled_from([1, 8, 64]),
    spare=st.sampled_from([0, 1, 50, 400, 10_000]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_result_is_that_of_reading_pages(
    requests: list[tuple[int, int]], kind: str, heads: int, multiple: int, spare: int, padding: int, seed: int
) -> None:
    case = case_of([(min(n, length), length) for n, length in requests], kind, heads, seed)
    longest = max(length for _, length in requests)
    slot = GatheredPrefill(geometry(case), ReferenceCalls(multiple), CPU, max_rows=longest + spare)
    assert slot.rows <= longest + spare
    ids = plain_ids(case, TOPK)
    q = torch.cat([case.q_nope, case.q_rope], dim=-1)
    want, want_lse = plain_attention(case.batch, q, case.latent, ids, SCALE)
    n = q.shape[0]
    q = torch.cat([q, torch.full((padding, *q.shape[1:]), float("nan"), dtype=BF16)])
    out, lse = slot.attend(step_of(case.batch), q, case.latent, shuffled(ids, seed), SCALE, return_lse=True)
    # To rounding: a matrix product's last bits depend on the number of heads and on where its rows lie.
    assert torch.allclose(out[:n].float(), want.float(), rtol=2**-7, atol=2**-8)
    assert torch.allclose(lse[:n], want_lse, rtol=1e-5, atol=1e-5)
    assert not out[n:].any() and (lse[n:] == float("-inf")).all()


def test_contexts_are_gathered_once_a_layer_and_group() -> None:
    case = case_of([(5, 100), (1, 300), (4, 20), (6, 200), (7, 150)], "fp8_packed")
    slot = GatheredPrefill(geometry(case), ReferenceCalls(), CPU, max_rows=300)
    step, q = step_of(case.batch), torch.cat([case.q_nope, case.q_rope], dim=-1)
    for layer in range(1, 4):
        slot.attend(step, q, case.latent, plain_ids(case, TOPK), SCALE)
        done = slot.counters
        assert (done.gathers, done.workspace_rows) == (3 * layer, 450 * layer)
    assert (done.paged_rows, done.gathered_rows) == (5, 18)


def test_memory_facts_are_those_of_the_cpu_slot() -> None:
    case = case_of([(3, 100), (2, 70)], "fp8_packed")
    made = geometry(case, knobs={"sparse_mla_prefill_workspace_factor": 2})
    ours, theirs = GatheredPrefill(made, ReferenceCalls(), CPU).facts(), Workspace(made).facts()
    assert ours == theirs and ours["prefill_workspace_bytes"] == 200 * 1152


def test_heads_are_padded_with_zeros() -> None:
    q = torch.randn((3, 5, 7))
    padded = pad_heads(q, 8)
    assert padded.shape == (3, 8, 7) and torch.equal(padded[:, :5], q) and not padded[:, 5:].any()
    assert pad_heads(q, 5) is q


def test_what_does_not_fit_is_named() -> None:
    case = case_of([(3, 100)], "fp8_packed")
    with pytest.raises(ValueError, match=r"the prefill workspace needs .* --sparse-mla-prefill-workspace-factor"):
        GatheredPrefill(geometry(case, free_bytes=1000), ReferenceCalls(), CPU)
    slot = GatheredPrefill(geometry(case), ReferenceCalls(), CPU)
    q, step, ids = torch.cat([case.q_nope, case.q_rope], dim=-1), step_of(case.batch), plain_ids(case, TOPK)
    for bad in (q.float(), q[:2], q[..., :500]):
        with pytest.raises(ValueError, match="q: bfloat16"):
            slot.attend(step, bad, case.latent, ids, SCALE)
    for bad, named in ((ids.long(), "int32"), (ids[:2], "3 or more"), (ids[:, :9], "9 ids a row, .* for 64")):
        with pytest.raises(ValueError, match=f"topk_ids: .*{named}"):
            slot.attend(step, q, case.latent, bad, SCALE)
