"""One query row over more keys than the scratch holds scores for: slices of keys and a running top-k.

    line   | kept scores, at most topk | scores of this slice |          ids | positions of the kept scores |
              ^ all before the slice      ^ ascending

    after each slice: the topk best of the line move to its front, with their positions

The kept stand before the slice and in ascending order, so ties still go to the lowest position, and the ids are those
of an unsplit row.
"""

from __future__ import annotations

from numba import njit

from attention.kernels.score import KEYS, SMALL, load_page, scale_keys, score
from attention.kernels.topk import collect, order
from attention.kernels.vector import get_i32, put_i32
from attention.sizes import INDEX_SCALE_AT


def least_bytes(topk: int) -> int:
    """Bytes that a row needs at the least: kept scores and ids, and one page."""
    return 4 * (_rounded(topk) + _rounded(topk) + 2 * KEYS)


def _rounded(count: int) -> int:
    return (count + KEYS - 1) // KEYS * KEYS


@njit(nogil=True)
def _keep(line: int, count: int, fresh: int, first: int, topk: int, ids: int, spare: int) -> None:
    """Move the ``topk`` best of ``count`` kept and ``fresh`` new scores to the front; spends ``spare`` int32 [topk]."""
    collect(line, count + fresh, topk, spare)
    for j in range(topk):
        i = get_i32(spare + 4 * j)
        put_i32(line + 4 * j, get_i32(line + 4 * i))
        put_i32(ids + 4 * j, get_i32(ids + 4 * i) if i < count else first + i - count)
    order(line, (topk + KEYS - 1) // KEYS)


@njit(nogil=True)
def select_in_slices(
    q: int,
    heads: int,
    dim: int,
    words: int,
    pairs: bool,
    gains: int,
    seen: int,
    table: int,
    cache: int,
    pages: int,
    page_bytes: int,
    mode: int,
    topk: int,
    widened: int,
    packed: int,
    line: int,
    room: int,
    out: int,
) -> bool:
    """Ids int32 [topk] of one row that sees ``seen`` > topk keys, in ``room`` bytes at ``line``.

    False when the page table names a page outside the cache.
    """
    kept_bytes = 4 * ((topk + KEYS - 1) // KEYS * KEYS)
    ids = line
    line += kept_bytes
    step = (room - 2 * kept_bytes) // (4 * KEYS) - 1
    count = 0
    for start in range(0, (seen + KEYS - 1) // KEYS, step):
        first = KEYS * start
        fresh = min(KEYS * step, seen - first)
        for page in range(start, start + (fresh + KEYS - 1) // KEYS):
            physical = get_i32(table + 4 * page)
            if physical < 0 or physical >= pages:
                return False
            source = cache + physical * page_bytes
            load_page(source, page_bytes, mode, dim, words, widened, packed)
            place = line + 4 * (count + KEYS * (page - start))
            score(q, heads, words, pairs, packed, gains, place, source, 0)
            if mode == SMALL:
                scale_keys(place, source + INDEX_SCALE_AT)
        if count + fresh > topk:
            _keep(line, count, fresh, first, topk, ids, out)
            count = topk
        else:
            for j in range(fresh):
                put_i32(ids + 4 * (count + j), first + j)
            count += fresh
    for j in range(topk):
        put_i32(out + 4 * j, get_i32(ids + 4 * j))
    return True
