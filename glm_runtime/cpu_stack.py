"""The decoder stack as one short loop: SGLang's weights and attention backend, our operators between the products.

    x, r  -> add_norm -> [q_a | kv_a | wk | gates] product -> latent -> q_b product -> turn, absorb (w_kc)
                          full layer: wq_b product -> index.select -> ids         shared layer: ids of the last full one
          -> sparse MLA -> w_vc -> o product -> add_norm -> dense MLP, or route -> experts -> combine -> x

`DeepseekV2Model.forward` computes the same in some 60 small torch calls a layer; on a CPU at one row a step those calls
are the step. The stack runs where nothing but a plain forward is asked for: one rank, one pipeline stage, unquantised
weights, no speculation, no capture of intermediate states. `plain` says whether the model allows it, `wanted` whether
this batch does; all else goes through SGLang's own forward.

Products run on at least `cpu_rows.MIN_ROWS` rows with packed weights, so a row's bits do not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from glm_runtime import cpu_ops
from glm_runtime.cpu_rows import PackedExperts, linear, pack, pad_rows


def plain(model: torch.nn.Module) -> bool:
    """Whether `model` (GlmMoeDsaForCausalLM) is of the shape that the stack computes."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
    from sglang.srt.models.deepseek_v2 import DeepseekV2MLP, DeepseekV2MoE
    from sglang.srt.runtime_context import get_parallel

    stack: Any = model.model
    parallel = get_parallel()
    if parallel.tp_size * parallel.pp_size != 1 or stack.layers_to_capture or stack.llama_4_scaling_config is not None:
        return False
    for layer in stack.layers:
        attention = layer.self_attn
        products = [attention.fused_qkv_a_proj_with_mqa, attention.q_b_proj, attention.o_proj]
        if not attention.skip_topk:
            index = attention.indexer
            products += [index.wq_b, index.wk]
            if index.rotary_emb.is_neox_style or not hasattr(index.rotary_emb, "cos_sin_cache"):
                return False
        if attention.rotary_emb is None or attention.rotary_emb.is_neox_style or attention.w_kc.dtype.itemsize < 2:
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
    return True


