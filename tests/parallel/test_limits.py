"""Which parallel sizes go together; each refusal names the flags."""

from __future__ import annotations

import pytest

from parallel.limits import Sizes, check_cache, check_sizes


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(),
        Sizes(tp=4, dcp=2),
        Sizes(tp=2, pcp=2, dcp=1),
        Sizes(tp=2, pcp=2, dcp=2),
        Sizes(tp=2, pcp=2, dcp=4),
        Sizes(tp=4, dcp=2, interleave=16),
        Sizes(tp=4, dcp=1, interleave=48),
    ],
)
def test_allowed(sizes: Sizes) -> None:
    check_sizes(sizes)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (Sizes(tp=4, dcp=3), "--decode-context-parallel-size 3 does not divide --tp-size 4"),
        (Sizes(tp=2, pcp=4, dcp=2), "does not go with --prefill-context-parallel-size 4 .* choose one of 1, 4, 8"),
        (Sizes(pcp=0), "--prefill-context-parallel-size must be at least 1"),
        (Sizes(tp=2, dcp=2, interleave=48), "--cp-kv-cache-interleave-size 48 must divide the page size 64"),
    ],
)
def test_refused(sizes: Sizes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_sizes(sizes)


def test_cache_and_model() -> None:
    both = Sizes(tp=1, pcp=2, dcp=2)
    check_cache(both, sparse=True, needs_packed=True, packed_fp8=True)
    check_cache(both, sparse=True, needs_packed=False, packed_fp8=False)
    check_cache(Sizes(pcp=2), sparse=False, needs_packed=True, packed_fp8=False)
    with pytest.raises(ValueError, match="index_topk"):
        check_cache(both, sparse=False, needs_packed=False, packed_fp8=True)
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8_e4m3"):
        check_cache(both, sparse=True, needs_packed=True, packed_fp8=False)


def test_world() -> None:
    assert Sizes(tp=2, pcp=2, dcp=4, pp=3, dp=2).world == 24
