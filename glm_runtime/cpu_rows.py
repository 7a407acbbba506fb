"""Equal bits for a row, whatever else is in its batch.

    rows 1        GEMV kernel: other summation order      ┐
    rows 2, 3     small-M GEMM kernels: other order       ├─ so a request alone and the same request among others would
    rows >= 4     one order of summation for each row     ┘  differ in the last bits, and now and then in a token

Both libraries behind torch's float32 and bfloat16 products on CPU (MKL, oneDNN) choose kernels by the number of rows.
From four rows on, a row's result does not depend on the other rows (`invariant_rows` checks it on the machine at
start-up). So the decoder stack runs on at least `MIN_ROWS` rows: missing ones are copies of row 0 and are dropped after
the last layer. An expert, and the LM head, see few rows even in large batches: each pads its own.

Elementwise functions have the same hazard. torch computes sigmoid and SiLU 32 numbers at a time and what is left over
by another routine, an ulp apart at times; what is left over depends on the number of rows, and on where threads cut:

    numbers       |  32  |  32  | rest |           router, [rows, experts]: padded until no thread has a rest
                   vector vector scalar            SiLU: from exp, whose vector routine serves the rest too

Weights are packed once for oneDNN (its blocked layout): 1.1 to 2.7x faster than unpacked, most at few rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

MIN_ROWS = 4
LANES = 32  # numbers that torch's elementwise loop takes at a time, at most (two AVX-512 registers)
GRAIN = 32768  # numbers below which torch's elementwise loop stays on one thread
PACKED_UPDATE_ERROR = (
    "online weight updates are off while CPU weights are packed for oneDNN; "
    "start with --no-cpu-weight-packing to allow them"
)


def pad_rows(x: torch.Tensor, rows: int = MIN_ROWS) -> torch.Tensor:
    """`x` [n, ...] with copies of its first row appended up to `rows` rows; `x` itself where it has them, or none."""
    missing = rows - x.shape[0]
    if missing <= 0 or x.shape[0] == 0:
        return x
    return torch.cat([x, x[:1].expand(missing, *x.shape[1:])])


def even_rows(rows: int, width: int, threads: int) -> int:
    """Fewest rows >= `rows` of `width` numbers that `threads` threads share without a rest smaller than `LANES`."""
    if rows == 0:
        return 0
    unit = LANES // math.gcd(LANES, width)
    padded = -(-rows // unit) * unit
    while (padded * width) % (LANES * min(threads, -(-padded * width // GRAIN))):
        padded += unit
    return padded


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up = gate / (1 + exp(-gate)) * up, equal shapes; float32 inside, rounded once to gate's dtype."""
    x = gate.float()
    scale = torch.exp(-x).add_(1.0)
    return torch.div(x, scale, out=scale).mul_(up).to(gate.dtype)


def silu_and_mul(self: Any, x: torch.Tensor) -> torch.Tensor:
    """`SiluAndMul.forward` on our platform: x [rows, 2 * inner] -> [rows, inner]."""
    gate, up = x.chunk(2, dim=-1)
    return silu_mul(gate, up)


def route(self: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, **kwargs: Any) -> Any:
    """`TopK.forward` on our platform: SGLang's own routing, on padded rows.

    Args:
        hidden_states: [rows, hidden]. router_logits: [rows, experts].

    Returns:
        (weights [rows, k], ids [rows, k], logits [rows, experts]).
    """
    rows, experts = router_logits.shape
    padded = even_rows(rows, experts, torch.get_num_threads())
    out = self.forward_native(pad_rows(hidden_states, padded), pad_rows(router_logits, padded), **kwargs)
    return type(out)(*(part[:rows] for part in out))


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Weight [outer, inner], float32 or bfloat16, in oneDNN's blocked layout."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, inner] times a weight from `pack` -> [rows, outer]."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def invariant_rows(dtype: torch.dtype, inner: int = 256, outer: int = 512) -> bool:
    """Whether this machine's GEMM gives a row equal bits from `MIN_ROWS` rows on."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, inner, generator=generator).to(dtype)
    weight = pack(torch.randn(outer, inner, generator=generator).to(dtype))
    whole = linear(x, weight)
    return all(torch.equal(linear(x[:n], weight), whole[:n]) for n in (MIN_ROWS, 5, 7, 8, 16, 33, 64))


class PackedExperts:
    """One FusedMoE layer's expert weights, packed: `w13[e]` [2 * inner, hidden], `w2[e]` [hidden, inner]."""

    def __init__(self, layer: Any) -> None:
        self.w13 = [pack(w) for w in layer.w13_weight]
        self.w2 = [pack(w) for w in layer.w2_weight]


