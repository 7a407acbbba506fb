"""One request in the simulator: its counters, its pages, and what `TreeKV` reads of SGLang's Req."""

from __future__ import annotations

from glm_runtime.simulate.tree import Node, Pages, PrefixTree, page_names
from glm_runtime.traces import Request as Line


class _Length:
    """As long as a token list of so many; `TreeKV` only asks for the length."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens = 0

    def __len__(self) -> int:
        return self.tokens


class Req:
    """A request on one replica.

    `prompt`, `output`: tokens. `known`: output tokens whose result has come. `computed`: tokens with KV.
    `held`: pages that it has, `protected` of them in the tree under its lock.
    """

    __slots__ = (
        "_ended",
        "_names",
        "_owner",
        "arrival",
        "base",
        "computed",
        "first_at",
        "full_untruncated_fill_ids",
        "held",
        "holds_kv",
        "index",
        "joined",
        "known",
        "last_node",
        "last_step",
        "line",
        "lock",
        "output",
        "preempted",
        "prefix_len",
        "prompt",
        "protected",
    )

    def __init__(self, index: int, line: Line, page: int, output: int) -> None:
        self.index = index
        self.line = line
        self.arrival = line.arrival_s
        self.prompt = line.prompt_tokens
        self.output = output
        self._owner = -1 - index
        self._names = page_names(line.block_ids, line.block_size, line.prompt_tokens, page, self._owner)
        self.full_untruncated_fill_ids = _Length()
        self.known = 0
        self.computed = 0
        self.prefix_len = 0
        self.held = 0
        self.protected = 0
        self.holds_kv = False
        self.last_node: Node | None = None
        self.lock: Node | None = None
        self.first_at = -1.0
        self.last_step = 0
        self.joined = self.base = 0  # stock scheduling: clock and outputs when it began to decode
        self.preempted = 0
        self._ended = False

    @property
    def kv(self) -> Req:
        """SGLang keeps these facts in a record of their own."""
        return self

    def finished(self) -> bool:
        """Whether its last token has come."""
        return self._ended

    def pages(self, count: int) -> Pages:
        """Names of the first `count` pages of prompt and output; pages with output are its own."""
        names = self._names
        return names if count <= len(names) else names + (self._owner,) * (count - len(names))

    def init_next_round_input(self, tree: PrefixTree) -> None:
        """Look up the longest cached prefix: whole pages, at most all tokens but one."""
        tokens = self.prompt + self.known
        self.full_untruncated_fill_ids.tokens = tokens
        most = (tokens - 1) // tree.page
        self.last_node, count = tree.match(self.pages(most), most)
        self.prefix_len = count * tree.page
        if not self.holds_kv:
            self.protected = self.held = count

    def start(self, tree: PrefixTree) -> None:
        """Admitted with the prefix that was looked up, which its `lock` keeps."""
        self.holds_kv = True
        self.computed = self.prefix_len

    def reach(self, tree: PrefixTree, tokens: int) -> None:
        """Have pages for so many tokens."""
        need = -(-tokens // tree.page) - self.held
        if need > 0:
            tree.take(need)
            self.held += need

    def checkpoint(self, tree: PrefixTree, tokens: int) -> None:
        """Put the whole pages of the first `tokens` into the tree; pages that were there already are given back."""
        count = tokens // tree.page
        if count <= self.protected:
            return
        node, had = tree.insert(self.pages(count), count)
        tree.free += max(0, had - self.protected)
        tree.lock(node)
        assert self.lock is not None
        tree.unlock(self.lock)
        self.lock = node
        self.protected = count

    def release(self, tree: PrefixTree) -> None:
        """Give everything back but what the tree has."""
        tree.free += self.held - self.protected
        assert self.lock is not None
        tree.unlock(self.lock)
        self.lock = None
        self.holds_kv = False
        self.held = self.protected = self.computed = 0

    def end(self, tree: PrefixTree) -> None:
        """Its last token has come."""
        self._ended = True
        self.checkpoint(tree, self.computed)
        prompt = self.prompt // tree.page
        if 0 < prompt < self.protected:  # SGLang cuts the leaf there, so that the output can be evicted first
            tree.insert(self.pages(prompt), prompt)
        self.release(tree)


class Rows:
    """SGLang's pool of request rows: one for each that holds KV."""

    def __init__(self, rows: int) -> None:
        self.free = rows

    def available_size(self) -> int:
        """Rows left."""
        return self.free
