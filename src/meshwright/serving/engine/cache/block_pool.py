"""Blocks of the key-value cache: who holds each, and which can be given away.

A block holds the keys and values of some positions, and several sequences may hold it. A block that nobody holds is
free. It keeps its content, and is found by the content's key, until it is given away. Free blocks without a key go
first, then those that have been free the longest. All operations take constant time: free blocks are a doubly linked
list.
"""

from array import array

from meshwright.serving.engine.cache.host_tier import HostTier, Move
from meshwright.spec.errors import ArgumentError


class BlockPool:
    """Blocks 0 to `size` - 1, all free and without content at first."""

    def __init__(self, size: int, host: HostTier | None = None) -> None:
        """Create the pool.

        `host` takes the content of blocks that are given away. Raises ArgumentError without a block.
        """
        if size < 1:
            raise ArgumentError(f"blocks={size} must be at least 1")
        self.size = self.free = size
        self.host = host
        self.moves: list[Move] = []
        """Moves to carry out before the next step computes, in this order."""
        self.holders = [0] * size
        """Number of holders of each block."""
        self._end = size  # the list's sentinel: a node that is no block, before the first and after the last
        self._next: array[int] = array("q", [*range(1, size + 1), 0])
        self._before: array[int] = array("q", [size, *range(size)])
        self._keys: list[bytes | None] = [None] * size
        self._block_of_key: dict[bytes, int] = {}
        self.evicted = 0
        """Blocks whose content was given up."""

    def take(self) -> int:
        """Return a free block for new content. Raises IndexError when none is free."""
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
        """Add a holder to a block, which may have been free."""
        if not self.holders[block]:
            self._unlink(block)
        self.holders[block] += 1

    def release(self, block: int) -> None:
        """Remove a holder from a block."""
        left = self.holders[block] = self.holders[block] - 1
        assert left >= 0, f"block {block} is free already"
        if not left:
            self._link(block, before=self._next[self._end] if self._keys[block] is None else self._end)

    def publish(self, block: int, key: bytes) -> None:
        """Let a held block be found by the key of its content, unless another one already is."""
        if self._block_of_key.setdefault(key, block) == block:
            self._keys[block] = key
            if self.host is not None:
                self.host.drop(key)

    def find(self, key: bytes) -> int | None:
        """Return the block with the content of a key, which may be free."""
        return self._block_of_key.get(key)

    def withdraw(self, block: int) -> None:
        """Let a held block be found no longer."""
        key = self._keys[block]
        if key is not None:
            del self._block_of_key[key]
            self._keys[block] = None

    def key_of(self, block: int) -> bytes | None:
        """Return the key by which a block is found."""
        return self._keys[block]

    def free_blocks(self) -> list[int]:
        """Return free blocks in the order in which they are given away. Takes time per block."""
        blocks, block = [], self._next[self._end]
        while block != self._end:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _unlink(self, block: int) -> None:
        before, after = self._before[block], self._next[block]
        self._next[before], self._before[after] = after, before
        self.free -= 1

    def _link(self, block: int, before: int) -> None:
        ahead = self._before[before]
        self._next[ahead], self._before[before] = block, block
        self._before[block], self._next[block] = ahead, before
        self.free += 1
