"""The pool of blocks, tables of sequences, and the keys of prefixes."""

import pytest

from meshwright.serving.engine.cache.blocks import (
    GONE,
    BlockPool,
    BlockTables,
    CachedSequence,
    Move,
    first_key,
    next_key,
)
from meshwright.spec.errors import ArgumentError


def tables(blocks: int = 8, window: int = 0) -> BlockTables:
    return BlockTables(BlockPool(blocks), 4, window)


def sequence(tokens: list[int], salt: bytes = b"") -> CachedSequence:
    return CachedSequence(number=0, tokens=tokens, limit=100, first=first_key(salt))


def computed(over: BlockTables, tokens: list[int], salt: bytes = b"") -> CachedSequence:
    new = sequence(tokens, salt)
    over.begin(new, *over.prefix(new))
    over.grow(new, len(tokens) - new.computed)
    over.advance(new, len(tokens) - new.computed)
    return new


def test_blocks_without_content_are_given_away_first_and_then_those_free_the_longest() -> None:
    pool = BlockPool(4)
    held = [pool.take() for _ in range(4)]
    for block in held[:3]:
        pool.publish(block, bytes([block]))
    for block in (2, 0, 3, 1):
        pool.release(block)
    assert pool.free_blocks() == [3, 2, 0, 1]
    pool.hold(0)
    assert [pool.take() for _ in range(3)] == [3, 2, 1] and pool.evicted == 2
    assert pool.find(bytes([0])) == 0 and pool.find(bytes([1])) is None
    with pytest.raises(IndexError):
        pool.take()


def test_a_pool_has_a_block() -> None:
    with pytest.raises(ArgumentError, match="blocks=0"):
        BlockPool(0)


def test_a_prefix_is_found_in_whole_blocks_and_leaves_a_token_over() -> None:
    over = tables()
    first = computed(over, list(range(9)))
    assert len(first.table) == 3
    again = computed(over, list(range(8)))
    assert again.cached == 4 and again.table[0] == first.table[0]
    assert over.pool.holders[first.table[0]] == 2
    longer = computed(over, [*range(8), 50])
    assert longer.cached == 8 and longer.table[:2] == first.table[:2]
    assert computed(over, [9, *range(1, 9)]).cached == 0


def test_another_salt_finds_nothing() -> None:
    over = tables()
    computed(over, list(range(9)))
    assert computed(over, list(range(9)), b"other").cached == 0


def test_who_is_not_cacheable_neither_finds_nor_is_found() -> None:
    over = tables()
    hidden = sequence(list(range(9)))
    hidden.cacheable = False
    over.begin(hidden, *over.prefix(hidden))
    over.grow(hidden, 9)
    over.advance(hidden, 9)
    assert computed(over, list(range(9))).cached == 0


def test_released_blocks_are_found_again() -> None:
    over = tables()
    first = computed(over, list(range(9)))
    over.give_back(first)
    assert over.pool.free == 8
    assert computed(over, list(range(9))).cached == 8


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    over = tables()
    parent = computed(over, list(range(6)))
    child = sequence(list(range(6)))
    over.fork(parent, child)
    assert child.table == parent.table and over.pool.free == 6
    old = parent.table[1]
    assert over.needs(parent, 1) == 1
    over.grow(parent, 1)
    assert over.pool.moves == [Move("copy", old, parent.table[1])] and parent.table[1] != old
    assert over.needs(child, 1) == 0 and over.grow(child, 1) is None and child.table[1] == old


def test_a_window_frees_what_nobody_sees() -> None:
    over = tables(window=5)
    windowed = computed(over, list(range(13)))
    # the query at 13 sees 9 to 13: blocks 0 and 1 end before
    assert windowed.table[:2] == [GONE, GONE] and GONE not in windowed.table[2:]
    assert over.pool.free == 8 - 2
    over.give_back(windowed)
    assert over.pool.free == 8


def test_what_is_withdrawn_is_not_found() -> None:
    over = tables()
    withdrawn = computed(over, list(range(9)))
    assert over.withdraw(withdrawn) == withdrawn.table
    assert computed(over, list(range(9))).cached == 0


def test_a_key_covers_all_before_it() -> None:
    key, other = next_key(first_key(b""), [1, 2]), next_key(first_key(b""), [1, 3])
    assert len({key, other, next_key(key, [5, 6]), next_key(other, [5, 6]), first_key(b""), first_key(b"a")}) == 6
    assert next_key(key, [5, 6]) == next_key(key, (5, 6))
    assert next_key(first_key(b""), [2**31]) != next_key(first_key(b""), [0])
