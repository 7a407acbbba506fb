"""The decoder stack as one short loop: SGLang's weights and attention backend, our operators between the products.

    tokens -> embedding -> | before -> [index.select] -> sparse MLA -> after | x layers -> norm
                             cpu_layer   full layers       backend     cpu_layer

`DeepseekV2Model.forward` computes the same in some 60 small torch calls a layer; on a CPU at one row a step those calls
are the step. The stack runs where nothing but a plain forward is asked for: whole layers on each rank, unquantised
weights, no speculation, no capture of intermediate states. `plain` says whether the model allows it, `wanted` whether
this batch does; all else goes through SGLang's own forward.

A row's bits do not depend on its batch: see `cpu_gemm` and `cpu_ops`. Widths are multiples of 64.
"""

from __future__ import annotations

from typing import Any

import torch

from glm_runtime import cpu_layer, cpu_ops
from glm_runtime.cpu_gemm import BLOCK, Weight
from glm_runtime.cpu_rows import pad_rows

DTYPES = (torch.float32, torch.bfloat16)


def plain(model: torch.nn.Module) -> bool:
    """Whether `model` (GlmMoeDsaForCausalLM) is of the shape that the stack computes."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
    from sglang.srt.models.deepseek_v2 import DeepseekV2MLP, DeepseekV2MoE
    from sglang.srt.runtime_context import get_parallel

    stack: Any = model.model
    parallel = get_parallel()
    # NOTE: with prefill ranks SGLang's tp_size counts them, but each rank holds whole layers.
    cuts = parallel.attn_tp_size * parallel.moe_tp_size * parallel.pp_size
    if cuts != 1 or stack.layers_to_capture or stack.llama_4_scaling_config is not None:
        return False
    for layer in stack.layers:
        attention = layer.self_attn
        products = [attention.fused_qkv_a_proj_with_mqa, attention.q_b_proj, attention.o_proj]
        if not attention.skip_topk:
            index = attention.indexer
            products += [index.wq_b, index.wk]
            if not turns_pairs(index.rotary_emb, index.rope_head_dim) or index.n_heads % 16:
                return False
        if not turns_pairs(attention.rotary_emb, attention.qk_rope_head_dim) or attention.qk_nope_head_dim % BLOCK:
            return False
        block = layer.mlp
        if isinstance(block, DeepseekV2MLP):
            products += [block.gate_up_proj, block.down_proj]
        elif isinstance(block, DeepseekV2MoE):
            config = block.topk.topk_config
            if block.shared_experts is None or block.num_fused_shared_experts or (config.num_expert_group or 1) != 1:
                return False
            if config.correction_bias is None or config.custom_routing_function is not None:
                return False
            if type(block.experts.quant_method) is not UnquantizedFusedMoEMethod:
                return False
            products += [block.shared_experts.gate_up_proj, block.shared_experts.down_proj]
        else:
            return False
        if any(type(p.quant_method) is not UnquantizedLinearMethod or p.bias is not None for p in products):
            return False
        if any(getattr(p, "tp_size", 1) != 1 for p in products):
            return False
        weights = [p.weight for p in products] + [attention.w_kc.transpose(1, 2), attention.w_vc.transpose(1, 2)]
        if isinstance(block, DeepseekV2MoE):
            weights += [block.experts.w13_weight, block.experts.w2_weight]
        if any(w.dtype not in DTYPES or w.dtype != weights[0].dtype or not fits(w) for w in weights):
            return False
    return True


def turns_pairs(rotary: Any, width: int) -> bool:
    """Whether a SGLang rotary embedding turns interleaved pairs of `width` values by its plain table."""
    table = getattr(rotary, "cos_sin_cache", None)
    return table is not None and not rotary.is_neox_style and table.shape[-1] == width and width % 32 == 0


def fits(weight: torch.Tensor) -> bool:
    """Whether both widths of a weight [..., outer, inner] are whole blocks; the joined down product may end in part."""
    return weight.shape[-1] % BLOCK == 0 and weight.shape[-2] % BLOCK == 0


def install(model: torch.nn.Module) -> None:
    """Let `model.model.forward` run the stack where the batch allows it."""
    stack: Any = model.model
    original = stack.forward
    built = Stack(stack)

    def forward(
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        if stack.layers_to_capture or not wanted(forward_batch, pp_proxy_tensors):
            return padded(original, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        return built(stack.embed_tokens(input_ids) if input_embeds is None else input_embeds, positions)

    stack.forward = forward
    head: Any = model.lm_head
    if head.weight.dtype in DTYPES and head.weight.shape[1] % 2 == 0:
        head.quant_method = Head(head.weight)


def padded(
    original: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    input_embeds: torch.Tensor | None,
    pp_proxy_tensors: Any,
) -> Any:
    """SGLang's own forward on at least `cpu_rows.MIN_ROWS` rows."""
    real = positions.shape[0]
    if input_embeds is not None:
        input_embeds = pad_rows(input_embeds)
    out = original(pad_rows(input_ids), pad_rows(positions), forward_batch, input_embeds, pp_proxy_tensors)
    if isinstance(out, torch.Tensor):
        return out[:real]
    return type(out)(part[:real] if isinstance(part, torch.Tensor) else part for part in out)


