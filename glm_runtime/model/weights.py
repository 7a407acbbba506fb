"""The tensors of a checkpoint, in published names and layout (one tensor per expert and projection).

The hidden state is cut into five blocks (shares of 32); who writes a block decides what the model does:

    | one 1 | id 7          | context 8            | out 8             | alt 8             |
      1.0     sign code of    0 at first; every      code of the        code of the
              the token       layer adds to it       first successor    second successor

    attention   scores by id + context, sharply, and adds what it found to context
    indexer     the same score through many noisy heads, so a key at the top-k cut carries little attention weight
    routing     by signs of id alone, in whole steps, so that rounding moves no expert
    experts     id + context -> context
    last layer  its shared expert turns one projection s of context into a ramp and moves out towards alt:

                    out += ramp(s) * (alt - out),   ramp = silu(g(s + d)) - silu(g(s - d))      0 ___/--- 1

    head        code . out, and a little of context

So the next token is one of two successors of the current one, and which of the two every earlier layer's attention
decides: a wrong key set, position or page changes tokens, while the ramp keeps the two best logits apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from glm_runtime.model import config, rng, tokenizer
from glm_runtime.model.recipe import Recipe
from glm_runtime.model.rng import F32

Named = Iterator[tuple[str, F32]]

SHARP_QUERY = 2.4  # standard deviation of a query entry
SHARP_KEY = 2.4  # and of a key entry; their product is the spread of attention logits over keys
COMMON = 0.9  # share of a head's query that all heads have in common
INDEX_NOISE = 0.3  # of an aligned index head's query
READ_CONTEXT = 0.35  # weight of a context entry beside an id entry in queries, keys and values
FOUND = 0.6  # standard deviation that one attention adds to a context entry
EXPERT = 0.3  # and one mixture of experts
ROUTER_STEP = 0.5
ROUTER_BIAS = 0.05  # all biases lie within this
RAMP_GAIN = 60.0  # g of the ramp
RAMP_HALF = 0.1  # d of the ramp; s has a standard deviation near 1.5
RAMP_HEIGHT = 1.5  # makes up for the norm's division of out and alt
HEAD_SCALE = 12.0
HEAD_CONTEXT = 0.3  # keeps every logprob a function of every layer


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of the hidden state lie."""

    hidden: int

    def _cut(self, start: int, stop: int) -> slice:
        unit = self.hidden // 32
        return slice(start * unit, stop * unit)

    @property
    def one(self) -> slice:
        return self._cut(0, 1)

    @property
    def id(self) -> slice:
        return self._cut(1, 8)

    @property
    def context(self) -> slice:
        return self._cut(8, 16)

    @property
    def out(self) -> slice:
        return self._cut(16, 24)

    @property
    def alt(self) -> slice:
        return self._cut(24, 32)


def _size(block: slice) -> int:
    return int(block.stop - block.start)


def _read(recipe: Recipe, name: str, rows: int, gain: float = 1.0, context: float = 1.0, one: float = 0.0) -> F32:
    """Random map [rows, hidden] of the id block, with weight `context` of context and `one` of the constant."""
    blocks = Blocks(recipe.hidden)
    factor = np.zeros(recipe.hidden, dtype=np.float64)
    factor[blocks.id] = 1.0
    factor[blocks.context] = context
    factor[blocks.one] = one
    factor *= gain / float(np.sqrt(np.square(factor).sum()))
    return (rng.normal(recipe.seed, name, (rows, recipe.hidden)) * factor).astype(np.float32)


def _write(recipe: Recipe, name: str, cols: int, gain: float) -> F32:
    """Random map [hidden, cols] into the context block."""
    blocks = Blocks(recipe.hidden)
    full = np.zeros((recipe.hidden, cols), dtype=np.float32)
    full[blocks.context] = rng.normal(recipe.seed, name, (_size(blocks.context), cols), gain * cols**-0.5)
    return full


def _norm(recipe: Recipe, name: str, count: int) -> F32:
    return 1.0 + rng.normal(recipe.seed, name, (count,), 0.1)


