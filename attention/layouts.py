"""Byte layouts of the two caches, and the functions that write and read them.

Latent row (the absorbed key/value of MLA), fp8_packed, 656 bytes:

    0                      512                528                 656
    | 512 x e4m3 no-PE     | 4 x fp32 scale   | 64 x bf16 RoPE    |     scale t serves values 128 t .. 128 t + 127

Latent row, fp8_raw, 576 bytes: 512 x e4m3 no-PE, 64 x e4m3 RoPE, one scale for the layer, kept beside the buffer.

Index-key page, fp8, 64 tokens, 8,448 bytes:

    0                                   8192                 8448
    | key 0 | key 1 | ... | key 63      | 64 x fp32 scale     |         key o at 128 o (128 x e4m3), scale at 8192 + 4 o

Plain kinds are rows: latent [slots, 576], index key [slots, 128], float32 or bfloat16; the no-PE part comes first.

    latent scale = amax / 448                     (SGLang's packed writer: plain fp32, no floor)
    index scale  = max(amax, 1e-4) / 448          (SGLang's fused store)
    byte         = e4m3(clamp(value / scale, -448, 448)), round to nearest even
    raw value    = byte * layer scale              (TensorRT-LLM's and FlashInfer's rows, SGLang's where either is used)

An all-zero latent tile has scale 0. Its bytes are written as 0 and read back as 0 (SGLang divides 0 by 0 there). A
reader takes any fp32 scale, so rows written with vLLM's power-of-two scales read back as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.sizes import (
    INDEX_DIM,
    INDEX_PAGE_BYTES,
    INDEX_SCALE_AT,
    LATENT_DIM,
    NOPE_DIM,
    PACKED_BYTES,
    PAGE_SIZE,
    ROPE_AT,
    SCALE_AT,
    TILE,
)

E4M3_MAX = 448.0
INDEX_AMAX_FLOOR = 1e-4

RAW = "fp8_raw"

_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LATENT = _PLAIN | {RAW: torch.float8_e4m3fn}


@dataclass(frozen=True)
class LatentCache:
    """Latent cache of one layer.

    Args:
        buffer: [slots, 576] float32, bfloat16 or float8_e4m3fn, or [slots, 656] uint8, contiguous.
        kind: ``float32``, ``bfloat16``, ``fp8_raw`` or ``fp8_packed``.
        scale: of the layer, for ``fp8_raw``; 1 for all other kinds.

    Raises:
        ValueError: naming the field whose value does not fit.
    """

    buffer: Tensor
    kind: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check("latent", self.buffer, self.kind, _LATENT, "fp8_packed", LATENT_DIM, PACKED_BYTES)
        if not self.scale > 0 or (self.scale != 1.0 and self.kind != RAW):
            raise ValueError(f"scale: {self.scale} for {self.kind} rows; only {RAW} rows have one, above 0")

    @property
    def slots(self) -> int:
        """Number of token slots."""
        return self.buffer.shape[0]


@dataclass(frozen=True)
class IndexCache:
    """Index-key cache of one layer.

    Args:
        buffer: [slots, d] float32 or bfloat16 (d = 128 in GLM), or [pages, 8448] uint8, contiguous.
        kind: ``float32``, ``bfloat16`` or ``fp8``.

    Raises:
        ValueError: naming the field whose value does not fit.
    """

    buffer: Tensor
    kind: str

    def __post_init__(self) -> None:
        _check("index", self.buffer, self.kind, _PLAIN, "fp8", None, INDEX_PAGE_BYTES)

    @property
    def dim(self) -> int:
        """Values a key."""
        return INDEX_DIM if self.kind == "fp8" else self.buffer.shape[1]

    @property
    def slots(self) -> int:
        """Number of token slots."""
        return self.buffer.shape[0] * (PAGE_SIZE if self.kind == "fp8" else 1)


def _check(
    name: str,
    buffer: Tensor,
    kind: str,
    plain: Mapping[str, torch.dtype],
    packed: str,
    width: int | None,
    packed_width: int,
) -> None:
    if kind not in (*plain, packed):
        raise ValueError(f"kind: {kind!r} is no {name} cache layout; known: {', '.join((*plain, packed))}")
    dtype = plain.get(kind, torch.uint8)
    want = packed_width if kind == packed else width
    if buffer.dtype != dtype or buffer.dim() != 2 or (want is not None and buffer.shape[1] != want):
        raise ValueError(
            f"buffer: {name} cache of kind {kind} needs [*, {want or 'd'}] {dtype}, not "
            f"{list(buffer.shape)} {buffer.dtype}"
        )
    if not buffer.is_contiguous():
        raise ValueError(f"buffer: {name} cache must be contiguous")


def quantise(x: Tensor, amax_floor: float) -> tuple[Tensor, Tensor]:
    """Quantise blocks along the last dimension to e4m3.

    Args:
        x: [..., block], any float dtype; the arithmetic is float32.
        amax_floor: lower bound of the block's largest magnitude; 0 for none.

    Returns:
        (values float8_e4m3fn [..., block], scale float32 [...]), ``x ~ values * scale``.
    """
    x = x.float()
    scale = x.abs().amax(dim=-1).clamp_min(amax_floor) / E4M3_MAX
    divisor = torch.where(scale > 0, scale, torch.ones((), dtype=torch.float32))
    values = (x / divisor.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values, scale


def pack_latent(kv_nope: Tensor, k_rope: Tensor) -> Tensor:
    """Packed rows, uint8 [n, 656], of no-PE [n, 512] and RoPE [n, 64] parts in any float dtype."""
    n = kv_nope.shape[0]
    rows = torch.empty((n, PACKED_BYTES), dtype=torch.uint8)
    values, scale = quantise(kv_nope.reshape(n, NOPE_DIM // TILE, TILE), 0.0)
    rows[:, :SCALE_AT] = values.view(torch.uint8).reshape(n, NOPE_DIM)
    rows[:, SCALE_AT:ROPE_AT] = scale.view(torch.uint8)
    rows[:, ROPE_AT:] = k_rope.to(torch.bfloat16).contiguous().view(torch.uint8)
    return rows


def unpack_latent(rows: Tensor) -> Tensor:
    """Float32 [n, 576] of packed rows uint8 [n, 656]; accepts any fp32 scale."""
    n = rows.shape[0]
    scale = rows[:, SCALE_AT:ROPE_AT].contiguous().view(torch.float32)
    values = rows[:, :SCALE_AT].contiguous().view(torch.float8_e4m3fn).float()
    nope = values.view(n, NOPE_DIM // TILE, TILE) * scale.unsqueeze(-1)
    rope = rows[:, ROPE_AT:].contiguous().view(torch.bfloat16).float()
    return torch.cat([nope.view(n, NOPE_DIM), rope], dim=1)


def store_latent(cache: LatentCache, slots: Tensor, kv_nope: Tensor, k_rope: Tensor) -> None:
    """Write tokens into the latent cache.

    Args:
        cache: written in place.
        slots: int64 [n], distinct.
        kv_nope, k_rope: [n, 512] and [n, 64], any float dtype.
    """
    if cache.kind == RAW:
        scaled = torch.cat([kv_nope, k_rope], dim=1).float() / cache.scale
        rows = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        cache.buffer.view(torch.uint8).index_copy_(0, slots, rows)
        return
    if cache.kind == "fp8_packed":
        rows = pack_latent(kv_nope, k_rope)
    else:
        rows = torch.cat([kv_nope, k_rope], dim=1).to(cache.buffer.dtype)
    cache.buffer.index_copy_(0, slots, rows)


def load_latent(cache: LatentCache, slots: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Read tokens from the latent cache: [n, 576] in ``dtype`` for int64 slots [n].

    fp8 rows are scaled in float32 and rounded once to ``dtype``.
    """
    if cache.kind == RAW:
        raw = cache.buffer.view(torch.uint8).index_select(0, slots).view(torch.float8_e4m3fn)
        return (raw.float() * cache.scale).to(dtype)
    rows = cache.buffer.index_select(0, slots)
    return (unpack_latent(rows) if cache.kind == "fp8_packed" else rows).to(dtype)


