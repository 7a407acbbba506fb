"""The page pool and prefix tree against a plain list of prefixes, and the names of a prompt's pages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from glm_runtime.simulate.tree import Node, PrefixTree, page_names
from glm_runtime.traces import Request, prompts
from tests.simulate.worlds import check

RUN = st.lists(st.integers(0, 2), max_size=9).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(["insert", "match", "lock", "unlock", "evict"]), RUN), max_size=40))
def test_books_and_prefixes(acts: list[tuple[str, tuple[int, ...]]]) -> None:
    tree = PrefixTree(10_000, 64)
    known: set[tuple[int, ...]] = {()}
    locks: list[tuple[Node, tuple[int, ...]]] = []
    for act, run in acts:
        longest = max((prefix for prefix in known if run[: len(prefix)] == prefix), key=len)
        if act == "insert":
            free = tree.free
            tree.take(len(run))
            _, had = tree.insert(run, len(run))
            tree.free += had
            assert had == len(longest) and tree.free == free - (len(run) - had)
            known |= {run[:i] for i in range(len(run) + 1)}
        elif act == "match":
            assert tree.peek(run, len(run)) == len(longest)
            node, count = tree.match(run, len(run))
            assert count == len(longest)
            assert sum(map(len, path(node))) == count
        elif act == "lock":
            node, count = tree.match(run, len(run))
            locks.append((tree.lock(node), run[:count]))
        elif act == "unlock" and locks:
            tree.unlock(locks.pop()[0])
        elif act == "evict":
            before, cached = tree.free, tree.evictable
            tree.evict(len(run))
            assert tree.free - before >= min(len(run), cached)
            known = {prefix for prefix in known if tree.peek(prefix, len(prefix)) == len(prefix)}
            for _, kept in locks:
                assert kept in known
        check(tree)


def path(node: Node) -> list[tuple[int, ...]]:
    found = []
    at: Node | None = node
    while at is not None:
        found.append(at.pages)
        at = at.parent
    return found


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = PrefixTree(12, 64)
    for run in ((1, 1, 1), (2, 2, 2), (3, 3, 3)):
        tree.take(3)
        tree.insert(run, 3)
    tree.match((1, 1, 1), 3)
    tree.take(4)
    assert [tree.peek(run, 3) for run in ((1, 1, 1), (2, 2, 2), (3, 3, 3))] == [3, 0, 3]


@given(st.integers(1, 40), st.sampled_from([4, 8, 16, 64]), st.sampled_from([4, 8, 16]), st.data())
def test_equal_names_are_equal_pages(length: int, block: int, page: int, data: st.DataObject) -> None:
    """Names agree exactly as far as the regenerated tokens do, where ids are chained as traces' are."""
    count = -(-length // block)
    shared = data.draw(st.integers(0, count))
    lines = [
        Request(0.0, length, 1, tuple(range(shared)) + tuple(1000 * (n + 1) + i for i in range(shared, count)), block)
        for n in range(2)
    ]
    one, other = prompts(lines, 1 << 30)
    names = [page_names(line.block_ids, block, length, page, -1 - n) for n, line in enumerate(lines)]
    assert [len(name) for name in names] == [length // page] * 2
    for i in range(length // page):
        same = one[: (i + 1) * page] == other[: (i + 1) * page]
        assert (names[0][: i + 1] == names[1][: i + 1]) == same
