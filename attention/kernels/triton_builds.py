"""Every kernel variant that is launched, built for a GPU that need not be there.

    Variant = kernel, argument types, constants, warps, stages   -> PTX -> cubin (Triton's own assembler)
    Built   = registers a thread, shared memory a program, spilled bytes, stack bytes

The constants are those of the launching modules, so what is built here is what runs. Used by the tests and by
``python -m attention.kernels.triton_builds``, which prints the table.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention.kernels import triton_attend, triton_gather, triton_remap, triton_score, triton_topk
from attention.sizes import INDEX_DIM

CAPABILITIES = (90, 100)
SHARED_LIMIT = 227 * 1024
"""Shared memory that one program may have on both capabilities, bytes."""
TENSOR_LIMIT = 512
"""Columns of tensor memory of a multiprocessor; Triton builds a trap in place of a kernel that needs more."""


@dataclass(frozen=True)
class Variant:
    """One kernel with its types: ``types`` by argument; ``constants`` are the compile-time arguments."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3


@dataclass(frozen=True)
class Built:
    """What the assembler reports. ``spills`` are bytes stored and loaded, ``stack`` bytes of the frame.

    ``tensor`` are columns of Blackwell's tensor memory.
    """

    variant: str
    capability: int
    registers: int
    shared: int
    spills: int
    stack: int
    tensor: int
    ptx: str