def _queries(recipe: Recipe, group: str) -> F32:
    """q_b_proj [heads, nope + rope, q_lora], mostly common to the heads, the same for all layers of an index group."""
    r = recipe
    shape = (r.nope_dim + r.rope_dim, r.q_lora)
    common = rng.normal(r.seed, f"{group}.query", shape)
    own = rng.normal(r.seed, f"{group}.query.own", (r.heads, *shape))
    return ((COMMON**0.5 * common + (1 - COMMON) ** 0.5 * own) * (SHARP_QUERY * r.q_lora**-0.5)).astype(np.float32)


def _keys(recipe: Recipe, group: str) -> tuple[F32, F32]:
    """Maps of the hidden state to the position-free key [nope, hidden] and the rotated one [rope, hidden]."""
    free = _read(recipe, f"{group}.key.free", recipe.nope_dim, context=READ_CONTEXT)
    turned = _read(recipe, f"{group}.key.turned", recipe.rope_dim, context=READ_CONTEXT)
    return free, turned


def _attention(recipe: Recipe, prefix: str, group: str) -> Named:
    r = recipe
    queries = _queries(r, group)
    free, turned = _keys(r, group)
    yield f"{prefix}.q_a_proj.weight", _read(r, f"{group}.q_a", r.q_lora, context=READ_CONTEXT)
    yield f"{prefix}.q_a_layernorm.weight", _norm(r, f"{group}.q_norm", r.q_lora)
    yield f"{prefix}.q_b_proj.weight", queries.reshape(-1, r.q_lora)
    values = _read(r, f"{prefix}.value", r.kv_lora - r.nope_dim, context=READ_CONTEXT)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", np.concatenate([free, values, turned * np.float32(SHARP_KEY)])
    yield f"{prefix}.kv_a_layernorm.weight", _norm(r, f"{prefix}.kv_norm", r.kv_lora)
    up = rng.normal(r.seed, f"{prefix}.kv_b", (r.heads, r.nope_dim + r.v_dim, r.kv_lora), r.kv_lora**-0.5)
    up[:, : r.nope_dim] *= 0.3
    up[:, np.arange(r.nope_dim), np.arange(r.nope_dim)] += 1.0
    up[:, : r.nope_dim] *= SHARP_KEY
    yield f"{prefix}.kv_b_proj.weight", up.reshape(-1, r.kv_lora)
    yield f"{prefix}.o_proj.weight", _write(r, f"{prefix}.o", r.heads * r.v_dim, FOUND)


def _indexer(recipe: Recipe, prefix: str, group: str) -> Named:
    """Half of the index heads repeat the attention's query with noise, half are pairs of a random query and its
    negative: of such a pair one product is positive, so no key scores zero in every head and no two keys tie."""
    r = recipe
    blocks = Blocks(r.hidden)
    aligned = r.index_heads // 2
    queries = _queries(r, group)
    queries = np.roll(queries, r.rope_dim, axis=1)  # index queries and keys hold the rotated part first
    scale = SHARP_QUERY * r.q_lora**-0.5
    noise = rng.normal(r.seed, f"{prefix}.wq_b", (r.index_heads, r.index_dim, r.q_lora), scale)
    wq_b = noise.copy()
    wq_b[:aligned] = INDEX_NOISE * noise[:aligned] + queries[np.arange(aligned) % r.heads]
    wq_b[aligned + 1 :: 2] = -noise[aligned : r.index_heads - 1 : 2]
    yield f"{prefix}.wq_b.weight", wq_b.reshape(-1, r.q_lora)
    free, turned = _keys(r, group)
    yield f"{prefix}.wk.weight", rng.bf16_exact(np.concatenate([turned, free]))
    yield f"{prefix}.k_norm.weight", _norm(r, f"{prefix}.k_norm", r.index_dim)
    yield f"{prefix}.k_norm.bias", rng.normal(r.seed, f"{prefix}.k_bias", (r.index_dim,), 0.05)
    # NOTE: SGLang builds weights_proj in bfloat16 whatever the checkpoint holds, so it must survive that exactly.
    weigh = _read(r, f"{prefix}.w", r.index_heads, gain=0.15)
    weigh[:aligned, blocks.one] = 1.0 / _size(blocks.one)
    yield f"{prefix}.weights_proj.weight", rng.bf16_exact(weigh)


def _mlp(recipe: Recipe, prefix: str, inter: int, gain: float = EXPERT) -> Named:
    yield f"{prefix}.gate_proj.weight", _read(recipe, f"{prefix}.gate", inter)
    yield f"{prefix}.up_proj.weight", _read(recipe, f"{prefix}.up", inter)
    yield f"{prefix}.down_proj.weight", _write(recipe, f"{prefix}.down", inter, 2.0 * gain)


