"""Two repairs of Triton's interpreter, without which bfloat16 kernels mean something else in it than on a GPU.

product    it multiplies the 16-bit integers that hold bfloat16 values       -> widened to float32 first
rounding   it cuts float32 to bfloat16 towards zero                          -> to nearest even, as the hardware does
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_dot = InterpreterBuilder.create_dot
_truncate = InterpreterBuilder.create_fp_trunc


def _wide_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
    if a.dtype == tl.bfloat16:
        a, b = self.create_fp_ext(a, tl.float32), self.create_fp_ext(b, tl.float32)
    return _dot(self, a, b, *rest)


def _round(self: Any, value: TensorHandle, kind: Any) -> TensorHandle:
    if value.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
        bits = value.data.view(np.uint32)
        return TensorHandle(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16), tl.bfloat16)
    return _truncate(self, value, kind)


def repair() -> None:
    """Put both repairs in place; once or often is the same."""
    InterpreterBuilder.create_dot = _wide_dot
    InterpreterBuilder.create_fp_trunc = _round
