"""The block pool with prefix caching: hits, eviction order, books."""

from __future__ import annotations

from policies.ledger import NO_ROOM, Request
from policies.ledger.blocks import BlockPool, TokenKeys


def ids(request: Request, start: int, end: int) -> list[int]:
    """The same tokens for everybody, but for requests whose id starts with x."""
    return [(1000 if request.id.startswith("x") else 0) + i for i in range(start, end)]


def pool(blocks: int, caching: bool = True, watermark: float = 0.0) -> BlockPool:
    return BlockPool(blocks, 4, TokenKeys(4, ids) if caching else None, watermark)


def run_through(blocks: BlockPool, request: Request) -> None:
    """Admit the whole prompt, then end."""
    hit = blocks.lookup(request)
    assert blocks.admit(request, hit, request.num_tokens, 0, 0, False) != NO_ROOM
    blocks.free(request)


def test_hits_are_whole_blocks_and_leave_a_token() -> None:
    blocks = pool(20)
    run_through(blocks, Request("a", 12))
    assert [blocks.lookup(Request("b", length)) for length in (4, 5, 12, 13, 14, 40)] == [0, 4, 8, 12, 12, 12]
    assert blocks.lookup(Request("x", 13)) == 0
    assert pool(20, caching=False).lookup(Request("b", 13)) == 0


def test_a_block_can_be_hit_in_the_step_that_fills_it() -> None:
    blocks = pool(20)
    first, second = Request("a", 12), Request("b", 12)
    assert blocks.admit(first, 0, 8, 0, 0, False) == 8
    assert blocks.lookup(second) == 8
    assert blocks.admit(second, 8, 12, 0, 0, True) == 12
    assert blocks.free_blocks == 20 - 3
    blocks.free(first)
    assert blocks.free_blocks == 20 - 3
    blocks.free(second)
    assert blocks.free_blocks == 20


def test_the_tail_of_a_prompt_is_evicted_first() -> None:
    blocks = pool(4)
    run_through(blocks, Request("a", 12))
    assert blocks.admit(Request("x1", 8), 0, 8, 0, 0, False) != NO_ROOM  # the unused block, then a's last
    assert blocks.lookup(Request("b", 13)) == 8


def test_idle_hits_count_as_needed() -> None:
    """Cached blocks that nobody uses are free ones: taking them leaves less for the rest."""
    blocks = pool(4)
    run_through(blocks, Request("a", 12))
    holder = Request("x1", 4)
    assert blocks.admit(holder, 0, 4, 0, 0, False) != NO_ROOM
    late = Request("b", 17)
    assert blocks.lookup(late) == 12
    assert blocks.admit(late, 12, 17, 0, 0, True) == NO_ROOM
    assert (blocks.free_blocks, blocks.lookup(late)) == (3, 12)
    assert blocks.admit(late, 12, 13, 0, 0, True) == NO_ROOM
    blocks.free(holder)
    assert blocks.admit(late, 12, 13, 0, 0, True) != NO_ROOM


def test_watermark_and_whole_prompt() -> None:
    blocks = pool(10, watermark=0.2)
    assert blocks.admit(Request("x1", 36), 0, 4, 0, 36, True) == NO_ROOM
    assert blocks.admit(Request("x1", 36), 0, 36, 0, 36, False) != NO_ROOM


def test_when_to_ask_again() -> None:
    """With names the block's last row must be told; without, only its end."""
    request, blocks = Request("a", 5), pool(10)
    assert blocks.admit(request, 0, 5, 0, 0, False) == 7
    request.tokens = 8
    assert blocks.grow(request, 8, 0) == 8
    plain = pool(10, caching=False)
    assert plain.admit(Request("b", 5), 0, 5, 0, 0, False) == 8
    assert plain.admit(Request("c", 5), 0, 5, 2, 0, False) == 6
