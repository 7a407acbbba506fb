"""Deterministic noise: one integer hash per element, the same bits on every machine and every library version.

    z      = splitmix64(key(seed, name) + (i + 1) * golden)        i = element index
    normal = (sum of the four 16-bit quarters of z - 131070) / sigma0

Only integer arithmetic and one IEEE division and product per element are used, so no transcendental function of any
library takes part. The sum of four uniforms is bell shaped, bounded by 3.47 standard deviations.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_SIGMA0 = 37837.22736  # standard deviation of the sum of four uniform 16-bit integers
_BLOCK = 1 << 20


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def bits(seed: int, name: str, count: int, start: int = 0) -> NDArray[np.uint64]:
    """Hashed words of stream `name`: uint64 [count], elements start .. start + count - 1."""
    index = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = np.uint64(_key(seed, name)) + index * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX1
        z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))


def normal(seed: int, name: str, shape: tuple[int, ...], scale: float = 1.0) -> F32:
    """Bell-shaped noise, float32 of `shape`, mean 0 and standard deviation `scale`."""
    out = np.empty(int(np.prod(shape)), dtype=np.float32)
    quarter = np.uint64(0xFFFF)
    for start in range(0, out.size, _BLOCK):
        z = bits(seed, name, min(_BLOCK, out.size - start), start)
        total = (z & quarter) + (z >> np.uint64(48))
        total += (z >> np.uint64(16)) & quarter
        total += (z >> np.uint64(32)) & quarter
        out[start : start + z.size] = (total.astype(np.float64) - 131070.0) * (scale / _SIGMA0)
    return out.reshape(shape)


def signs(seed: int, name: str, shape: tuple[int, ...]) -> F32:
    """Random signs, float32 of `shape`, each +1 or -1."""
    z = bits(seed, name, int(np.prod(shape)))
    return (1.0 - 2.0 * (z >> np.uint64(63)).astype(np.float32)).astype(np.float32).reshape(shape)


def permutation(seed: int, name: str, count: int) -> NDArray[np.int64]:
    """A random order of 0 .. count - 1, int64 [count]."""
    return np.argsort(bits(seed, name, count), kind="stable")


def bf16_exact(x: F32) -> F32:
    """`x` rounded to the nearest bfloat16 (ties to even), kept as float32 of the same shape."""
    word = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    word = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return word.view(np.float32)
