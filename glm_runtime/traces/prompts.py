"""Token ids for a trace that has only lengths and block names.

    block ids   7 8 | 7 8 | 7 9        tokens   AAAA BBBB | AAAA BBBB | AAAA CCCC        rest: the request's own
    token(i) = first + mix(seed, block id, i) mod vocabulary

`mix` is the finaliser of splitmix64: the same on every machine, with no state to carry from one request to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from glm_runtime.traces.request import Request

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def prompts(
    requests: Sequence[Request], vocab: int | range, block_size: int | None = None, seed: int = 0
) -> list[list[int]]:
    """Token ids of every request, [prompt_tokens] each.

    Args:
        vocab: ids are taken from [0, vocab), or from a range of ids with step 1.
        block_size: tokens a block; None: what each request says.

    Raises:
        ValueError: for an empty vocabulary, or a block size that does not fit a request's blocks.
    """
    ids = range(vocab) if isinstance(vocab, int) else vocab
    if len(ids) < 2 or ids.step != 1:
        raise ValueError(f"vocab {vocab} holds no two token ids to choose from")
    made: dict[tuple[int, int], NDArray[np.int64]] = {}
    found = []
    for index, request in enumerate(requests):
        size = request.block_size if block_size is None else block_size
        named, own = request.block_ids, request.prompt_tokens
        parts: list[NDArray[np.int64]] = []
        if named:
            if size < 1 or len(named) > -(-request.prompt_tokens // size):
                raise ValueError(
                    f"block_size {size} does not fit request {index}: {len(named)} blocks in {own} prompt tokens"
                )
            for block in named:
                tokens = made.get((block, size))
                if tokens is None:
                    tokens = made[block, size] = _tokens(seed, 2 * block, size, ids)
                parts.append(tokens)
            own = max(0, own - len(named) * size)
        parts.append(_tokens(seed, 2 * index + 1, own, ids))
        tokens = np.concatenate(parts)[: request.prompt_tokens]
        found.append(tokens.tolist())
    return found


def reuse(requests: Sequence[Request]) -> float:
    """Share of all prompt tokens that lie in leading blocks seen before, if nothing were ever forgotten."""
    seen: set[int] = set()
    shared = total = 0
    for request in requests:
        total += request.prompt_tokens
        hits = 0
        for block in request.block_ids:
            if block not in seen:
                break
            hits += 1
        shared += min(hits * request.block_size, request.prompt_tokens)
        seen.update(request.block_ids)
    return shared / total if total else 0.0


def _tokens(seed: int, stream: int, count: int, ids: range) -> NDArray[np.int64]:
    with np.errstate(over="ignore"):
        start = np.uint64(_mixed(_mixed(seed & _MASK) ^ (stream & _MASK)))
        x = start + np.arange(1, count + 1, dtype=np.uint64) * _STEP
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x % np.uint64(len(ids))).astype(np.int64) + ids.start


def _mixed(x: int) -> int:
    x = (x + int(_STEP)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