def _choice(recipe: Recipe, prefix: str, inter: int) -> Named:
    """The last layer's shared expert: units j and j + n hold the two edges of the ramp for entry j of out and alt."""
    blocks = Blocks(recipe.hidden)
    n = _size(blocks.out)
    one, context = blocks.one, blocks.context
    gate = np.zeros((inter, recipe.hidden), dtype=np.float32)
    asked = rng.normal(recipe.seed, "choice", (_size(context),), RAMP_GAIN * _size(context) ** -0.5)
    gate[: 2 * n, context] = asked
    gate[:n, one] = RAMP_GAIN * RAMP_HALF / _size(one)
    gate[n : 2 * n, one] = -RAMP_GAIN * RAMP_HALF / _size(one)
    up = np.zeros((inter, recipe.hidden), dtype=np.float32)
    down = np.zeros((recipe.hidden, inter), dtype=np.float32)
    unit = np.arange(n)
    for shift, sign in ((0, 1.0), (n, -1.0)):
        up[unit + shift, blocks.alt.start + unit] = 1.0
        up[unit + shift, blocks.out.start + unit] = -1.0
        down[blocks.out.start + unit, unit + shift] = sign * RAMP_HEIGHT / (2.0 * RAMP_GAIN * RAMP_HALF)
    yield f"{prefix}.gate_proj.weight", gate
    yield f"{prefix}.up_proj.weight", up
    yield f"{prefix}.down_proj.weight", down


def _router(recipe: Recipe, prefix: str) -> Named:
    """Each expert's logit is ROUTER_STEP times the sum of five signs of the token's id, so experts differ by whole
    steps or not at all; biases a fixed distance apart, smaller together than a step, order those that do not."""
    r = recipe
    block = Blocks(r.hidden).id
    gate = np.zeros((r.experts, r.hidden), dtype=np.float32)
    for expert in range(r.experts):
        place = block.start + rng.permutation(r.seed, f"{prefix}.router.{expert}", _size(block))[:5]
        gate[expert, place] = ROUTER_STEP * rng.signs(r.seed, f"{prefix}.router.{expert}.sign", (5,))
    order = rng.permutation(r.seed, f"{prefix}.bias", r.experts)
    bias = (order - (r.experts - 1) / 2.0) * (ROUTER_BIAS / r.experts)
    # NOTE: SGLang rounds the router to bfloat16 off CUDA unless config.router_fp32 holds.
    yield f"{prefix}.gate.weight", rng.bf16_exact(gate)
    yield f"{prefix}.gate.e_score_correction_bias", bias.astype(np.float32)


def _moe(recipe: Recipe, prefix: str, last: bool) -> Named:
    r = recipe
    yield from _router(r, prefix)
    for expert in range(r.experts):
        yield from _mlp(r, f"{prefix}.experts.{expert}", r.moe_inter)
    if last:
        yield from _choice(r, f"{prefix}.shared_experts", r.moe_inter)
    else:
        yield from _mlp(r, f"{prefix}.shared_experts", r.moe_inter)


def _layer(recipe: Recipe, layer: int, *, full: bool, dense: bool, last: bool) -> Named:
    prefix = f"model.layers.{layer}"
    group = f"group.{layer if full else max(i for i in range(layer) if config.is_full(i))}"
    yield f"{prefix}.input_layernorm.weight", _norm(recipe, f"{prefix}.norm.in", recipe.hidden)
    after = _norm(recipe, f"{prefix}.norm.post", recipe.hidden)
    after[Blocks(recipe.hidden).id] = 1.0  # keeps the router's steps equal
    yield f"{prefix}.post_attention_layernorm.weight", after
    yield from _attention(recipe, f"{prefix}.self_attn", group)
    if full:
        yield from _indexer(recipe, f"{prefix}.self_attn.indexer", group)
    if dense:
        yield from _mlp(recipe, f"{prefix}.mlp", recipe.dense_inter)
    else:
        yield from _moe(recipe, f"{prefix}.mlp", last)


