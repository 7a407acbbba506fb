"""Sizes of what the two caches hold: tokens a page, values and bytes a row (drawn in `layouts.py`)."""

PAGE_SIZE = 64  # tokens; the unit of allocation and of prefix reuse: token slot = page * 64 + position in the page

NOPE_DIM = 512
ROPE_DIM = 64
LATENT_DIM = NOPE_DIM + ROPE_DIM
TILE = 128
SCALE_AT = NOPE_DIM
ROPE_AT = SCALE_AT + 4 * (NOPE_DIM // TILE)
PACKED_BYTES = ROPE_AT + 2 * ROPE_DIM

INDEX_DIM = 128
INDEX_SCALE_AT = PAGE_SIZE * INDEX_DIM
INDEX_PAGE_BYTES = INDEX_SCALE_AT + 4 * PAGE_SIZE


def step_rows(rows: int, max_requests: int, context_rows: int, pool_tokens: int) -> int:
    """`rows` of a workspace, cut to what a step can fill: contexts of all requests, or every slot of the pool.

    NOTE: contexts that share a prefix count it once each, so a step may hold more rows than the pool; it then
    takes one request group more. A single context always fits the pool.
    """
    return max(1, min(rows, max_requests * context_rows, pool_tokens))
