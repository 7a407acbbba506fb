"""A KV pool with vLLM's prefix cache: full blocks named by their content and everything before it.

    request   [block 0 | block 1 | block 2 | tail..]      block name = (name of the block before, its own content)
    free      oldest first [ . . . . ] newest last        a free block keeps its name, and can be hit, until it is taken

For tests, golden traces and the simulator; the server's pool is SGLang's. Source: vLLM 0.33's block pool as seen in its
traces: a block is named as soon as its last row is scheduled, a finished request's blocks are freed from the tail
so that the start of a prompt lives longest, and equal blocks are not merged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from policies.ledger.kv import NO_ROOM
from policies.ledger.request import Request

BlockKey = Callable[[Request, int], Hashable]


class TokenKeys:
    """Content names from token ids: `ids(request, start, end)` gives the tokens of one block."""

    def __init__(self, block_size: int, ids: Callable[[Request, int, int], Sequence[int]]) -> None:
        self._block_size = block_size
        self._ids = ids

    def __call__(self, request: Request, block: int) -> Hashable:
        start = block * self._block_size
        return tuple(self._ids(request, start, start + self._block_size))


class BlockPool:
    """`blocks` usable blocks of `block_size` tokens. A KVPort.

    `key(request, i)` names the content of the request's i-th block alone; None turns the prefix cache off.
    `watermark` is a fraction of `blocks`; `max_model_len` bounds the room kept for look-ahead slots.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        key: BlockKey | None = None,
        watermark: float = 0.0,
        max_model_len: int | None = None,
    ) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"blocks ({blocks}) and block_size ({block_size}) must be at least 1")
        self.blocks = blocks
        self.block_size = block_size
        self._key = key
        self._spare = int(watermark * blocks)
        self._max_model_len = max_model_len
        self._free: dict[int, None] = dict.fromkeys(range(blocks))  # ordered, oldest first
        self._users = [0] * blocks
        self._name: list[int | None] = [None] * blocks
        self._named: dict[int, dict[int, None]] = {}  # name -> blocks with that content
        self._names: dict[tuple[int, Hashable], int] = {}  # (name before, content) -> name
        self._chains: dict[Request, list[int]] = {}  # names of a request's full blocks
        self._table: dict[Request, list[int]] = {}
        self._cached: dict[Request, int] = {}  # blocks of a running request that have their name

    @property
    def capacity(self) -> int:
        """Tokens in the whole pool."""
        return self.blocks * self.block_size

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody uses; cached ones among them."""
        return len(self._free)

    def lookup(self, request: Request) -> int:
        """Tokens of the longest cached chain of whole blocks, the last token of the request never among them."""
        return len(self._hits(request)) * self.block_size

    def _hits(self, request: Request) -> list[int]:
        if self._key is None:
            return []
        found: list[int] = []
        for name in self._chain(request, (request.num_tokens - 1) // self.block_size):
            blocks = self._named.get(name)
            if not blocks:
                break
            found.append(next(iter(blocks)))
        return found

    def _chain(self, request: Request, count: int) -> Sequence[int]:
        assert self._key is not None
        chain = self._chains.setdefault(request, [])
        while len(chain) < count:
            link = (chain[-1] if chain else -1, self._key(request, len(chain)))
            chain.append(self._names.setdefault(link, len(self._names)))
        return chain[:count]

    def abandon(self, request: Request) -> None:
        """Nothing was locked."""

    def _blocks(self, tokens: int) -> int:
        if self._max_model_len is not None and tokens > self._max_model_len:
            tokens = self._max_model_len
        return -(-tokens // self.block_size)

    def admit(self, request: Request, hit: int, end: int, lookahead: int, whole: int, spare: bool) -> int:
        """See KVPort. Hit blocks that nobody uses come out of the free ones, so they count as needed."""
        hits = self._hits(request)[: hit // self.block_size]
        idle = sum(not self._users[block] for block in hits)
        need = self._blocks(end + lookahead) - len(hits)
        if max(need, self._blocks(whole) - len(hits)) + idle > len(self._free) - (self._spare if spare else 0):
            return NO_ROOM
        for block in hits:
            if not self._users[block]:
                del self._free[block]
            self._users[block] += 1
        self._table[request] = hits
        self._cached[request] = len(hits)
        self._take(request, need)
        return self._store(request, end, lookahead)

    def grow(self, request: Request, end: int, lookahead: int) -> int:
        """See KVPort."""
        need = self._blocks(end + lookahead) - len(self._table[request])
        if need > len(self._free):
            return NO_ROOM
        self._take(request, need)
        return self._store(request, end, lookahead)

    def _take(self, request: Request, count: int) -> None:
        for _ in range(count):
            block = next(iter(self._free))
            del self._free[block]
            self._forget(block)
            self._users[block] = 1
            self._table[request].append(block)

    def _forget(self, block: int) -> None:
        name = self._name[block]
        if name is not None:
            self._name[block] = None
            del self._named[name][block]
            if not self._named[name]:
                del self._named[name]

    def _store(self, request: Request, end: int, lookahead: int) -> int:
        """Name the blocks that are full of known tokens; say when to be asked again."""
        size = self.block_size
        room = len(self._table[request]) * size - lookahead
        if self._key is None:
            return max(end, room)
        full = min(end, request.num_tokens) // size
        cached = self._cached[request]
        if full > cached:
            table, chain = self._table[request], self._chain(request, full)
            for i in range(cached, full):
                self._name[table[i]] = chain[i]
                self._named.setdefault(chain[i], {})[table[i]] = None
            self._cached[request] = full
        if full < end // size or end % size == 0:
            return end
        return max(end, min(room, end - end % size + size - 1))

    def free(self, request: Request) -> None:
        """See KVPort. Tail first, so that the start of the prompt stays cached longest."""
        for block in reversed(self._table.pop(request)):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
        del self._cached[request]

    def forget(self, request: Request) -> None:
        """Drop what is remembered of an ended request's content names (its cached blocks stay)."""
        self._chains.pop(request, None)