def variants(capability: int) -> Iterator[Variant]:
    """Every variant of the launch shapes of a capability (90, 100): 2,048 ids, all cache kinds."""
    for heads in (32, 64):
        for key in ("fp8e4nv", "bf16"):
            yield Variant(
                f"score gathered {key} {heads} heads",
                triton_score.gathered_kernel,
                _types(f"*{key} *fp32 *{key} *fp32 *i32 *i32 *fp32 i32 i32 i32 i32", triton_score.gathered_kernel),
                {
                    "HEADS": heads,
                    "DIM": INDEX_DIM,
                    "ROWS": triton_score.ROWS,
                    "KEYS": triton_score.KEYS,
                    "SCALED": key != "bf16",
                },
                triton_score.WARPS,
                triton_score.STAGES,
            )
            yield Variant(
                f"score paged {key} {heads} heads",
                triton_score.paged_kernel,
                _types(
                    f"*{key} *fp32 *{key} *fp32 *i32 *i32 *i32 *i32 *i32 *fp32 i32 i32 i32", triton_score.paged_kernel
                ),
                {"HEADS": heads, "DIM": INDEX_DIM, "KEYS": triton_score.KEYS, "PACKED": key != "bf16"},
                triton_score.WARPS,
                triton_score.STAGES,
            )
    for mapped, final in ((False, True), (False, False), (True, False), (True, True)):
        yield Variant(
            f"top-k {'candidates' if mapped else 'scores'} to {'ids' if final else 'candidates'}",
            triton_topk.segment_kernel,
            _types("*fp32 *i32 *i32 *i32 *fp32 *i32 i32 i32 i32 i32", triton_topk.segment_kernel),
            {"SEGMENT": triton_topk.SEGMENT, "MAPPED": mapped, "FINAL": final, "SCORED": not final},
            triton_topk.WARPS if final else triton_topk.SCORED_WARPS,
        )
    for name, kind, value in _LATENT:
        yield Variant(
            f"gather latent {name}",
            triton_gather.latent_kernel,
            _types(f"*{value} *fp32 *bf16 fp32 *i64 *bf16 i32", triton_gather.latent_kernel),
            {"KIND": kind, "ROWS": triton_gather.ROWS},
            triton_gather.WARPS,
        )
    for paged, value in ((True, "u8"), (False, "bf16")):
        yield Variant(
            f"gather index {'fp8 pages' if paged else value}",
            triton_gather.index_kernel,
            _types(f"*{value} *fp32 *i64 *{value} *fp32 i32", triton_gather.index_kernel),
            {"PAGED": paged, "ROWS": 4 * triton_gather.ROWS},
            triton_gather.WARPS,
        )
    for gathered, compact in ((False, False), (True, False), (True, True)):
        yield Variant(
            f"remap{' gathered' if gathered else ' paged'}{' compact' if compact else ''}",
            triton_remap.remap_kernel,
            _types("*i32 *i32 *i32 *i32 *i32 *i32 *i32 i32 i32 i32 i32 i32 i32 i32 i32", triton_remap.remap_kernel),
            {"IDS": 2048, "GATHERED": gathered, "COMPACT": compact},
            triton_remap.WARPS,
        )
    for shape in triton_attend.SHAPES[capability // 10].values():
        for name, kind, value in _LATENT:
            for reads, paged, result in (
                ("rows", False, "bf16"),
                ("paged", True, "bf16"),
                ("paged shares", True, "fp32"),
            ):
                yield Variant(
                    f"sparse MLA {name} {reads} {shape.heads} heads",
                    triton_attend.attend_kernel,
                    _types(
                        f"*bf16 *bf16 *{value} *fp32 *bf16 fp32 *i32 *i32 *i32 *{result} *fp32 i32 i32 i32 i32 i32 i32 "
                        "i32 i32 i32 fp32",
                        triton_attend.attend_kernel,
                    ),
                    {
                        "KIND": kind,
                        "PAGED": paged,
                        "HEADS": shape.heads,
                        "IDS": shape.ids,
                        "PARTS": shape.parts,
                        "WIDTH": 2048,
                    },
                    shape.warps,
                    shape.stages,
                )
    yield Variant(
        "sparse MLA combine",
        triton_attend.combine_kernel,
        _types("*fp32 *fp32 *bf16 *fp32 i32 i32", triton_attend.combine_kernel),
        {"SPLITS": 16},
        triton_attend.COMBINE_WARPS,
    )


_LATENT = (
    ("bfloat16", triton_gather.PLAIN, "bf16"),
    ("fp8_packed", triton_gather.PACKED, "fp8e4nv"),
    ("fp8_raw", triton_gather.RAW, "fp8e4nv"),
)

_MULTIPLES = ("nope_row", "nope_head", "rope_row", "rope_head", "out_stride", "scores_stride", "share", "block_size")


def _types(text: str, kernel: Any) -> dict[str, str]:
    types = text.split()
    names = kernel.arg_names[: len(types)]
    return dict(zip(names, types, strict=True))


def build(variant: Variant, capability: int) -> Built:
    """Build one variant for ``sm_<capability>``; nothing is loaded or run. Triton's errors pass through."""
    types = {**variant.types, **{name: "constexpr" for name in variant.constants}}
    names = variant.kernel.arg_names
    aligned: dict[tuple[int, ...], list[list[Any]]] = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in variant.types.items()
        if kind.startswith("*") or name in _MULTIPLES
    }
    source = ASTSource(variant.kernel, {name: types[name] for name in names}, variant.constants, aligned)
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
            triton.knobs.cache.dir = folder
            kernel = triton.compile(
                source,
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": variant.warps, "num_stages": variant.stages},
            )
    report = log.getvalue()
    return Built(
        variant.name,
        capability,
        registers=_number(r"Used (\d+) registers", report),
        shared=int(kernel.metadata.shared),
        spills=_number(r"(\d+) bytes spill stores", report) + _number(r"(\d+) bytes spill loads", report),
        stack=_number(r"(\d+) bytes stack frame", report),
        tensor=int(getattr(kernel.metadata, "tmem_size", None) or 0),
        ptx=kernel.asm["ptx"],
    )


def _number(pattern: str, report: str) -> int:
    found = re.findall(pattern, report)
    if not found:
        raise RuntimeError(f"the assembler's report has no {pattern!r}: {report!r}")
    return max(int(value) for value in found)


def main() -> None:
    """Print the table of the variants whose name begins with the first argument; of all without one."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    print(f"{'kernel':<42} {'sm':>4} {'registers':>9} {'shared B':>9} {'spilled B':>9} {'stack B':>8} {'tensor':>6}")
    for capability in CAPABILITIES:
        for variant in (v for v in variants(capability) if v.name.startswith(wanted)):
            built = build(variant, capability)
            print(
                f"{built.variant:<42} {capability:>4} {built.registers:>9} {built.shared:>9} {built.spills:>9} "
                f"{built.stack:>8} {built.tensor:>6}",
                flush=True,
            )


if __name__ == "__main__":
    main()
