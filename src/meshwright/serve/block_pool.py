"""Blocks of the cache of keys and values: who holds which, and which may be given away.

A block has room for the keys and values of some positions. Several sequences may hold one. A block that nobody holds is
free; it keeps its content, and is found again by the key of that content until it is given away. Free blocks without a
key are given away first, then those that have been free the longest. Each operation takes the same time whatever the
number of blocks: free blocks are a doubly linked list.
"""

from array import array

from meshwright.serve.host_tier import HostTier, Move
from meshwright.spec.errors import ArgumentError


class BlockPool:
    """Blocks 0 to `size` - 1, all free and without content."""

    def __init__(self, size: int, host: HostTier | None = None) -> None:
        """`host`: where the content of blocks goes that are given away. ArgumentError: there is not one block."""
        if size < 1:
            raise ArgumentError(f"blocks={size} must be at least 1")
        self.size = self.free = size
        self.host = host
        self.moves: list[Move] = []
        """What is to be moved before a step computes, in this order."""
        self.holders = [0] * size
        """How many hold each block."""
        self._end = size  # of the list: a node that is no block, before the first and behind the last
        self._next: array[int] = array("q", [*range(1, size + 1), 0])
        self._before: array[int] = array("q", [size, *range(size)])
        self._keys: list[bytes | None] = [None] * size
        self._found: dict[bytes, int] = {}
        self.evicted = 0
        """Blocks whose content was given up."""

    def take(self) -> int:
        """A free block for new content. IndexError where none is free."""
        block = self._next[self._end]
        if block == self._end:
            raise IndexError("no block is free")
        self._unlink(block)
        self.holders[block] = 1
        key = self._keys[block]
        if key is not None:
            self.evicted += 1
            self.withdraw(block)
            slot = self.host.save(key) if self.host is not None else None
            if slot is not None:
                self.moves.append(Move("save", block, slot))
        return block

    def hold(self, block: int) -> None:
        """One more holds a block; it may have been free."""
        if not self.holders[block]:
            self._unlink(block)
        self.holders[block] += 1

    def release(self, block: int) -> None:
        """One fewer holds it."""
        left = self.holders[block] = self.holders[block] - 1
        assert left >= 0, f"block {block} is free already"
        if not left:
            self._link(block, before=self._next[self._end] if self._keys[block] is None else self._end)

    def publish(self, block: int, key: bytes) -> None:
        """Let a held block be found by the key of its content, unless another one is found by it already."""
        if self._found.setdefault(key, block) == block:
            self._keys[block] = key
            if self.host is not None:
                self.host.drop(key)

    def find(self, key: bytes) -> int | None:
        """The block that has the content of a key; it may be free."""
        return self._found.get(key)

    def withdraw(self, block: int) -> None:
        """Let a held block be found no longer."""
        key = self._keys[block]
        if key is not None:
            del self._found[key]
            self._keys[block] = None

    def key_of(self, block: int) -> bytes | None:
        """What a block is found by."""
        return self._keys[block]

    def free_blocks(self) -> list[int]:
        """In the order in which they are given away. Takes time for each."""
        found, block = [], self._next[self._end]
        while block != self._end:
            found.append(block)
            block = self._next[block]
        return found

    def _unlink(self, block: int) -> None:
        before, after = self._before[block], self._next[block]
        self._next[before], self._before[after] = after, before
        self.free -= 1

    def _link(self, block: int, before: int) -> None:
        ahead = self._before[before]
        self._next[ahead], self._before[before] = block, block
        self._before[block], self._next[block] = ahead, before
        self.free += 1