def expert_forward(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """`UnquantizedFusedMoEMethod.forward` on our platform: experts one by one over the rows routed to them.

    out[t] = sum_j weight[t, j] * W2_e (silu(W1_e x_t) * W3_e x_t), e = ids[t, j], summed in the row's own top-k order,
    so that a row's sum does not depend on the batch. The routed scaling factor is applied by SGLang's model code.

    Args:
        layer: SGLang's FusedMoE: `w13_weight` [experts, 2 * inner, hidden], `w2_weight` [experts, hidden, inner].
        dispatch_output: `hidden_states` [rows, hidden]; `topk_output` (weights [rows, k], ids [rows, k], logits).
    """
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    config = method.moe_runner_config
    if config.activation != "silu" or config.apply_router_weight_on_input or config.gemm1_alpha is not None:
        raise NotImplementedError(
            f"the CPU experts support plain SiLU gating only, got activation {config.activation!r}, "
            f"apply_router_weight_on_input={config.apply_router_weight_on_input}, gemm1_alpha={config.gemm1_alpha}"
        )
    x = dispatch_output.hidden_states
    weights, ids, _ = dispatch_output.topk_output
    rows, k = ids.shape
    flat = ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat + 1, minlength=layer.w13_weight.shape[0] + 1).tolist()
    first = counts[0]  # NOTE: ids of -1 (an expert of another rank) sort to the front and contribute nothing
    out = x.new_zeros(rows * k, x.shape[1])
    packed: PackedExperts | None = getattr(layer, "glm_packed", None)
    for expert, count in enumerate(counts[1:]):
        if count == 0:
            continue
        slots = order[first : first + count]
        first += count
        hidden = pad_rows(x.index_select(0, slots // k))
        if packed is None:
            gate, up = F.linear(hidden, layer.w13_weight[expert]).chunk(2, dim=-1)
            result = F.linear(silu_mul(gate, up), layer.w2_weight[expert])
        else:
            gate, up = linear(hidden, packed.w13[expert]).chunk(2, dim=-1)
            result = linear(silu_mul(gate, up), packed.w2[expert])
        out.index_copy_(0, slots, result[:count])
    weighted = out.view(rows, k, -1).to(weights.dtype) * weights.unsqueeze(-1)
    return StandardCombineInput(hidden_states=weighted.sum(dim=1).to(x.dtype))


class PackedLinear:
    """`apply` of an unquantized linear layer on its packed weight; the rest of the method is the original's."""

    def __init__(self, method: Any, weight: torch.Tensor) -> None:
        self._method = method
        self._packed = pack(weight)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., inner] -> [..., outer]."""
        return linear(x, self._packed, bias)


class PaddedHead:
    """LM head on at least `MIN_ROWS` rows; with packed weights where given."""

    def __init__(self, weight: torch.Tensor, packing: bool) -> None:
        self._weight = weight
        self._packed = pack(weight) if packing else None

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, hidden] -> logits [rows, vocabulary]."""
        rows = pad_rows(x.to(self._weight.dtype))
        logits = F.linear(rows, self._weight, bias) if self._packed is None else linear(rows, self._packed, bias)
        return logits[: x.shape[0]]


def install(model: Any, packing: bool) -> None:
    """Give `model` (SGLang's GlmMoeDsaForCausalLM) its row padding and, if asked, packed weights."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod

    from glm_runtime import cpu_stack

    def pad_inputs(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        input_ids, positions, *rest = args
        return (pad_rows(input_ids), pad_rows(positions), *rest)

    def drop_rows(_module: Any, args: tuple[Any, ...], output: Any) -> Any:
        real = args[2].positions.shape[0]
        if isinstance(output, torch.Tensor):
            return output[:real]
        return type(output)(part[:real] if isinstance(part, torch.Tensor) else part for part in output)

    model.lm_head.quant_method = PaddedHead(model.lm_head.weight, packing)
    stacked = packing and cpu_stack.plain(model)
    if stacked:
        cpu_stack.install(model)
    else:
        model.model.register_forward_pre_hook(pad_inputs)
        model.model.register_forward_hook(drop_rows)
    if not packing:
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        # NOTE: exact types: a quantised method is a subclass or another class, and keeps its own arithmetic.
        if isinstance(module, LinearBase) and type(method) is UnquantizedLinearMethod:
            if not stacked:  # the stack packs its own; a batch that it leaves to SGLang is rare
                module.quant_method = PackedLinear(method, module.weight)
        elif isinstance(module, FusedMoE) and type(method) is UnquantizedFusedMoEMethod:
            if not stacked:
                module.glm_packed = PackedExperts(module)
        else:
            continue
        module._derived_weight_cache_error = PACKED_UPDATE_ERROR
