"""Which call serves the slots on which device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attention.cuda.choice import GATHERED, IN_PLACE, Choice, ChoiceError, Machine, choose, needs_factor

ALL = ("deep_gemm", "flash_mla", "flashinfer", "sgl_kernel")
HOPPER = Machine((9, 0), 64, 32, "fp8_packed", "flashmla_kv", "sgl-kernel", 2048, ALL)


def reads(**changes: object) -> Choice:
    return choose(replace(HOPPER, **changes), workspace=True)  # type: ignore[arg-type]


def test_hopper_with_64_heads_gathers_packed_rows() -> None:
    found = reads()
    assert (found.score, found.topk, found.reads, found.attend) == ("DeepGEMM", "sgl-kernel", "workspace", "FlashMLA")
    assert (found.pages, found.head_multiple) == ("FlashMLA", 64)
    assert found.line(True) == (
        "index scores by DeepGEMM, top-k by sgl-kernel; prefill reads the workspace by FlashMLA, single rows read "
        "pages by FlashMLA (not yet run on a GPU)"
    )


@pytest.mark.parametrize(
    ("heads", "backend", "expected"),
    [
        (8, "flashmla_kv", "pages"),
        (31, "flashmla_kv", "pages"),
        (32, "flashmla_kv", "workspace"),
        (8, "flashmla_sparse", "workspace"),
        (8, "flashmla_auto", "workspace"),
        (64, "flashinfer_sparse_mla", "pages"),
    ],
)
def test_heads_a_rank_decide_where_the_fp8_kernel_serves(heads: int, backend: str, expected: str) -> None:
    assert reads(heads=heads, prefill_backend=backend).reads == expected


@pytest.mark.parametrize("backend", ["flashmla_sparse", "fa3", "tilelang", "trtllm"])
def test_bfloat16_rows_are_read_in_place(backend: str) -> None:
    found = reads(latent_kind="bfloat16", prefill_backend=backend)
    assert (found.reads, found.attend) == ("pages", "") and "bfloat16" in found.line(False)


@pytest.mark.parametrize(
    ("backend", "expected"), [("trtllm", "pages"), ("flashmla_sparse", "workspace"), ("flashmla_kv", "workspace")]
)
def test_raw_rows(backend: str, expected: str) -> None:
    found = reads(capability=(10, 0), latent_kind="fp8_raw", prefill_backend=backend, heads=8)
    assert found.reads == expected
    if expected == "workspace":
        assert (found.attend, found.pages, found.head_multiple) == ("FlashMLA", "Triton", 128)


@pytest.mark.parametrize("kind", ["fp8_packed", "fp8_raw"])
@pytest.mark.parametrize("backend", ["triton_sparse_mla", "flashmla_sparse_q8", "tilelang", "fa3", "aiter"])
def test_other_backends_are_refused_by_name(kind: str, backend: str) -> None:
    with pytest.raises(ChoiceError, match=f"--prefill-kv workspace cannot honour --dsa-prefill-backend {backend}"):
        reads(latent_kind=kind, prefill_backend=backend)
    assert choose(replace(HOPPER, latent_kind=kind, prefill_backend=backend), workspace=False).reads is None


def test_unknown_rows_are_refused() -> None:
    with pytest.raises(ChoiceError, match=r"no float16 rows.*--kv-cache-dtype"):
        reads(latent_kind="float16")


@pytest.mark.parametrize(
    "changes",
    [{"libraries": ()}, {"capability": (12, 0)}, {"capability": (8, 0)}, {"index_heads": 48, "topk": 200}],
)
def test_triton_where_a_library_does_not_fit(changes: dict[str, object]) -> None:
    found = reads(prefill_backend="flashmla_sparse", **changes)
    assert (found.score, found.attend, found.pages, found.head_multiple) == ("Triton", "Triton", "Triton", 1)


@pytest.mark.parametrize(
    ("backend", "topk", "libraries", "expected"),
    [
        ("sgl-kernel", 2048, ALL, "sgl-kernel"),
        ("sgl-kernel", 64, ALL, "Triton"),
        ("sgl-kernel", 2048, (), "Triton"),
        ("flashinfer", 64, ALL, "flashinfer"),
        ("flashinfer", 64, (), "Triton"),
        ("torch", 64, (), "torch"),
    ],
)
def test_top_k(backend: str, topk: int, libraries: tuple[str, ...], expected: str) -> None:
    assert reads(topk_backend=backend, topk=topk, libraries=libraries).topk == expected


def test_the_factor_needs_something_to_size() -> None:
    pages = reads(latent_kind="bfloat16")
    assert not needs_factor("ragged", pages) and needs_factor("qchunk", pages) and needs_factor("ragged", reads())


def test_every_served_backend_is_one_of_sglangs() -> None:
    server_args = pytest.importorskip("sglang.srt.server_args")
    import argparse

    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    (known,) = [a.choices for a in parser._actions if "--dsa-prefill-backend" in a.option_strings]
    assert {*GATHERED, *IN_PLACE["fp8_packed"], *IN_PLACE["fp8_raw"]} <= set(known or ())
