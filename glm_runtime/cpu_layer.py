"""A decoder layer in two compiled calls, before and after its sparse attention.

    before   x, r -> add_norm -> down product -> latent -> q_b product -> turn -> absorb with w_kc
                                 full layer too: wq_b product -> turn,  index_key,  gates
    after    seen -> w_vc -> o product -> add_norm -> dense MLP -> x
                                                   -> router, route, experts, shared expert, combine -> x

    experts  slots (row, j) sorted by expert; each expert multiplies the rows that chose it; results go back to slots

Arguments are addresses of packed weights (`cpu_gemm.Weight`), norms and the step's buffers (`cpu_stack.Space`), then
sizes. ``half`` is 1 for bfloat16. Both return 0.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from attention.kernels.sparse import copy, widen
from attention.kernels.vector import compiled, get_i32, put_i32
from glm_runtime.cpu_gemm import multiply, multiply_heads, version
from glm_runtime.cpu_ops import add_norm, combine, gate, index_key, latent, route, turn


@njit(nogil=True)
def experts(
    x: int,
    rows: int,
    hidden: int,
    inner: int,
    count: int,
    k: int,
    ids: int,
    w13: int,
    w2: int,
    starts: int,
    order: int,
    gathered: int,
    up: int,
    act: int,
    down: int,
    parts: int,
    half: bool,
) -> None:
    """parts[row, j] = W2_e (silu(W1_e x) * W3_e x), e = ids[row, j].

    Scratch: starts int32 [count + 1], order int32 [rows * k]; gathered, up, act and down hold up to ``rows`` rows.
    """
    size = 2 if half else 4
    line = hidden * size
    for e in range(count + 1):
        put_i32(starts + 4 * e, 0)
    for s in range(rows * k):
        e = get_i32(ids + 4 * s)
        put_i32(starts + 4 * e, get_i32(starts + 4 * e) + 1)
    end = 0
    for e in range(count):
        end += get_i32(starts + 4 * e)
        put_i32(starts + 4 * e, end)
    for s in range(rows * k - 1, -1, -1):
        e = get_i32(ids + 4 * s)
        place = get_i32(starts + 4 * e) - 1
        put_i32(starts + 4 * e, place)
        put_i32(order + 4 * place, s)
    put_i32(starts + 4 * count, rows * k)
    for e in range(count):
        first = get_i32(starts + 4 * e)
        chosen = get_i32(starts + 4 * e + 4) - first
        if chosen == 0:
            continue
        for i in range(chosen):
            copy(x + get_i32(order + 4 * (first + i)) // k * line, gathered + i * line, line)
        multiply(gathered, line, chosen, hidden, w13 + e * 2 * inner * line, 2 * inner, up, 2 * inner * size, half)
        gate(up, act, chosen, inner, half)
        multiply(act, inner * size, chosen, inner, w2 + e * inner * line, hidden, down, line, half)
        for i in range(chosen):
            copy(down + i * line, parts + get_i32(order + 4 * (first + i)) * line, line)


@njit(nogil=True)
def dense(
    x: int, rows: int, hidden: int, inner: int, w13: int, w2: int, up: int, act: int, out: int, half: bool
) -> None:
    """out = W2 (silu(W1 x) * W3 x)."""
    size = 2 if half else 4
    multiply(x, hidden * size, rows, hidden, w13, 2 * inner, up, 2 * inner * size, half)
    gate(up, act, rows, inner, half)
    multiply(act, inner * size, rows, inner, w2, hidden, out, hidden * size, half)


def _build(version: str) -> tuple[Any, Any]:
    @compiled
    def before(
        # the layer's weights
        norm_weight: int,
        norm_eps: float,
        down_weight: int,
        down_width: int,
        q_norm: int,
        q_eps: float,
        kv_norm: int,
        kv_eps: float,
        q_b: int,
        w_kc: int,
        table: int,
        wq_b: int,
        key_weight: int,
        key_bias: int,
        key_eps: float,
        gate_weight: int,
        gate_width: int,
        index_table: int,
        # sizes
        hidden: int,
        q_width: int,
        kv_width: int,
        rope: int,
        nope: int,
        heads: int,
        index_heads: int,
        index_dim: int,
        index_rope: int,
        half: int,
        # the step's buffers
        residual: int,
        normed: int,
        down: int,
        q_low: int,
        row: int,
        q: int,
        absorbed: int,
        index_q: int,
        key: int,
        gates: int,
        gates_step: int,
        wide: int,
        # the step
        x: int,
        rows: int,
        positions: int,
        scored: int,
    ) -> int:
        """wq_b 0: a shared layer. gate_weight 0: the gates are part of the down product, behind the key.

        scored 0: no row sees more keys than it may keep; index keys are made, index queries and gates are not.
        """
        small = half != 0
        size = 2 if small else 4
        add_norm(x, residual, norm_weight, norm_eps, normed, rows, hidden, small)
        step = down_width * size
        multiply(normed, hidden * size, rows, hidden, down_weight, down_width, down, step, small)
        latent(
            down,
            step,
            q_norm,
            q_eps,
            q_low,
            q_width,
            kv_norm,
            kv_eps,
            row,
            kv_width,
            rope,
            positions,
            table,
            rows,
            small,
        )
        if wq_b != 0:
            keys = down + (q_width + kv_width + rope) * size
            index_key(
                keys,
                step,
                key_weight,
                key_bias,
                key_eps,
                index_dim,
                index_rope,
                positions,
                index_table,
                key,
                rows,
                small,
            )
            if scored != 0:
                width = index_heads * index_dim
                multiply(q_low, q_width * size, rows, q_width, wq_b, width, index_q, width * size, small)
                turn(
                    index_q,
                    width * size,
                    index_heads,
                    index_dim * size,
                    index_rope,
                    positions,
                    index_table,
                    rows,
                    small,
                )
            if scored != 0 and gate_weight != 0:
                widen(normed, wide, rows * hidden)
                multiply(wide, 4 * hidden, rows, hidden, gate_weight, gate_width, gates, gates_step, False)
            elif scored != 0:
                for i in range(rows):
                    copy(keys + i * step + index_dim * size, gates + i * gates_step, index_heads * size)
        head = nope + rope
        width = heads * head
        multiply(q_low, q_width * size, rows, q_width, q_b, width, q, width * size, small)
        turn(q + nope * size, width * size, heads, head * size, rope, positions, table, rows, small)
        wide_head = kv_width * size
        multiply_heads(
            q,
            width * size,
            head * size,
            rows,
            nope,
            w_kc,
            kv_width,
            absorbed,
            heads * wide_head,
            wide_head,
            heads,
            small,
        )
        return 0 * len(version)

    @compiled
    def after(
        # the layer's weights
        w_vc: int,
        o: int,
        norm_weight: int,
        norm_eps: float,
        w13: int,
        w2: int,
        inner: int,
        router: int,
        router_width: int,
        bias: int,
        expert_w13: int,
        expert_w2: int,
        expert_inner: int,
        count: int,
        k: int,
        renormalise: int,
        scale: float,
        # sizes
        hidden: int,
        kv_width: int,
        heads: int,
        v_dim: int,
        half: int,
        # the step's buffers
        residual: int,
        normed: int,
        values: int,
        wide: int,
        logits: int,
        ids: int,
        weights: int,
        starts: int,
        order: int,
        gathered: int,
        up: int,
        act: int,
        parts: int,
        shared: int,
        out: int,
        # the step
        seen: int,
        rows: int,
    ) -> int:
        """router 0: a dense layer, whose MLP is w13 and w2; else they are the shared expert's."""
        small = half != 0
        size = 2 if small else 4
        width = heads * v_dim
        line = hidden * size
        head = kv_width * size
        multiply_heads(
            seen, heads * head, head, rows, kv_width, w_vc, v_dim, values, width * size, v_dim * size, heads, small
        )
        multiply(values, width * size, rows, width, o, hidden, out, line, small)
        add_norm(out, residual, norm_weight, norm_eps, normed, rows, hidden, small)
        if router == 0:
            dense(normed, rows, hidden, inner, w13, w2, up, act, out, small)
            return 0 * len(version)
        source = normed
        if small:
            widen(normed, wide, rows * hidden)
            source = wide
        multiply(source, 4 * hidden, rows, hidden, router, router_width, logits, 4 * router_width, False)
        route(logits, 4 * router_width, bias, rows, count, k, renormalise != 0, ids, weights)
        experts(
            normed,
            rows,
            hidden,
            expert_inner,
            count,
            k,
            ids,
            expert_w13,
            expert_w2,
            starts,
            order,
            gathered,
            up,
            act,
            shared,
            parts,
            small,
        )
        dense(normed, rows, hidden, inner, w13, w2, up, act, shared, small)
        combine(parts, weights, k, scale, shared, out, rows, hidden, small)
        return 0

    return before, after


before, after = _build(version())