def store_index(cache: IndexCache, slots: Tensor, k: Tensor) -> None:
    """Write index keys.

    Args:
        cache: written in place.
        slots: int64 [n], distinct.
        k: [n, d], any float dtype.
    """
    if cache.kind != "fp8":
        cache.buffer.index_copy_(0, slots, k.to(cache.buffer.dtype))
        return
    values, scale = quantise(k, INDEX_AMAX_FLOOR)
    page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE
    pages = cache.buffer.shape[0]
    keys = cache.buffer.as_strided((pages, PAGE_SIZE, INDEX_DIM), (INDEX_PAGE_BYTES, INDEX_DIM, 1))
    keys[page, offset] = values.view(torch.uint8)
    scales = cache.buffer.view(torch.float32).view(pages, INDEX_PAGE_BYTES // 4)
    scales[page, INDEX_SCALE_AT // 4 + offset] = scale


def load_index(cache: IndexCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Read index keys: (values float32 [n, d], scale float32 [n]) for int64 slots [n]; scale is 1 in plain kinds."""
    if cache.kind != "fp8":
        return cache.buffer.index_select(0, slots).float(), torch.ones(slots.shape[0])
    page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE
    pages = cache.buffer.shape[0]
    keys = cache.buffer.as_strided((pages, PAGE_SIZE, INDEX_DIM), (INDEX_PAGE_BYTES, INDEX_DIM, 1))
    values = keys[page, offset].view(torch.float8_e4m3fn).float()
    scales = cache.buffer.view(torch.float32).view(pages, INDEX_PAGE_BYTES // 4)
    return values, scales[page, INDEX_SCALE_AT // 4 + offset]
