"""The page of a KV cache, the unit of allocation and of prefix reuse: token slot = page * 64 + position in the page."""

PAGE_SIZE = 64
