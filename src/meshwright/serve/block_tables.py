"""The blocks of each sequence: found by prefix, grown, copied before they are written, given back."""

from meshwright.serve.block_pool import BlockPool
from meshwright.serve.cached_sequence import GONE, HOSTED, CachedSequence
from meshwright.serve.host_tier import Move
from meshwright.serve.prefix_keys import next_key


class BlockTables:
    """Tables of sequences over one pool. Blocks have room for `block` positions."""

    def __init__(self, pool: BlockPool, block: int, window: int = 0) -> None:
        """`window`: positions behind which no layer looks, 0 = some layer looks at all."""
        self.pool, self.block, self.window = pool, block, window
        self.asked = self.hits = 0
        """Tokens of admitted sequences, and those of them that were found in the cache."""
        self.host_hits = 0
        """Of the latter, tokens that were found in host memory."""

    def blocks_of(self, tokens: int) -> int:
        """Blocks of so many positions."""
        return -(-tokens // self.block)

    def most_blocks(self, limit: int, at_once: int) -> int:
        """What a sequence of `limit` tokens holds at most, of which `at_once` are computed in a step."""
        return self.blocks_of(min(limit, self.window + at_once) if self.window else limit) + bool(self.window)

    def prefix(self, sequence: CachedSequence) -> tuple[list[int], list[bytes]]:
        """Blocks that have the beginning of a sequence, or HOSTED, and their keys. One token at least is left over,
        whose logits are wanted."""
        found, keys = list[int](), list[bytes]()
        key, block, host = sequence.key, self.block, self.pool.host
        for begin in range(0, len(sequence.tokens) - block if sequence.cacheable else 0, block):
            key = next_key(key, sequence.tokens[begin : begin + block])
            here = self.pool.find(key)
            if here is None and (host is None or key not in host):
                break
            found.append(HOSTED if here is None else here)
            keys.append(key)
        return found, keys

    def begin(self, sequence: CachedSequence, found: list[int], keys: list[bytes]) -> None:
        """Give a sequence the blocks of its prefix; so many as it sees of what is HOSTED are free."""
        for block in found:
            if block != HOSTED:
                self.pool.hold(block)
        sequence.table, sequence.published = list(found), len(found)
        sequence.key = keys[-1] if keys else sequence.key
        sequence.computed = sequence.found = len(found) * self.block
        self.asked += len(sequence.tokens)
        self.hits += sequence.computed
        self._drop_unseen(sequence)
        if HOSTED in found:
            self._fetch(sequence, found, keys)

    def _fetch(self, sequence: CachedSequence, found: list[int], keys: list[bytes]) -> None:
        """Blocks for what is HOSTED, as far as some layer sees it. All of it leaves its slots first, so that what is
        given away meanwhile takes none of them."""
        host, hosted = self.pool.host, [place for place, block in enumerate(found) if block == HOSTED]
        assert host is not None
        self.host_hits += len(hosted) * self.block
        for place in hosted:
            if place < sequence.gone:
                host.touch(keys[place])
        leaving = [(place, host.leave(keys[place])) for place in hosted if place >= sequence.gone]
        for place, slot in leaving:
            block = self.pool.take()
            self.pool.moves.append(Move("load", slot, block))
            host.release(slot)
            self.pool.publish(block, keys[place])
            sequence.table[place] = block

    def needs(self, sequence: CachedSequence, count: int) -> int:
        """Free blocks that the next `count` tokens take."""
        table, computed = sequence.table, sequence.computed
        partial = computed % self.block
        shared = partial and self.pool.holders[table[computed // self.block]] > 1
        return self.blocks_of(computed + count) - len(table) + bool(shared)

    def grow(self, sequence: CachedSequence, count: int) -> None:
        """Make room for the next `count` tokens; so many blocks as it needs are free. A block that is written to and
        that others hold is copied first."""
        place = sequence.computed // self.block
        if sequence.computed % self.block and self.pool.holders[sequence.table[place]] > 1:
            old, new = sequence.table[place], self.pool.take()
            self.pool.release(old)
            sequence.table[place] = new
            self.pool.moves.append(Move("copy", old, new))
        for _ in range(self.blocks_of(sequence.computed + count) - len(sequence.table)):
            sequence.table.append(self.pool.take())

    def advance(self, sequence: CachedSequence, count: int) -> None:
        """The next `count` tokens are computed: publish blocks that are full, give back those out of every window."""
        sequence.computed += count
        whole = sequence.computed // self.block
        if whole > sequence.published and sequence.cacheable:
            for place in range(sequence.published, whole):
                tokens = sequence.tokens[place * self.block : (place + 1) * self.block]
                sequence.key = next_key(sequence.key, tokens)
                self.pool.publish(sequence.table[place], sequence.key)
            sequence.published = whole
        self._drop_unseen(sequence)

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Let a child with the same tokens hold the same blocks."""
        for block in parent.table[parent.gone :]:
            self.pool.hold(block)
        child.table, child.key, child.published = list(parent.table), parent.key, parent.published
        child.computed, child.found, child.gone = parent.computed, parent.found, parent.gone

    def give_back(self, sequence: CachedSequence) -> None:
        """Release all blocks, the last one first: it is given away before those that more prefixes begin with."""
        for block in reversed(sequence.table[sequence.gone :]):
            self.pool.release(block)
        sequence.table, sequence.key = [], sequence.first
        sequence.published = sequence.gone = sequence.computed = 0

    def withdraw(self, sequence: CachedSequence) -> list[int]:
        """Blocks that only this sequence holds; nobody finds them any more."""
        own = [block for block in sequence.table[sequence.gone :] if self.pool.holders[block] == 1]
        for block in own:
            self.pool.withdraw(block)
        return own

    def _drop_unseen(self, sequence: CachedSequence) -> None:
        """Give back blocks out of every window."""
        unseen = max(0, sequence.computed - self.window + 1) // self.block if self.window else 0
        for place in range(sequence.gone, unseen):
            if sequence.table[place] != HOSTED:
                self.pool.release(sequence.table[place])
            sequence.table[place] = GONE
        sequence.gone = max(sequence.gone, unseen)
