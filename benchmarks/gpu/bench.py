"""What the GPU checks share: extent, timing, library calls, one line of the result.

Line = name, right or wrong, our time, the fastest library call's time, traffic and products of one call
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """Extent of every check."""

    score_rows: int
    score_keys: int
    decode_rows: int
    decode_keys: int
    topk: int
    context: int
    mla_rows: int
    heads: tuple[int, ...]
    scratch: int
    product: int
    copy: int


FULL = Sizes(1024, 32_768, 64, 16_384, 2048, 131_072, 1024, (8, 16, 64), 2 << 30, 8192, 1 << 29)
TINY = Sizes(5, 200, 3, 130, 16, 192, 3, (8, 64), 8 << 20, 64, 1 << 16)


@dataclass
class Line:
    """One line of the table; times in seconds, ``flop`` and ``moved`` of one call, ``fp8`` for the kind of product."""

    name: str
    wrong: str | None = None
    ours: float = math.nan
    library: str = ""
    theirs: float = math.nan
    flop: float = 0.0
    moved: float = 0.0
    fp8: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass
class Bench:
    """Where and how large; ``seconds`` times a call, nan in the interpreter."""

    device: torch.device
    sizes: Sizes
    timed: bool

    def seconds(self, call: Callable[[], object]) -> float:
        """Median of one call, caches flushed before each."""
        if not self.timed:
            return math.nan
        return float(triton.testing.do_bench(call, warmup=20, rep=80, return_mode="median")) / 1e3

    def randn(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        """Normal numbers, the same in every run."""
        rng = torch.Generator(self.device).manual_seed(math.prod(shape) % 65_521)
        return torch.randn(shape, generator=rng, device=self.device).to(dtype)

    def library(self, line: Line, calls: dict[str, Callable[[], object]]) -> None:
        """Time the library calls that run here and keep the fastest; why another did not run becomes a note."""
        if not self.timed:
            return
        for name, call in calls.items():
            try:
                call()
                torch.cuda.synchronize()
                seconds = self.seconds(call)
            except Exception as error:
                line.notes.append(f"{name}: {type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}")
                continue
            if not seconds >= line.theirs:
                line.library, line.theirs = name, seconds


def optional(module: str, name: str) -> Callable[..., Any] | None:
    """A function of an optional library, None where it cannot be had."""
    try:
        return getattr(__import__(module, fromlist=[name]), name, None)
    except Exception:
        return None


def off_by(found: Tensor, wanted: Tensor, bound: Tensor | float) -> str | None:
    """None when every |found - wanted| <= bound."""
    excess = ((found.float() - wanted.float()).abs() - bound).max().item()
    return None if excess <= 0 else f"off by {excess:.3g} more than allowed"


@dataclass(frozen=True)
class Ceilings:
    """Measured rates: bytes/s of a copy (read and written), flop/s of products."""

    copy: float
    bf16: float
    fp8: float


def measure_ceilings(bench: Bench) -> Ceilings:
    """nan for what the machine or torch does not offer."""
    source = torch.empty(bench.sizes.copy, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = 2.0 * source.numel() / bench.seconds(lambda: target.copy_(source))
    side = bench.sizes.product
    a, b = bench.randn(side, side), bench.randn(side, side)
    flop = 2.0 * side**3
    fp8 = math.nan
    try:
        one = torch.ones((), device=bench.device)
        left, right = a.to(FP8), b.to(FP8).T
        fp8 = flop / bench.seconds(lambda: torch._scaled_mm(left, right, one, one, out_dtype=BF16))
    except Exception as error:
        print(f"no fp8 ceiling: {error}")
    return Ceilings(copy, flop / bench.seconds(lambda: a @ b), fp8)
