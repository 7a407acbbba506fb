"""The KV port over SGLang's page allocator and prefix tree. Duck-typed: it imports nothing of SGLang.

    pool   | free pages | evictable (tree, unlocked) | locked (tree) | private rows |
           '--------- room: what a step may take ---'
    step   room -= what this step has promised; SGLang allocates for real when the plan is lowered

The ledger plans a whole step before anything is allocated, so every promise is counted here until then. `begin_step`
forgets the promises of the step before, which are allocations by now. A probe locks its cached prefix: what the plan
starts from cannot be evicted to make room for the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policies.ledger.kv import NO_ROOM
from policies.ledger.request import Request


class TreeKV:
    """See KVPort. `request.handle` is SGLang's Req.

    Args:
        allocator: SGLang's token-to-KV allocator (`available_size()` in tokens).
        tree: prefix tree (`evictable_size()`, `lock(node)`, `unlock(lock)`).
        rows: req-to-token pool (`available_size()` in requests).
        capacity: tokens in the pool. page_size: tokens a page.
        watermark: fraction of the pool kept free while something runs.
        release: gives back the KV of a request that is preempted or failed by the ledger.
    """

    def __init__(
        self,
        allocator: Any,
        tree: Any,
        rows: Any,
        capacity: int,
        page_size: int,
        watermark: float,
        release: Callable[[Any], None],
    ) -> None:
        self._allocator = allocator
        self._tree = tree
        self._rows = rows
        self._capacity = capacity // page_size * page_size
        self._page = page_size
        self._spare = int(watermark * (capacity // page_size)) * page_size
        self._release = release
        self._promised = 0
        self._promised_rows = 0
        self._probe: Any = None
        self._room: int | None = None
        self.held: dict[Request, int] = {}

    @property
    def capacity(self) -> int:
        """Tokens that one request could hold alone."""
        return self._capacity

    def begin_step(self) -> None:
        """Promises of the last step have become allocations."""
        self._promised = self._promised_rows = 0
        self._room = None

    def room(self) -> int:
        """Tokens that the step being planned may still take."""
        if self._room is None:
            self._room = self._allocator.available_size() + self._tree.evictable_size()
        return self._room - self._promised

    def _end(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page

    def lookup(self, request: Request) -> int:
        """Match the request's tokens in the tree, lock the match, return its length in tokens."""
        req = request.handle
        req.init_next_round_input(self._tree)
        # NOTE: SGLang may have changed the tokens while the request waited (a refused grammar leaves a stub of one).
        request.tokens = len(req.full_untruncated_fill_ids)
        self._probe = self._tree.lock(req.last_node)
        self._room = None
        return int(req.prefix_len)

    def abandon(self, request: Request) -> None:
        """Unlock the match of a request that is not admitted."""
        self._tree.unlock(self._probe)
        self._probe = None
        self._room = None

    def admit(self, request: Request, hit: int, end: int, lookahead: int, whole: int, spare: bool) -> int:
        """See KVPort. The match's lock passes to the request."""
        # A session's request may start inside a page that it holds already.
        start = self._end(hit)
        need = self._end(end + lookahead) - start
        most = max(need, self._end(whole) - start)
        req = request.handle
        if most > self.room() - (self._spare if spare else 0):
            return NO_ROOM
        if not req.kv.holds_kv:
            if self._rows.available_size() - self._promised_rows < 1:
                return NO_ROOM
            self._promised_rows += 1
        self._promised += need
        if not req.kv.holds_kv:
            req.lock = self._probe
        else:
            self._tree.unlock(self._probe)
        self._probe = None
        self.held[request] = start + need
        return start + need

    def grow(self, request: Request, end: int, lookahead: int) -> int:
        """See KVPort."""
        held = self.held[request]
        more = self._end(end + lookahead) - held
        if more > 0:
            if more > self.room():
                return NO_ROOM
            self._promised += more
            held += more
            self.held[request] = held
        return held

    def free(self, request: Request) -> None:
        """Forget a request; release its KV unless SGLang has done so (it finished or was aborted there)."""
        self.held.pop(request, None)
        req = request.handle
        if req.kv.holds_kv and not req.finished():
            self._release(req)
        self._room = None