def _nextn(recipe: Recipe, layer: int, embed: F32, head: F32) -> Named:
    """The multi-token-prediction layer, stored as layer number `layers`; its indexer is always full.

    Published checkpoints repeat embedding and head here: SGLang skips the copies, other loaders want them.

    eh_proj takes context from the target's hidden state and everything else from the embedding of the next token.
    """
    prefix = f"model.layers.{layer}"
    blocks = Blocks(recipe.hidden)
    join = np.zeros((recipe.hidden, 2 * recipe.hidden), dtype=np.float32)
    np.fill_diagonal(join, 0.85)
    join[blocks.context] = 0.0
    rows = np.arange(blocks.context.start, blocks.context.stop)
    join[rows, recipe.hidden + rows] = 1.0
    yield f"{prefix}.embed_tokens.weight", embed
    yield f"{prefix}.enorm.weight", _norm(recipe, f"{prefix}.enorm", recipe.hidden)
    yield f"{prefix}.hnorm.weight", _norm(recipe, f"{prefix}.hnorm", recipe.hidden)
    yield f"{prefix}.eh_proj.weight", join
    yield from _layer(recipe, layer, full=True, dense=False, last=True)
    yield f"{prefix}.shared_head.norm.weight", _norm(recipe, "norm", recipe.hidden)
    yield f"{prefix}.shared_head.head.weight", head


def successors(recipe: Recipe) -> tuple[list[int], list[int]]:
    """First and second successor of every token, each a printable token; 512 entries each."""
    words = np.array(tokenizer.printable())
    both = []
    for name in ("first", "second"):
        order = rng.permutation(recipe.seed, f"successor/{name}", len(words))
        other = (rng.bits(recipe.seed, f"successor/{name}/other", tokenizer.VOCAB_SIZE) % len(words)).astype(np.int64)
        after = words[other]
        after[words] = words[order]  # a permutation among the printable ones keeps generated text varied
        both.append(after.tolist())
    return both[0], both[1]


def codes(recipe: Recipe, count: int, dims: int) -> F32:
    """`count` sign vectors [count, dims], drawn until no two agree or disagree in much more than half of the places."""
    limit = 2.7 * dims**0.5
    kept = np.zeros((0, dims), dtype=np.float32)
    draw = 0
    while len(kept) < count:
        code = rng.signs(recipe.seed, f"code/{draw}", (dims,))
        draw += 1
        if not len(kept) or np.abs(kept @ code).max() <= limit:
            kept = np.concatenate([kept, code[None]])
    return kept


def _embedding(recipe: Recipe, words: list[int], code: F32) -> F32:
    blocks = Blocks(recipe.hidden)
    place = {token: i for i, token in enumerate(words)}
    first, second = successors(recipe)
    embed = np.zeros((tokenizer.VOCAB_SIZE, recipe.hidden), dtype=np.float32)
    embed[:, blocks.one] = 1.0
    embed[:, blocks.id] = rng.signs(recipe.seed, "id", (tokenizer.VOCAB_SIZE, _size(blocks.id)))
    embed[:, blocks.out] = code[[place[t] for t in first]]
    embed[:, blocks.alt] = code[[place[t] for t in second]]
    return embed


def _head(recipe: Recipe, words: list[int], code: F32) -> F32:
    blocks = Blocks(recipe.hidden)
    head = np.zeros((tokenizer.VOCAB_SIZE, recipe.hidden), dtype=np.float32)
    head[words, blocks.out] = code * np.float32(HEAD_SCALE / _size(blocks.out))
    shape = (tokenizer.VOCAB_SIZE, _size(blocks.context))
    head[:, blocks.context] = rng.normal(recipe.seed, "head", shape, HEAD_CONTEXT * shape[1] ** -0.5)
    return head


def tensors(recipe: Recipe) -> Named:
    """All tensors of the checkpoint as (name, float32 array), in file order."""
    words = tokenizer.printable()
    code = codes(recipe, len(words), _size(Blocks(recipe.hidden).out))
    embed, head = _embedding(recipe, words, code), _head(recipe, words, code)
    yield "model.embed_tokens.weight", embed
    for layer in range(recipe.layers):
        dense = layer < config.DENSE_LAYERS
        yield from _layer(recipe, layer, full=config.is_full(layer), dense=dense, last=layer == recipe.layers - 1)
    yield "model.norm.weight", _norm(recipe, "norm", recipe.hidden)
    yield "lm_head.weight", head
    yield from _nextn(recipe, recipe.layers, embed.copy(), head.copy())