def install(model: torch.nn.Module) -> None:
    """Let `model.model.forward` run the stack where the batch allows it."""
    stack: Any = model.model
    original = stack.forward
    built: list[Stack] = []

    def forward(
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        if not wanted(forward_batch, input_embeds, pp_proxy_tensors):
            return original(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        if not built:
            built.append(Stack(stack))
        return built[0](stack.embed_tokens(input_ids), positions)

    stack.forward = forward


def wanted(forward_batch: Any, input_embeds: torch.Tensor | None, pp_proxy_tensors: Any) -> bool:
    """Whether this batch is a plain forward."""
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    return (
        input_embeds is None
        and pp_proxy_tensors is None
        and forward_batch.spec_info is None
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
        self.layers = [Layer(layer, self.dtype) for layer in model.layers]
        self.norm = Norm(model.norm)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden], the embedded tokens; positions int64 [rows] -> normed hidden states [rows, hidden]."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        backend = get_attn_backend()
        positions = positions.contiguous()
        residual = x.clone()
        out: torch.Tensor | None = None
        ids: torch.Tensor | None = None
        for layer in self.layers:
            out, ids = layer(out, residual, positions, ids, backend)
        return self.norm(out, residual)


class Norm:
    """RMSNorm with the residual sum in front."""

    def __init__(self, module: Any) -> None:
        self.weight = module.weight.data
        self.eps = float(module.variance_epsilon)
        self.half = int(self.weight.dtype == torch.bfloat16)

    def __call__(self, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Add x [rows, width] to `residual` in place, and return the norm of the sum; x None adds nothing."""
        out = torch.empty_like(residual)
        rows, width = residual.shape
        start = 0 if x is None else x.data_ptr()
        cpu_ops.add_norm(
            start, residual.data_ptr(), self.weight.data_ptr(), self.eps, out.data_ptr(), rows, width, self.half
        )
        return out


class Layer:
    """One decoder layer."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self.input_norm = Norm(layer.input_layernorm)
        self.post_norm = Norm(layer.post_attention_layernorm)
        self.attention = Attention(layer.self_attn, dtype)
        self.mlp: Callable[[torch.Tensor], torch.Tensor]
        self.mlp = Experts(layer.mlp, dtype) if hasattr(layer.mlp, "experts") else Dense(layer.mlp)

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor | None,
        backend: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, hidden] is what the layer before left to add to `residual`; ids are the last full layer's."""
        out, ids = self.attention(self.input_norm(x, residual), positions, ids, backend)
        return self.mlp(self.post_norm(out, residual)), ids


class Attention:
    """Absorbed MLA and, in a full layer, its indexer."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.half = int(dtype == torch.bfloat16)
        self.size = dtype.itemsize
        self.layer_id = module.layer_id
        self.heads, self.rope, self.nope = module.num_local_heads, module.qk_rope_head_dim, module.qk_nope_head_dim
        self.q_width, self.kv_width = module.q_lora_rank, module.kv_lora_rank
        self.scale = module.attn_mqa.scaling
        self.q_norm, self.kv_norm = Norm(module.q_a_layernorm), Norm(module.kv_a_layernorm)
        self.w_kc, self.w_vc = module.w_kc, module.w_vc
        self.v_dim = module.w_vc.shape[2]
        self.table = angles(module.rotary_emb)
        self.q_b, self.o = pack(module.q_b_proj.weight), pack(module.o_proj.weight)
        self.index = None if module.skip_topk else Index(module.indexer, dtype)
        down = [module.fused_qkv_a_proj_with_mqa.weight]
        if self.index is not None:
            down += self.index.down
        self.down = pack(torch.cat(down))

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor | None, backend: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, hidden], normed -> [rows, hidden] and the ids in force, int32 [rows, topk]."""
        rows, place, table = x.shape[0], positions.data_ptr(), self.table.data_ptr()
        down = linear(x, self.down)
        q_low = x.new_empty(rows, self.q_width)
        latent = x.new_empty(rows, self.kv_width + self.rope)
        cpu_ops.latent(
            down.data_ptr(),
            down.shape[1] * self.size,
            self.q_norm.weight.data_ptr(),
            self.kv_norm.weight.data_ptr(),
            self.q_norm.eps,
            self.kv_norm.eps,
            q_low.data_ptr(),
            latent.data_ptr(),
            self.q_width,
            self.kv_width,
            self.rope,
            place,
            table,
            rows,
            self.half,
        )
        if self.index is not None:
            ids = self.index(x, q_low, down[:, self.q_width + self.kv_width + self.rope :], positions, backend)
        assert ids is not None, "the first layer of a stack is a full one"
        head = self.nope + self.rope
        q = linear(q_low, self.q_b)
        cpu_ops.turn(
            q.data_ptr() + self.nope * self.size,
            q.shape[1] * self.size,
            self.heads,
            head * self.size,
            self.rope,
            place,
            table,
            rows,
            self.half,
        )
        q = q.view(rows, self.heads, head)
        absorbed = torch.bmm(q[..., : self.nope].transpose(0, 1), self.w_kc).transpose(0, 1)
        seen = backend.attend(self.layer_id, absorbed, q[..., self.nope :], latent, ids, self.scale)
        values = x.new_empty(rows, self.heads, self.v_dim)
        torch.bmm(seen.transpose(0, 1), self.w_vc, out=values.transpose(0, 1))
        return linear(values.view(rows, -1), self.o), ids


class Index:
    """The indexer of a full layer; `down` are the weights that read the layer's input, to be joined with others."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.half = int(dtype == torch.bfloat16)
        self.layer_id = module.layer_id
        self.heads, self.dim, self.rope, self.topk = (
            module.n_heads,
            module.head_dim,
            module.rope_head_dim,
            module.index_topk,
        )
        self.wq_b = pack(module.wq_b.weight)
        self.norm_weight, self.norm_bias = module.k_norm.weight.data.float(), module.k_norm.bias.data.float()
        self.eps = float(module.k_norm.variance_epsilon)
        self.table = angles(module.rotary_emb)
        gates = module.weights_proj.weight.data.float() * (self.heads * self.dim) ** -0.5
        self.down = [module.wk.weight] + ([] if self.half else [gates])
        self.gates = pack(gates) if self.half else None

    def __call__(
        self, x: torch.Tensor, q_low: torch.Tensor, down: torch.Tensor, positions: torch.Tensor, backend: Any
    ) -> torch.Tensor:
        """x [rows, hidden], q_low [rows, q_lora], down [rows, key and, in float32, gates] -> int32 [rows, topk]."""
        rows, size, place, table = x.shape[0], x.element_size(), positions.data_ptr(), self.table.data_ptr()
        q = linear(q_low, self.wq_b)
        cpu_ops.turn(
            q.data_ptr(),
            q.shape[1] * size,
            self.heads,
            self.dim * size,
            self.rope,
            place,
            table,
            rows,
            self.half,
        )
        key = x.new_empty(rows, self.dim)
        cpu_ops.index_key(
            down.data_ptr(),
            down.stride(0) * size,
            self.norm_weight.data_ptr(),
            self.norm_bias.data_ptr(),
            self.eps,
            self.dim,
            self.rope,
            place,
            table,
            key.data_ptr(),
            rows,
            self.half,
        )
        gates = down[:, self.dim :] if self.gates is None else linear(x.float(), self.gates)
        ids: torch.Tensor = backend.index(q.view(rows, self.heads, self.dim), key, gates, self.layer_id, self.topk)
        return ids


class Dense:
    """W2 (silu(W1 x) * W3 x)."""

    def __init__(self, module: Any) -> None:
        self.up, self.down = pack(module.gate_up_proj.weight), pack(module.down_proj.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] -> [rows, hidden]."""
        return linear(gated(linear(x, self.up)), self.down)


class Experts:
    """Shared expert plus the routed ones, each over the rows that chose it."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.half = int(dtype == torch.bfloat16)
        self.shared = Dense(module.shared_experts)
        self.router = pack(module.gate.weight.data.float())
        config = module.topk.topk_config
        self.bias = config.correction_bias.data.float()
        self.k, self.renormalise = config.top_k, int(config.renormalize)
        self.experts = module.gate.weight.shape[0]
        self.scale = float(module.routed_scaling_factor)
        self.packed: PackedExperts = getattr(module.experts, "glm_packed", None) or PackedExperts(module.experts)
        self.chosen = torch.empty(self.experts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] -> [rows, hidden]."""
        rows = x.shape[0]
        logits = linear(x.float(), self.router)
        ids = torch.empty(rows, self.k, dtype=torch.int32)
        weights = torch.empty(rows, self.k)
        cpu_ops.route(
            logits.data_ptr(),
            self.bias.data_ptr(),
            rows,
            self.experts,
            self.k,
            self.renormalise,
            self.chosen.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
        )
        parts = x.new_empty(rows * self.k, x.shape[1])
        flat = ids.view(-1)
        order = torch.argsort(flat, stable=True)
        first = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=self.experts).tolist()):
            if count:
                slots = order[first : first + count]
                first += count
                hidden = pad_rows(x.index_select(0, slots // self.k))
                result = linear(gated(linear(hidden, self.packed.w13[expert])), self.packed.w2[expert])
                parts.index_copy_(0, slots, result[:count])
        shared = self.shared(x)
        out = torch.empty_like(x)
        cpu_ops.combine(
            parts.data_ptr(),
            weights.data_ptr(),
            self.k,
            self.scale,
            shared.data_ptr(),
            out.data_ptr(),
            rows,
            x.shape[1],
            self.half,
        )
        return out


def gated(x: torch.Tensor) -> torch.Tensor:
    """silu(g) * u of x [rows, 2 * width] = [g | u] -> [rows, width]."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    cpu_ops.gate(x.data_ptr(), out.data_ptr(), rows, width, int(x.dtype == torch.bfloat16))
    return out


def angles(rotary: Any) -> torch.Tensor:
    """Float32 [positions, cos | sin] of a SGLang rotary embedding."""
    table: torch.Tensor = rotary.cos_sin_cache.float().contiguous()
    return table
