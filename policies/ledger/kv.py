"""What the ledger asks of a KV pool, and the smallest pool that answers: pages counted, no prefix cache.

The ledger never sees a page. It asks for room up to a token position and is told how far that lasts.
"""

from __future__ import annotations

from typing import Protocol

from policies.ledger.request import Request

NO_ROOM = -1


class KVPort(Protocol):
    """A KV pool as the ledger knows it. All lengths are token counts from the request's start.

    The answer of `admit` and `grow` is how far the request may grow by one token a step before the port must be asked
    again (at least the `end` asked for), or NO_ROOM, and then nothing has changed. Asking twice for the same `end` is
    harmless.
    """

    @property
    def capacity(self) -> int:
        """Tokens that one request could hold if it had the pool to itself."""
        ...

    def lookup(self, request: Request) -> int:
        """Cached tokens the waiting request may start from: at most its tokens - 1. The port may lock them."""
        ...

    def abandon(self, request: Request) -> None:
        """The request that was just looked up is not admitted in this step."""
        ...

    def admit(self, request: Request, hit: int, end: int, lookahead: int, whole: int, spare: bool) -> int:
        """Take the hit and room for tokens [hit, end) and `lookahead` slots more.

        `whole` > 0: refuse unless that many tokens would fit now, though only the chunk's room is taken.
        `spare`: keep the pool's watermark free.
        """
        ...

    def grow(self, request: Request, end: int, lookahead: int) -> int:
        """Room for a running request up to token `end` and `lookahead` slots more."""
        ...

    def free(self, request: Request) -> None:
        """Give back everything that an admitted request holds."""
        ...


class PagePool:
    """`pages` pages of `page_size` tokens, no prefix cache. `watermark` is a fraction of the pages."""

    def __init__(self, pages: int, page_size: int, watermark: float = 0.0, max_model_len: int | None = None) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"pages ({pages}) and page_size ({page_size}) must be at least 1")
        self.pages = pages
        self.page_size = page_size
        self.max_model_len = max_model_len
        self.free_pages = pages
        self.held: dict[Request, int] = {}
        self._spare = int(watermark * pages)

    @property
    def capacity(self) -> int:
        """Tokens in the whole pool."""
        return self.pages * self.page_size

    def lookup(self, request: Request) -> int:
        """No prefix cache: every request starts from nothing."""
        return 0

    def abandon(self, request: Request) -> None:
        """Nothing was locked."""

    def _pages(self, tokens: int) -> int:
        if self.max_model_len is not None and tokens > self.max_model_len:
            tokens = self.max_model_len
        return -(-tokens // self.page_size)

    def admit(self, request: Request, hit: int, end: int, lookahead: int, whole: int, spare: bool) -> int:
        """See KVPort."""
        need = self._pages(end + lookahead)
        if max(need, self._pages(whole)) > self.free_pages - (self._spare if spare else 0):
            return NO_ROOM
        self.free_pages -= need
        self.held[request] = need
        return max(end, need * self.page_size - lookahead)

    def grow(self, request: Request, end: int, lookahead: int) -> int:
        """See KVPort."""
        held = self.held[request]
        more = self._pages(end + lookahead) - held
        if more > 0:
            if more > self.free_pages:
                return NO_ROOM
            self.free_pages -= more
            held += more
            self.held[request] = held
        return max(end, held * self.page_size - lookahead)

    def free(self, request: Request) -> None:
        """See KVPort."""
        self.free_pages += self.held.pop(request)