def wanted(forward_batch: Any, pp_proxy_tensors: Any) -> bool:
    """Whether this batch is a plain forward."""
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    return (
        pp_proxy_tensors is None
        and forward_batch.spec_info is None
        and not any(forward_batch.lora_ids or ())
        and not forward_batch.can_run_tbo
        and not forward_batch.forward_mode.is_idle()
        and get_global_indexer_capturer() is None
        and get_global_experts_capturer() is None
        and not getattr(get_global_expert_distribution_recorder(), "recording", False)
    )


class Stack:
    """All layers and the last norm. Weights are packed when it is built; norms and biases are read where they lie."""

    def __init__(self, model: Any) -> None:
        self.dtype = model.layers[0].input_layernorm.weight.dtype
        self.layers = [Layer(layer) for layer in model.layers]
        self.norm, self.eps = model.norm.weight.data, float(model.norm.variance_epsilon)
        self.half = int(self.dtype == torch.bfloat16)
        self.space: Space | None = None

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden], the embedded tokens; positions int64 [rows] -> normed hidden states [rows, hidden]."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        backend = get_attn_backend()
        rows, hidden = x.shape
        if rows == 0:
            return x
        if self.space is None or self.space.rows < rows:
            self.space = Space(rows, self.layers, self.dtype)
            for layer in self.layers:
                layer.bind(self.space)
        space = self.space
        positions = positions.long().contiguous()
        place = positions.data_ptr()
        space.residual[:rows] = x
        absorbed, row = space.absorbed[:rows], space.row[:rows]
        q_rope, key = space.q[:rows, :, -row.shape[1] + absorbed.shape[2] :], space.key[:rows]
        index_q, gates = space.index_q[:rows], space.gates[:rows, : space.index_q.shape[1]]
        ids: torch.Tensor | None = None
        scored = int(not getattr(backend, "all_dense", False))
        left = 0  # where the last layer left what is to be added to the residual
        for layer in self.layers:
            cpu_layer.before(*layer.before, left, rows, place, scored)
            if layer.full:
                ids = backend.index(index_q, key, gates, layer.layer_id, layer.topk)
            seen = backend.attend(layer.layer_id, absorbed, q_rope, row, ids, layer.scale)
            cpu_layer.after(*layer.after, seen.data_ptr(), rows)
            left = space.out.data_ptr()
        out = torch.empty_like(x)
        cpu_ops.add_norm(
            left,
            space.residual.data_ptr(),
            self.norm.data_ptr(),
            self.eps,
            out.data_ptr(),
            rows,
            hidden,
            bool(self.half),
        )
        return out


class Head:
    """The LM head's product, in place of its quantisation method."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = Weight(weight)
        self._dtype = weight.dtype

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, hidden] -> logits [rows, vocabulary]."""
        logits = self._weight(x.to(self._dtype).contiguous()).contiguous()
        return logits if bias is None else logits + bias


