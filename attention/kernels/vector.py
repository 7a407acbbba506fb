"""Vector building blocks for the compiled kernels, written as LLVM IR so that sums have one fixed order.

    W = 16 lanes of 32 bits (one 512-bit register; LLVM splits it where registers are narrower)
    a word is one float32, or a pair of bfloat16: low half first

    fma     acc + a * b, one rounding
    pair    acc + a.lo * b.lo + a.hi * b.hi on words of two bfloat16: one instruction where the CPU has it, else two fma
    fold    16 vectors -> 1: lane i is the sum of vector i

Addresses are plain int64. numba sees each block as a function (``@intrinsic``) of the modules that use it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, njit
from numba.core import cgutils, types
from numba.extending import intrinsic

W = 16
LINE = 4 * W

F32 = ir.FloatType()
I1 = ir.IntType(1)
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VF = ir.VectorType(F32, W)
VI = ir.VectorType(I32, W)


class _Bfloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


VB = ir.VectorType(_Bfloat(), 2 * W)


def has_pair_dot() -> bool:
    """Whether the CPU that numba compiles for multiplies bfloat16 pairs in one 512-bit instruction."""
    if config.CPU_NAME or config.CPU_FEATURES:
        return "+avx512bf16" in (config.CPU_FEATURES or "").split(",")
    return bool(llvm.get_host_cpu_features().get("avx512bf16", False))


def stamp() -> str:
    """Digest of the kernel sources. Compiled code is cached under it: numba itself looks at one file only."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compiled(function: Callable[..., Any]) -> Any:
    """``njit`` without the GIL, and with the disk cache where some cache folder is writable.

    The signature is read off the annotations: int is int64, float is float32.
    """
    machine = {"int": types.int64, "float": types.float32}
    names = [function.__annotations__[name] for name in signature(function).parameters]
    kind = machine[function.__annotations__["return"]](*(machine[name] for name in names))
    try:
        return njit(kind, nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return njit(kind, nogil=True)(function)


def block(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turn ``emit(Code, *values)`` into a numba function of the given numba types."""

    def wrap(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, kind: Any, values: Sequence[Any]) -> Any:
            out = emit(Code(builder), *values)
            return context.get_dummy_value() if result is types.void else out

        names = [f"a{i}" for i in range(len(arguments))]
        scope: dict[str, Any] = {"signature": result(*arguments), "codegen": codegen}
        # NOTE: numba reads the argument count off the function, so it is made with that many names.
        exec(f"def typer(typingctx, {', '.join(names)}):\n    return signature, codegen\n", scope)
        typer = scope["typer"]
        typer.__name__ = emit.__name__
        typer.__module__ = emit.__module__
        return intrinsic(typer)

    return wrap


class Code:
    """A builder with the few vector operations that the kernels use."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def i64(self, value: int) -> Any:
        """Constant int64."""
        return ir.Constant(I64, value)

    def at(self, address: Any, offset: Any = 0) -> Any:
        """``address + offset`` bytes; offset an int or an int64 value."""
        if isinstance(offset, int):
            if offset == 0:
                return address
            offset = self.i64(offset)
        return self.b.add(address, offset)

    def load(self, address: Any, kind: Any, align: int = 4) -> Any:
        """Load a value of IR type ``kind``."""
        return self.b.load(self.b.inttoptr(address, ir.PointerType(kind)), align=align)

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        """Store a value."""
        self.b.store(value, self.b.inttoptr(address, ir.PointerType(value.type)), align=align)

    def constant(self, kind: Any, value: float | int) -> Any:
        """A vector constant with every lane equal."""
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)

    def splat(self, value: Any) -> Any:
        """A scalar in all lanes."""
        kind = ir.VectorType(value.type, W)
        first = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.shuffle(first, ir.Constant(kind, ir.Undefined), [0] * W)

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        """Lanes of a then b, by number."""
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, lane) for lane in lanes])
        return self.b.shuffle_vector(a, b, mask)

    def call(self, name: str, result: Any, values: list[Any]) -> Any:
        """Call an LLVM intrinsic by name."""
        kind = ir.FunctionType(result, [v.type for v in values])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), values)

    def fma(self, a: Any, b: Any, acc: Any) -> Any:
        """acc + a * b on 16 float32, one rounding."""
        return self.call("llvm.fma.v16f32", VF, [a, b, acc])

    def pair(self, a: Any, b: Any, acc: Any) -> Any:
        """acc + products of the two bfloat16 in each word of a and b (16 int32 each)."""
        if has_pair_dot():
            return self.call(
                "llvm.x86.avx512bf16.dpbf16ps.512", VF, [acc, self.b.bitcast(a, VB), self.b.bitcast(b, VB)]
            )
        acc = self.fma(self.low(a), self.low(b), acc)
        return self.fma(self.high(a), self.high(b), acc)

    def low(self, words: Any) -> Any:
        """Float32 of the low bfloat16 of each word."""
        return self.b.bitcast(self.b.shl(words, self.constant(VI, 16)), VF)

    def high(self, words: Any) -> Any:
        """Float32 of the high bfloat16 of each word."""
        return self.b.bitcast(self.b.and_(words, self.constant(VI, 0xFFFF0000 - (1 << 32))), VF)

    def greater(self, a: Any, b: Any) -> Any:
        """Lane-wise a where a > b, else b."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def transposed(self, rows: list[Any]) -> list[Any]:
        """16 vectors of 16 lanes, rows to columns, in four rounds of interleaving."""
        low = [n for i in range(W // 2) for n in (i, W + i)]
        high = [n for i in range(W // 2, W) for n in (i, W + i)]
        for _ in range(4):
            pairs = [(rows[i], rows[i + W // 2]) for i in range(W // 2)]
            rows = [self.shuffle(a, b, lanes) for a, b in pairs for lanes in (low, high)]
        return rows

    def fold(self, rows: list[Any]) -> Any:
        """16 vectors to one: lane i is the sum of rows[i]'s lanes, added in a fixed tree."""
        low = [n for i in range(W // 2) for n in (i, W + i)]
        high = [n for i in range(W // 2, W) for n in (i, W + i)]
        while len(rows) > 1:
            half = len(rows) // 2
            rows = [
                self.b.fadd(self.shuffle(a, b, low), self.shuffle(a, b, high))
                for a, b in zip(rows[:half], rows[half:], strict=True)
            ]
        return rows[0]

    def sum(self, row: Any) -> Any:
        """Sum of the 16 lanes, halving."""
        return self._halve(row, self.b.fadd)

    def max(self, row: Any) -> Any:
        """Largest of the 16 lanes."""
        return self._halve(row, self.greater)

    def _halve(self, row: Any, join: Callable[[Any, Any], Any]) -> Any:
        for step in (8, 4, 2, 1):
            row = join(row, self.shuffle(row, row, [(i + step) % W for i in range(W)]))
        return self.b.extract_element(row, ir.Constant(I32, 0))

    def exp(self, x: Any) -> Any:
        """e^x of 16 float32 for x <= 0, within 2 units in the last place; 0 below -87.

        x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7; 2^n by the exponent bits.
        """
        tiny = self.b.fcmp_ordered("<", x, self.constant(VF, -87.0))
        scaled = self.b.fmul(x, self.constant(VF, 1.4426950408889634))
        n = self.call("llvm.rint.v16f32", VF, [scaled])
        r = self.fma(n, self.constant(VF, -0.693145751953125), x)
        r = self.fma(n, self.constant(VF, -1.428606765330187e-06), r)
        factorial, terms = 5040.0, [1.0]
        for k in range(7, 0, -1):
            terms.append(terms[-1] * k)
        acc = self.constant(VF, terms[0] / factorial)
        for term in terms[1:]:
            acc = self.fma(acc, r, self.constant(VF, term / factorial))
        bits = self.b.shl(self.b.fptosi(self.b.select(tiny, self.constant(VF, 0.0), n), VI), self.constant(VI, 23))
        grown = self.b.bitcast(self.b.add(self.b.bitcast(acc, VI), bits), VF)
        return self.b.select(tiny, self.constant(VF, 0.0), grown)

    def rounded_e4m3(self, x: Any) -> Any:
        """16 float32 clamped to +-448 and rounded to the nearest e4m3 value, half to even, still as float32.

        From 2^-6 up three mantissa bits stay; below, the step is 2^-9, cut by adding and taking away 1.5 * 2^14.
        """
        limit, low = self.constant(VF, 448.0), self.constant(VF, -448.0)
        x = self.b.select(self.b.fcmp_ordered(">", x, limit), limit, x)
        x = self.greater(x, low)
        bits = self.b.bitcast(x, VI)
        odd = self.b.and_(self.b.lshr(bits, self.constant(VI, 20)), self.constant(VI, 1))
        moved = self.b.add(bits, self.b.add(odd, self.constant(VI, 0x7FFFF)))
        normal = self.b.bitcast(self.b.and_(moved, self.constant(VI, -(1 << 20))), VF)
        magic = self.constant(VF, 1.5 * 2**14)
        small = self.b.fsub(self.b.fadd(x, magic), magic)
        size = self.call("llvm.fabs.v16f32", VF, [x])
        return self.b.select(self.b.fcmp_ordered("<", size, self.constant(VF, 2**-6)), small, normal)

    def loop(self, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """``for i in range(count): carried = body(i, carried)`` with the values kept in registers; count >= 1."""
        start = self.b.block
        inner = self.b.append_basic_block("loop")
        after = self.b.append_basic_block("done")
        self.b.branch(inner)
        self.b.position_at_end(inner)
        index = self.b.phi(I64)
        index.add_incoming(self.i64(0), start)
        phis = []
        for value in carried:
            phi = self.b.phi(value.type)
            phi.add_incoming(value, start)
            phis.append(phi)
        results = body(index, list(phis))
        step = self.b.add(index, self.i64(1))
        index.add_incoming(step, self.b.block)
        for phi, value in zip(phis, results, strict=True):
            phi.add_incoming(value, self.b.block)
        self.b.cbranch(self.b.icmp_signed("<", step, count), inner, after)
        self.b.position_at_end(after)
        return results


@block(types.int32, types.int64)
def get_i32(code: Code, address: Any) -> Any:
    """The int32 at an address."""
    return code.load(address, I32)


@block(types.void, types.int64, types.int32)
def put_i32(code: Code, address: Any, value: Any) -> None:
    """Store an int32."""
    code.store(value, address)


@block(types.int64, types.int64)
def get_i64(code: Code, address: Any) -> Any:
    """The int64 at an address."""
    return code.load(address, I64, 8)


@block(types.void, types.int64, types.int64)
def put_i64(code: Code, address: Any, value: Any) -> None:
    """Store an int64."""
    code.store(value, address, 8)


@block(types.float32, types.int64)
def get_f32(code: Code, address: Any) -> Any:
    """The float32 at an address."""
    return code.load(address, F32)


@block(types.void, types.int64, types.float32)
def put_f32(code: Code, address: Any, value: Any) -> None:
    """Store a float32."""
    code.store(value, address)


def half_floats(code: Code, address: Any) -> Any:
    """16 float32 from 16 bfloat16 at an address."""
    raw = code.b.zext(code.load(address, ir.VectorType(I16, W), 2), VI)
    return code.b.bitcast(code.b.shl(raw, code.constant(VI, 16)), VF)


def small_floats(code: Code, address: Any, factor: Any = None) -> Any:
    """16 float32 from 16 e4m3 bytes at an address, exact, or times ``factor`` (16 lanes) when given.

    The seven low bits, moved into a half's exponent and mantissa, are the value times 2^-8.
    """
    kind = ir.VectorType(I16, W)
    raw = code.b.zext(code.load(address, ir.VectorType(I8, W), 1), kind)
    body = code.b.shl(code.b.and_(raw, code.constant(kind, 0x7F)), code.constant(kind, 7))
    sign = code.b.shl(code.b.and_(raw, code.constant(kind, 0x80)), code.constant(kind, 8))
    half = code.b.bitcast(code.b.or_(body, sign), ir.VectorType(ir.HalfType(), W))
    whole = code.constant(VF, 256.0)
    return code.b.fmul(code.b.fpext(half, VF), whole if factor is None else code.b.fmul(factor, whole))


def put_rounded(code: Code, value: Any, address: Any) -> None:
    """Store 16 float32 as bfloat16, rounded to nearest even.

    NOTE: with the CPU's own conversion, magnitudes below 2^-126 become 0.
    """
    if has_pair_dot():
        short = code.b.bitcast(code.b.fptrunc(value, ir.VectorType(_Bfloat(), W)), ir.VectorType(I16, W))
    else:
        bits = code.b.bitcast(value, VI)
        odd = code.b.and_(code.b.lshr(bits, code.constant(VI, 16)), code.constant(VI, 1))
        moved = code.b.add(bits, code.b.add(odd, code.constant(VI, 0x7FFF)))
        short = code.b.trunc(code.b.lshr(moved, code.constant(VI, 16)), ir.VectorType(I16, W))
    code.store(short, address, 2)


def put_exact(code: Code, value: Any, address: Any) -> None:
    """Store 16 float32 that are bfloat16 values already."""
    high = code.b.lshr(code.b.bitcast(value, VI), code.constant(VI, 16))
    code.store(code.b.trunc(high, ir.VectorType(I16, W)), address, 2)


def prefetch(code: Code, address: Any) -> None:
    """Ask for one cache line, into the second level."""
    pointer = code.b.inttoptr(address, ir.PointerType(I8))
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(code.b.module, kind, "llvm.prefetch.p0")
    code.b.call(function, [pointer, I32(0), I32(2), I32(1)])


@block(types.void, types.int64)
def _ask(code: Code, address: Any) -> None:
    """Prefetch one line."""
    prefetch(code, address)


@njit(nogil=True)
def ask(address: int, nbytes: int) -> None:
    """Prefetch ``nbytes`` from an address on; an address that is not mapped does no harm."""
    for i in range(0, nbytes, LINE):
        _ask(address + i)
