"""The Triton kernels on a machine without a GPU: run in Triton's interpreter, and built for both GPU generations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="triton is not installed")

from attention import kernels
from attention.kernels import triton_builds
from attention.kernels.triton_builds import SHARED_LIMIT, TENSOR_LIMIT, Built, build, variants

REPO = Path(__file__).resolve().parents[2]
FAMILIES = ("score", "top-k", "gather", "remap", "sparse MLA")

pytestmark = pytest.mark.slow


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=550,
    )


def test_kernels_agree_with_the_reference_in_the_interpreter() -> None:
    """A process of its own: the interpreter is chosen when the kernels are imported."""
    done = run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/attention/triton_interpreted.py"], TRITON_INTERPRET="1"
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("capability", triton_builds.CAPABILITIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_launched_variant_is_built_without_spills(
    capability: int, family: str, record_property: Callable[[str, object], None]
) -> None:
    chosen = [variant for variant in variants(capability) if variant.name.startswith(family)]
    assert chosen
    for variant in chosen:
        built = build(variant, capability)
        record_property(
            f"{built.variant} sm_{capability}",
            f"{built.registers} registers, {built.shared} B shared, {built.spills} B spilled, {built.tensor} columns",
        )
        check(built)


def check(built: Built) -> None:
    assert built.spills == 0 and built.stack == 0, built
    assert built.shared <= SHARED_LIMIT, built
    assert built.tensor <= TENSOR_LIMIT, built
    assert "trap;" not in built.ptx, f"{built.variant}: nothing but a trap"
    assert f".target sm_{built.capability}" in built.ptx


@pytest.mark.parametrize("capability", triton_builds.CAPABILITIES)
def test_families_are_all_there_is(capability: int) -> None:
    assert all(variant.name.startswith(FAMILIES) for variant in variants(capability))


def test_products_run_on_the_tensor_cores() -> None:
    """Scores of fp8 keys: wgmma on Hopper, tcgen05 on Blackwell, neither widened to 16 bits first."""
    named = {
        capability: next(v for v in variants(capability) if v.name == "score gathered fp8e4nv 32 heads")
        for capability in triton_builds.CAPABILITIES
    }
    hopper, blackwell = (build(named[capability], capability).ptx for capability in (90, 100))
    assert "wgmma.mma_async" in hopper and "e4m3.e4m3" in hopper
    assert "tcgen05.mma" in blackwell and "kind::f8f6f4" in blackwell


def test_gpu_check_without_a_gpu_says_so() -> None:
    done = run(["-m", "benchmarks.gpu_check"], CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (0, "no GPU here\n"), done.stderr[-2000:]


def test_gpu_check_itself_runs_in_the_interpreter() -> None:
    """Without sglang and numba, as on a bare GPU machine."""
    code = (
        "import sys; sys.modules.update(sglang=None, numba=None); "
        "from tests.attention.triton_interpreter import repair; repair(); "
        "from benchmarks.gpu_check import main; sys.exit(main(['--device', 'cpu']))"
    )
    done = run(["-c", code], TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "sparse MLA fp8_packed" in done.stdout and " NO " not in done.stdout


def test_gpu_check_refuses_the_cpu_outside_the_interpreter() -> None:
    done = run(["-m", "benchmarks.gpu_check", "--device", "cpu"], TRITON_INTERPRET="0")
    assert done.returncode == 2 and "TRITON_INTERPRET=1" in done.stderr


def test_calls_with_gpu_tensors_are_served_by_triton() -> None:
    with FakeTensorMode():
        there, here = torch.empty(1, device="cuda"), torch.empty(1)
    assert kernels.active(there) is kernels.import_kernels("triton")
    assert kernels.active(here) is kernels.active() is not kernels.active(there)
