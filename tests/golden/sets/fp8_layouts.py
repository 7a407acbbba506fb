"""Packed latent rows and index-key pages, byte for byte.

The row bytes of this set were produced by Triton's CPU interpreter, whose float32 to e4m3 cast differs from hardware in
two ways: it rounds a half away from zero, and it drops the carry when the mantissa rounds up to the next power of two
(126.6 becomes 64, not 128). Ours rounds to nearest even, as the hardware instruction does. Our byte
must be the correct rounding of value / scale, and the recorded byte the same quotient under either cast; scales, RoPE
bytes and offsets must be equal outright. Of an all-zero tile (0 / 0 in SGLang) only our side counts: it must be 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention.layouts import E4M3_MAX, IndexCache, load_index, pack_latent, store_index, unpack_latent
from attention.sizes import INDEX_PAGE_BYTES, INDEX_SCALE_AT, NOPE_DIM, PAGE_SIZE, ROPE_AT, SCALE_AT, TILE


def check(case: dict[str, Any]) -> str | None:
    if case["kind"] == "indexer_page":
        return _page(case)
    if case["kind"] == "mla_row_656":
        return _row(case)
    return f"unknown kind {case['kind']}"


def _page(case: dict[str, Any]) -> str | None:
    x = torch.tensor(case["x"], dtype=torch.float32)
    slots = torch.tensor([row["loc"] for row in case["vllm_rows"]])
    pages = int(slots.max()) // PAGE_SIZE + 1
    cache = IndexCache(torch.zeros((pages, INDEX_PAGE_BYTES), dtype=torch.uint8), "fp8")
    store_index(cache, slots, x)
    flat = cache.buffer.flatten()
    for i, row in enumerate(case["vllm_rows"]):
        at, scale_at = row["key_byte_offset"], row["scale_byte_offset"]
        if at != row["loc"] // PAGE_SIZE * INDEX_PAGE_BYTES + row["loc"] % PAGE_SIZE * 128:
            return f"row {i}: key offset {at}"
        if flat[at : at + 128].tolist() != case["sglang_key_bytes"][i]:
            return f"row {i}: key bytes differ"
        if flat[scale_at : scale_at + 4].view(torch.float32).item() != case["sglang_float_scale"][i]:
            return f"row {i}: scale differs"
        page = cache.buffer[row["loc"] // PAGE_SIZE]
        if page[INDEX_SCALE_AT + 4 * (row["loc"] % PAGE_SIZE) :][:4].tolist() != flat[scale_at : scale_at + 4].tolist():
            return f"row {i}: scale offset {scale_at}"
        # The reader takes vLLM's power-of-two scales as well.
        theirs = torch.tensor(row["key_bytes"], dtype=torch.uint8)
        if not bool(_rounds_to(x[i] / row["scale"], theirs).all()):
            return f"row {i}: vLLM bytes are no rounding of x / scale"
        flat[at : at + 128] = theirs
        flat[scale_at : scale_at + 4] = torch.tensor([row["scale"]]).view(torch.uint8)
        values, scale = load_index(cache, slots[i : i + 1])
        if not torch.equal(values[0], theirs.view(torch.float8_e4m3fn).float()) or scale.item() != row["scale"]:
            return f"row {i}: vLLM bytes do not read back"
    return None


def _row(case: dict[str, Any]) -> str | None:
    nope = torch.tensor(case["k_nope"], dtype=torch.float32)
    rope = torch.tensor(case["k_rope"], dtype=torch.float32)
    want = torch.tensor(case["sglang_row_bytes"], dtype=torch.uint8)
    rows = pack_latent(nope, rope)
    if [bound[:2] for bound in case["layout"]] != [[0, SCALE_AT], [SCALE_AT, ROPE_AT], [ROPE_AT, rows.shape[1]]]:
        return "layout differs"
    if not torch.equal(rows[:, SCALE_AT:], want[:, SCALE_AT:]):
        return "scale or RoPE bytes differ"
    scale = want[:, SCALE_AT:ROPE_AT].contiguous().view(torch.float32)
    quotient = nope.view(-1, NOPE_DIM // TILE, TILE) / scale.unsqueeze(-1)
    quotient = quotient.view(-1, NOPE_DIM)
    zero_tile = (scale == 0).repeat_interleave(TILE, dim=1)
    if not torch.equal(rows[:, :NOPE_DIM], _rounded(quotient).masked_fill(zero_tile, 0)):
        return "no-PE bytes are not the rounding of value / scale"
    wrong = ~_rounds_to(quotient, want[:, :NOPE_DIM]) & ~zero_tile
    if bool(wrong.any()):
        return f"{int(wrong.sum())} no-PE bytes differ"
    return _row_readers(case, nope, rope)


def _row_readers(case: dict[str, Any], nope: Tensor, rope: Tensor) -> str | None:
    """Rows with vLLM's power-of-two scales read back to the values they were made from."""
    rows = pack_latent(nope, rope)
    rows[:, :SCALE_AT] = torch.tensor(case["vllm_nope_bytes"], dtype=torch.uint8)
    scales = torch.tensor(case["vllm_scales"], dtype=torch.float32)
    rows[:, SCALE_AT:ROPE_AT] = scales.view(torch.uint8)
    steps = scales.repeat_interleave(TILE, dim=1) * 2**-9
    error = (unpack_latent(rows)[:, :NOPE_DIM] - nope).abs()
    return None if bool((error <= torch.maximum(nope.abs() / 16, steps)).all()) else "vLLM bytes do not read back"


def _rounded(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _rounds_to(x: Tensor, recorded: Tensor) -> Tensor:
    return (recorded == _rounded(x)) | (recorded == _interpreter_cast(x))


def _interpreter_cast(x: Tensor) -> Tensor:
    """E4m3 bytes of float32 values as Triton's CPU interpreter casts them."""
    bits = x.contiguous().view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) - 127 + 7
    mantissa = ((bits >> 20) & 7) + ((bits >> 19) & 1)
    shift = (1 - exponent).clamp(0, 8)
    small = (mantissa >> shift) | torch.where(shift <= 3, 1 << (3 - shift).clamp_min(0), 0)
    body = torch.where(exponent > 0, (exponent << 3) | mantissa, torch.where(shift < 8, small, 0))
    return (((bits >> 24) & 0x80) | body).to(torch.uint8)