class Layer:
    """One decoder layer: its packed weights, and the argument lists of its two calls (see `cpu_layer`)."""

    def __init__(self, layer: Any) -> None:
        module, block = layer.self_attn, layer.mlp
        self.layer_id = module.layer_id
        self.scale = float(module.attn_mqa.scaling)
        self.hidden = layer.input_layernorm.weight.shape[0]
        self.heads, self.rope, self.nope = module.num_local_heads, module.qk_rope_head_dim, module.qk_nope_head_dim
        self.q_width, self.kv_width, self.v_dim = module.q_lora_rank, module.kv_lora_rank, module.v_head_dim
        self.half = int(layer.input_layernorm.weight.dtype == torch.bfloat16)
        self.kept: list[torch.Tensor] = []  # what the argument lists point to

        index = None if module.skip_topk else module.indexer
        self.full = index is not None
        down = [module.fused_qkv_a_proj_with_mqa.weight]
        self.topk = self.index_heads = self.index_dim = index_rope = 0
        wq_b = gates = None
        if index is not None:
            self.topk, self.index_heads, self.index_dim = index.index_topk, index.n_heads, index.head_dim
            index_rope = index.rope_head_dim
            wq_b = Weight(index.wq_b.weight)
            wide = index.weights_proj.weight.data.float() * (self.index_heads * self.index_dim) ** -0.5
            down.append(index.wk.weight)
            if self.half:
                gates = Weight(wide)
            else:
                down.append(wide)
        joined = Weight(torch.cat(down))
        self.down_width = joined.padded
        self.gates_width = gates.padded if gates is not None else self.index_heads
        self._before: list[Any] = [
            *self._norm(layer.input_layernorm),
            self._weight(joined),
            joined.padded,
            *self._norm(module.q_a_layernorm),
            *self._norm(module.kv_a_layernorm),
            self._weight(Weight(module.q_b_proj.weight)),
            self._weight(Weight(module.w_kc.transpose(1, 2))),
            self._table(module.rotary_emb),
            self._weight(wq_b),
            *((0, 0, 0.0) if index is None else self._layer_norm(index.k_norm)),
            self._weight(gates),
            self.gates_width,
            0 if index is None else self._table(index.rotary_emb),
            *(self.hidden, self.q_width, self.kv_width, self.rope, self.nope, self.heads),
            *(self.index_heads, self.index_dim, index_rope, self.half),
        ]
        routed = hasattr(block, "experts")
        plain = block.shared_experts if routed else block
        self.inner = plain.down_proj.weight.shape[1]
        self.expert_inner = self.experts = self.k = 0
        renormalise, scale = 0, 0.0
        router = bias = w13 = w2 = None
        if routed:
            config = block.topk.topk_config
            w2 = Weight(block.experts.w2_weight)
            w13 = Weight(block.experts.w13_weight)
            router = Weight(block.gate.weight.data.float())
            bias = config.correction_bias.data.float()
            self.expert_inner, self.experts, self.k = w2.inner, block.gate.weight.shape[0], config.top_k
            renormalise, scale = int(config.renormalize), float(block.routed_scaling_factor)
        self.router_width = router.padded if router is not None else 0
        self._after: list[Any] = [
            self._weight(Weight(module.w_vc.transpose(1, 2))),
            self._weight(Weight(module.o_proj.weight)),
            *self._norm(layer.post_attention_layernorm),
            self._weight(Weight(plain.gate_up_proj.weight)),
            self._weight(Weight(plain.down_proj.weight)),
            self.inner,
            self._weight(router),
            self.router_width,
            0 if bias is None else self._keep(bias),
            self._weight(w13),
            self._weight(w2),
            *(self.expert_inner, self.experts, self.k, renormalise, scale),
            *(self.hidden, self.kv_width, self.heads, self.v_dim, self.half),
        ]
        self.before: list[Any] = []
        self.after: list[Any] = []

    def bind(self, space: Space) -> None:
        """Point the argument lists to the step's buffers."""
        at = {name: value.data_ptr() for name, value in vars(space).items() if isinstance(value, torch.Tensor)}
        self.before = self._before + [at[name] for name in ("residual", "normed", "down", "q_low", "row", "q")]
        self.before += [at[name] for name in ("absorbed", "index_q", "key", "gates")]
        self.before += [4 * space.gates.shape[1], at["wide"]]
        names = ("residual", "normed", "values", "wide", "logits", "ids", "weights", "starts", "order", "gathered")
        self.after = self._after + [at[name] for name in (*names, "up", "act", "parts", "shared", "out")]

    def _keep(self, tensor: torch.Tensor) -> int:
        self.kept.append(tensor)
        return tensor.data_ptr()

    def _weight(self, weight: Weight | None) -> int:
        return 0 if weight is None else self._keep(weight.data)

    def _norm(self, module: Any) -> tuple[int, float]:
        return self._keep(module.weight.data), float(module.variance_epsilon)

    def _layer_norm(self, module: Any) -> tuple[int, int, float]:
        weight, bias = module.weight.data.float(), module.bias.data.float()
        return self._keep(weight), self._keep(bias), float(module.variance_epsilon)

    def _table(self, rotary: Any) -> int:
        """Float32 [positions, cos | sin] of a SGLang rotary embedding."""
        return self._keep(rotary.cos_sin_cache.float().contiguous())


class Space:
    """Buffers of a step of up to ``rows`` rows, shared by all layers; as large as the largest step so far."""

    def __init__(self, rows: int, layers: list[Layer], dtype: torch.dtype) -> None:
        def most(name: str) -> int:
            return max(getattr(layer, name) for layer in layers)

        def make(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(rows, *shape, dtype=kind)

        first = layers[0]
        hidden, heads = first.hidden, first.heads
        inner, k = max(most("inner"), most("expert_inner")), max(most("k"), 1)
        self.rows = rows
        self.residual, self.normed, self.out, self.shared = (make(hidden) for _ in range(4))
        self.gathered, self.parts = make(hidden), make(k, hidden)
        self.down, self.q_low, self.row = (
            make(most("down_width")),
            make(first.q_width),
            make(first.kv_width + first.rope),
        )
        self.q, self.absorbed = make(heads, first.nope + first.rope), make(heads, first.kv_width)
        self.values = make(heads * first.v_dim)
        self.index_q, self.key = make(most("index_heads"), most("index_dim")), make(most("index_dim"))
        self.gates = make(most("gates_width"), kind=torch.float32)
        self.wide = make(hidden, kind=torch.float32)
        self.logits = make(most("router_width"), kind=torch.float32)
        self.ids, self.order = make(k, kind=torch.int32), make(k, kind=torch.int32)
        self.weights = make(k, kind=torch.float32)
        self.starts = torch.empty(most("experts") + 1, dtype=torch.int32)
        self.up, self.act = make(2 * inner), make(inner)
