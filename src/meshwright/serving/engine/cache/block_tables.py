"""The blocks of each sequence: found by prefix, grown, copied before they are written, given back."""

from meshwright.serving.engine.cache.block_pool import BlockPool
from meshwright.serving.engine.cache.cached_sequence import GONE, HOSTED, CachedSequence, next_key
from meshwright.serving.engine.cache.host_tier import Move


class BlockTables:
    """Tables of sequences over one pool. A block holds `block` positions."""

    def __init__(self, pool: BlockPool, block: int, window: int = 0) -> None:
        """Create the tables. `window`: no layer sees further back than so many positions. 0 = some layer sees all."""
        self.pool, self.block, self.window = pool, block, window
        self.asked = self.hits = 0
        """Tokens of admitted sequences, and those of them that the cache had."""
        self.host_hits = 0
        """Tokens among `hits` that came from host memory."""

    def blocks_of(self, tokens: int) -> int:
        """Return the number of blocks that so many positions need."""
        return -(-tokens // self.block)

    def most_blocks(self, limit: int, at_once: int) -> int:
        """Return the most blocks that a sequence of `limit` tokens holds, `at_once` of them computed per step."""
        return self.blocks_of(min(limit, self.window + at_once) if self.window else limit) + bool(self.window)

    def prefix(self, sequence: CachedSequence) -> tuple[list[int], list[bytes]]:
        """Return the cached blocks (or HOSTED) of a sequence's beginning, and their keys.

        At least one token is left to compute, since its logits are needed.
        """
        blocks, keys = list[int](), list[bytes]()
        key, size, host = sequence.key, self.block, self.pool.host
        for begin in range(0, len(sequence.tokens) - size if sequence.cacheable else 0, size):
            key = next_key(key, sequence.tokens[begin : begin + size])
            cached_block = self.pool.find(key)
            if cached_block is None and (host is None or key not in host):
                break
            blocks.append(HOSTED if cached_block is None else cached_block)
            keys.append(key)
        return blocks, keys

    def begin(self, sequence: CachedSequence, blocks: list[int], keys: list[bytes]) -> None:
        """Give a sequence the blocks of its prefix. The pool must have free blocks for what is HOSTED and visible."""
        for block in blocks:
            if block != HOSTED:
                self.pool.hold(block)
        sequence.table, sequence.published = list(blocks), len(blocks)
        sequence.key = keys[-1] if keys else sequence.key
        sequence.computed = sequence.cached = len(blocks) * self.block
        self.asked += len(sequence.tokens)
        self.hits += sequence.computed
        self._drop_unseen(sequence)
        if HOSTED in blocks:
            self._fetch(sequence, blocks, keys)

    def _fetch(self, sequence: CachedSequence, blocks: list[int], keys: list[bytes]) -> None:
        """Load HOSTED content that some layer sees into blocks."""
        host, hosted = self.pool.host, [index for index, block in enumerate(blocks) if block == HOSTED]
        assert host is not None
        self.host_hits += len(hosted) * self.block
        for index in hosted:
            if index < sequence.gone:
                host.touch(keys[index])
        # All content leaves its slots first, so that blocks which are given away meanwhile cannot take those slots.
        leaving = [(index, host.leave(keys[index])) for index in hosted if index >= sequence.gone]
        for index, slot in leaving:
            block = self.pool.take()
            self.pool.moves.append(Move("load", slot, block))
            host.release(slot)
            self.pool.publish(block, keys[index])
            sequence.table[index] = block

    def needs(self, sequence: CachedSequence, count: int) -> int:
        """Return how many free blocks the next `count` tokens take."""
        table, computed = sequence.table, sequence.computed
        partial = computed % self.block
        shared = partial and self.pool.holders[table[computed // self.block]] > 1
        return self.blocks_of(computed + count) - len(table) + bool(shared)

    def grow(self, sequence: CachedSequence, count: int) -> None:
        """Make room for the next `count` tokens. The pool must have the blocks that `needs` returns.

        A block that is written to and that others hold is copied first.
        """
        index = sequence.computed // self.block
        if sequence.computed % self.block and self.pool.holders[sequence.table[index]] > 1:
            old, new = sequence.table[index], self.pool.take()
            self.pool.release(old)
            sequence.table[index] = new
            self.pool.moves.append(Move("copy", old, new))
        for _ in range(self.blocks_of(sequence.computed + count) - len(sequence.table)):
            sequence.table.append(self.pool.take())

    def advance(self, sequence: CachedSequence, count: int) -> None:
        """Count `count` tokens as computed: publish full blocks, and release those outside every window."""
        sequence.computed += count
        whole = sequence.computed // self.block
        if whole > sequence.published and sequence.cacheable:
            for index in range(sequence.published, whole):
                tokens = sequence.tokens[index * self.block : (index + 1) * self.block]
                sequence.key = next_key(sequence.key, tokens)
                self.pool.publish(sequence.table[index], sequence.key)
            sequence.published = whole
        self._drop_unseen(sequence)

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Let a child with equal tokens hold the same blocks."""
        for block in parent.table[parent.gone :]:
            self.pool.hold(block)
        child.table, child.key, child.published = list(parent.table), parent.key, parent.published
        child.computed, child.cached, child.gone = parent.computed, parent.cached, parent.gone

    def give_back(self, sequence: CachedSequence) -> None:
        """Release all blocks, the last one first, since more prefixes share the first ones."""
        for block in reversed(sequence.table[sequence.gone :]):
            self.pool.release(block)
        sequence.table, sequence.key = [], sequence.first
        sequence.published = sequence.gone = sequence.computed = 0

    def withdraw(self, sequence: CachedSequence) -> list[int]:
        """Return the blocks that only this sequence holds, and let nobody find them any more."""
        blocks = [block for block in sequence.table[sequence.gone :] if self.pool.holders[block] == 1]
        for block in blocks:
            self.pool.withdraw(block)
        return blocks

    def _drop_unseen(self, sequence: CachedSequence) -> None:
        unseen = max(0, sequence.computed - self.window + 1) // self.block if self.window else 0
        for index in range(sequence.gone, unseen):
            if sequence.table[index] != HOSTED:
                self.pool.release(sequence.table[index])
            sequence.table[index] = GONE
        sequence.gone = max(sequence.gone, unseen)
