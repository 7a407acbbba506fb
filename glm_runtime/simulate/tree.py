"""SGLang's page pool and radix cache, in counts of pages: what `TreeKV` and the stock scheduler ask of them.

    root ─ [p p p] ─┬─ [p p]          a node is a run of pages, named by their content
                    └─ [p p p p]      refs: requests whose prefix ends here or below; 0 at a leaf: may be evicted

    free pages | unlocked nodes (evictable) | locked nodes | private pages of requests

Matching splits a node that is met half-way. Eviction takes whole leaves, least recently used first. Source: SGLang
0.5.23 srt/mem_cache/unified_radix_cache.py and unified_cache/.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Pages = tuple[int, ...]


class Node:
    """A run of pages below `parent`. `used`: clock of the last match or insertion."""

    __slots__ = ("children", "pages", "parent", "refs", "used")

    def __init__(self, pages: Pages, parent: Node | None, used: int) -> None:
        self.pages = pages
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.refs = 0
        self.used = used


class PrefixTree:
    """Pool of `pages` pages of `page` tokens, and the tree over those that are cached.

    It answers both as SGLang's allocator (`available_size`) and as its tree (`evictable_size`, `lock`, `unlock`).
    """

    def __init__(self, pages: int, page: int) -> None:
        self.page = page
        self.pages = pages
        self.free = pages
        self.root = Node((), None, 0)
        self.root.refs = 1
        self.evictable = 0
        self.evicted = 0
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # may hold stale entries; checked when popped
        self._entries = 0

    # Sizes in tokens, as SGLang tells them ---------------------------------------------------------------------------

    def available_size(self) -> int:
        """Tokens in free pages."""
        return self.free * self.page

    def evictable_size(self) -> int:
        """Tokens in unlocked nodes."""
        return self.evictable * self.page

    @property
    def used(self) -> int:
        """Pages that requests hold, the locked part of the tree among them."""
        return self.pages - self.free - self.evictable

    # Pages -----------------------------------------------------------------------------------------------------------

    def take(self, pages: int) -> None:
        """Take private pages out of the pool, evicting what is needed. RuntimeError where nothing is left to evict."""
        if pages > self.free:
            self.evict(pages - self.free)
            if pages > self.free:
                raise RuntimeError(f"{pages} pages are taken, {self.free} are free and nothing is left to evict")
        self.free -= pages

    def ensure(self, tokens: int) -> None:
        """Evict until so many tokens are free, as far as that goes.

        NOTE: SGLang does so before each allocation with more than it takes: a page more for each prompt, a page for
        each decoding request.
        """
        short = -(-tokens // self.page) - self.free
        if short > 0:
            self.evict(short)

    def evict(self, pages: int) -> None:
        """Free at least so many pages from the least recently used leaves, as far as there are any."""
        leaves = self._leaves
        goal = self.free + pages
        while self.free < goal and leaves:
            used, _, node = heapq.heappop(leaves)
            if node.used != used or node.refs or node.children or node.parent is None:
                continue
            count = len(node.pages)
            self.free += count
            self.evictable -= count
            self.evicted += count
            parent = node.parent
            del parent.children[node.pages[0]]
            node.parent = None
            if not parent.refs and not parent.children:
                self._offer(parent)

    def _offer(self, node: Node) -> None:
        """A leaf that could be evicted."""
        self._entries += 1
        heapq.heappush(self._leaves, (node.used, self._entries, node))

    # Prefixes --------------------------------------------------------------------------------------------------------

    def match(self, pages: Pages, most: int) -> tuple[Node, int]:
        """(node, pages) of the longest cached prefix of the first `most` pages; a node met half-way is split."""
        node, count = self._walk(pages, most)
        self._touch(node)
        return node, count

    def peek(self, pages: Pages, most: int) -> int:
        """Pages of the longest cached prefix; nothing is touched or split."""
        return self._descend(pages, most)[1]

    def _walk(self, pages: Pages, most: int) -> tuple[Node, int]:
        node, count, same = self._descend(pages, most)
        return (self._split(node.children[pages[count - same]], same) if same else node), count

    def _descend(self, pages: Pages, most: int) -> tuple[Node, int, int]:
        """The last node met whole, pages met in all, and how many of them belong to a child met half-way."""
        node, count = self.root, 0
        while count < most:
            child = node.children.get(pages[count])
            if child is None:
                break
            same = _common(child.pages, pages, count, most)
            count += same
            if same < len(child.pages):
                return node, count, same
            node = child
        return node, count, 0

    def _touch(self, node: Node) -> None:
        self._clock += 1
        now = self._clock
        at: Node | None = node
        while at is not None:
            at.used = now
            at = at.parent
        if not node.refs and not node.children:
            self._offer(node)

    def _split(self, child: Node, at: int) -> Node:
        """Cut a node in two; the upper part is returned."""
        parent = child.parent
        assert parent is not None
        upper = Node(child.pages[:at], parent, child.used)
        upper.refs = child.refs
        upper.children[child.pages[at]] = child
        parent.children[upper.pages[0]] = upper
        child.parent = upper
        child.pages = child.pages[at:]
        if not child.refs and not child.children:
            self._clock += 1
            child.used = self._clock  # SGLang counts the split as a use of the lower part
            self._offer(child)
        return upper

    def insert(self, pages: Pages, count: int) -> tuple[Node, int]:
        """Put the first `count` pages into the tree; (last node, pages that were there already).

        The caller's private pages become the tree's; it gives back those that were there.
        """
        node, had = self._walk(pages, count)
        if had < count:
            fresh = Node(pages[had:count], node, self._clock)
            node.children[fresh.pages[0]] = fresh
            self.evictable += count - had
            node = fresh
        self._touch(node)
        return node, had

    def lock(self, node: Node) -> Node:
        """Keep a node and all above it; the result is for `unlock`."""
        at: Node | None = node
        while at is not None:
            if not at.refs:
                self.evictable -= len(at.pages)
            at.refs += 1
            at = at.parent
        return node

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        at: Node | None = node
        while at is not None:
            at.refs -= 1
            if not at.refs:
                self.evictable += len(at.pages)
                if not at.children:
                    self._offer(at)
            at = at.parent


def _common(run: Pages, pages: Pages, start: int, most: int) -> int:
    """Length of the common start of `run` and pages[start:most]."""
    size = min(len(run), most - start)
    if run[:size] == pages[start : start + size]:
        return size
    low, high = 0, size  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if run[low:middle] == pages[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low


def page_names(block_ids: Sequence[int], block_size: int, tokens: int, page: int, own: int) -> Pages:
    """Names of a prompt's whole pages: by the block in which each ends, or `own` past the named blocks.

    A block's id names everything before it (see `glm_runtime.traces.Request`), and a page's place in the tree names
    its number, so that the id of the block it ends in is enough.
    """
    count = tokens // page
    if not block_ids:
        return (own,) * count
    known = len(block_ids)
    if block_size == page:
        return tuple(block_ids[:count]) + (own,) * (count - known)
    ends = ((page * i + page - 1) // block_size for i in range(count))
    return tuple(block_ids[end] if end < known else own for end in ends)
