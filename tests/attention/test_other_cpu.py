"""The compiled kernels on a CPU without 512-bit vectors and bfloat16 products."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent.parent
FEATURES = "+avx,+avx2,+fma,+f16c,+sse4.2,+bmi,+bmi2,+popcnt,+lzcnt"

PROGRAM = """
import torch
from attention import paged
from attention.indexer import ragged
from attention.kernels import reference
from attention.kernels.vector import has_pair_dot
from attention.scratch import Scratch
from tests.attention.cases import make

assert not has_pair_dot()
for kind, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("fp8", torch.bfloat16)):
    case = make([(3, 200), (1, 130)], kind, dtype, index_heads=5, heads=5)
    scratch = Scratch(1 << 20)
    ids = ragged.select(case.batch, case.q, case.head_weights, case.index, 64, scratch)
    want = torch.empty_like(ids)
    reference.select(case.batch, case.q, case.head_weights, case.index, 64, scratch, want)
    assert (ids != want).sum() <= 2
    out, lse = paged.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids, 0.05, scratch, return_lse=True)
    plain, plain_lse = torch.empty_like(out), torch.empty_like(lse)
    reference.attend(case.batch, case.q_nope, case.q_rope, case.latent, ids, 0.05, scratch, plain, plain_lse)
    assert torch.allclose(out.float(), plain.float(), rtol=1e-2, atol=1e-2)
    assert torch.allclose(lse, plain_lse, atol=1e-4)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the features named are those of x86-64")
def test_kernels_compiled_for_avx2(tmp_path: Path) -> None:
    env = os.environ | {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": FEATURES,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=REPO, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-2000:]
