"""Blocks of keys and values: the sequences that hold them, the pool, and the tier of host memory. No torch.

A block holds the keys and values of some positions, and several sequences may hold it. Its key is a link in a chain of
SHA-256 over blocks of tokens. The key covers the block's tokens and all before them, so equal keys mean equal content.
A salt begins the chain. Requests with different salts never find each other's blocks, and no answer's delay betrays
another's prompt. The number of an adapter's loading also begins the chain, since an adapter changes keys and values.

A block that nobody holds is free. It keeps its content, and is found by the content's key, until it is given away. Free
blocks without a key go first, then those that have been free the longest. Free blocks are a doubly linked list, so all
operations take constant time.

Host memory is a second tier. Content is in one tier at a time. A block that is given away leaves its content there if
it has a key, and content that is found there returns to a block. What was saved first is given up first.

Everything here decides and moves nothing: moves are a list that is carried out, in order, before a step computes.
"""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import sha256
from typing import Literal, NamedTuple, get_args

from meshwright.spec.errors import ArgumentError


def first_key(salt: bytes, adapter: int = 0) -> bytes:
    """Return the key from which a sequence's first block is hashed. `adapter`: the number of its loading, 0 = none."""
    if not adapter:
        # Two prefixes keep the keys apart: no salt can imitate an adapter's number.
        return sha256(b"meshwright prefix\0" + salt).digest()
    return sha256(b"meshwright adapter\0" + adapter.to_bytes(8, "little") + salt).digest()


def next_key(key: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of the block of tokens that follows the block of `key`."""
    return sha256(key + array("I", tokens).tobytes()).digest()


class Phase(Enum):
    """State of a sequence: WAITING -> RUNNING -> ENDED. A preempted one waits again."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


GONE = -1
"""Table entry of a block that was released because no window reaches it any more."""
HOSTED = -2
"""Entry of a found prefix whose content is in host memory."""


@dataclass(slots=True, eq=False)
class CachedSequence:
    """One sequence, compared by identity."""

    number: int
    """Order of arrival."""
    tokens: list[int]
    """The prompt and what was generated."""
    limit: int
    """Most tokens that it may have."""
    first: bytes
    """The key that its prefix begins with: `first_key`."""
    priority: int = 0
    """Lower is served first."""
    copies: int = 1
    """Sequences that continue its prompt. The others begin when the prompt is computed."""
    adapter: int = 0
    """The number of its adapter (loaded_adapters). 0 = the model alone."""
    cacheable: bool = True
    """True when blocks are shared with other sequences."""
    prompt: int = 0
    """Tokens of the prompt."""
    key: bytes = b""
    """Key of its prefix in whole, published blocks."""
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    table: list[int] = field(default_factory=list)
    """Blocks of its positions, in order."""
    published: int = 0
    """Blocks of the table that have a key, or were skipped."""
    gone: int = 0
    """Blocks of the table that are GONE."""
    cached: int = 0
    """Tokens whose keys and values the cache already had when it began."""
    guessed: int = 0
    """Tokens at its end that are guesses (speculation.py)."""
    preemptions: int = 0
    phase: Phase = Phase.WAITING

    def __post_init__(self) -> None:
        self.prompt, self.key = len(self.tokens), self.first

    def drop_guesses(self, keep: int = 0) -> None:
        """Drop all guesses but the first `keep`."""
        if self.guessed > keep:
            del self.tokens[len(self.tokens) - self.guessed + keep :]
            self.guessed = keep

    @property
    def rank(self) -> tuple[int, int]:
        """The order in which sequences are served."""
        return self.priority, self.number


MoveKind = Literal["copy", "save", "load"]
MOVES: tuple[MoveKind, ...] = get_args(MoveKind)


class Move(NamedTuple):
    """A move of content: between two blocks, to a slot of host memory, or back."""

    kind: MoveKind
    source: int
    target: int


class HostTier:
    """Slots 0 to `size` - 1."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.saved = 0
        """Blocks whose content was saved here."""
        self._slots: dict[bytes, int] = {}  # by key, in the order in which they came
        self._free = list(range(size))

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> list[int]:
        """Slots with content, then free ones."""
        return [*self._slots.values(), *self._free]

    def save(self, key: bytes) -> int | None:
        """Return a slot for a key's content, replacing the oldest if full. None = all slots are on their way back."""
        if not self._free:
            # Free slots ran out while others wait for `release`: nothing here can be replaced.
            if not self._slots:
                return None
            self._free.append(self._slots.pop(next(iter(self._slots))))
        self._slots[key] = slot = self._free.pop()
        self.saved += 1
        return slot

    def touch(self, key: bytes) -> None:
        """Note that content was wanted. It is then given up as late as new content."""
        # A dict keeps the order of insertion, so this entry is now the newest.
        self._slots[key] = self._slots.pop(key)

    def leave(self, key: bytes) -> int:
        """Return the slot of content that returns to a block. Call `release` once that is decided."""
        return self._slots.pop(key)

    def release(self, slot: int) -> None:
        """Free a slot for other content."""
        self._free.append(slot)

    def drop(self, key: bytes) -> None:
        """Drop content that a block has again."""
        if key in self._slots:
            self._free.append(self._slots.pop(key))


class BlockPool:
    """Blocks 0 to `size` - 1, all free and without content at first."""

    def __init__(self, size: int, host: HostTier | None = None) -> None:
        """Create the pool.

        `host` takes the content of blocks that are given away. Raises ArgumentError without a block.
        """
        if size < 1:
            raise ArgumentError("blocks", size, "must be at least 1")
        self.size = self.free = size
        self.host = host
        self.moves: list[Move] = []
        """Moves to carry out before the next step computes, in this order."""
        self.holders = [0] * size
        """Number of holders of each block."""
        self._end = size  # the list's sentinel: a node that is no block, before the first and after the last
        # Arrays, not lists: a number takes 8 bytes there, without an object of its own.
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
            # Its content is copied before anything is written to the block: moves are carried out first.
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
        holders = self.holders[block] = self.holders[block] - 1
        assert holders >= 0, f"block {block} is free already"
        if not holders:
            # Content without a key can never be found again, so such a block goes first.
            self._link(block, before=self._next[self._end] if self._keys[block] is None else self._end)

    def publish(self, block: int, key: bytes) -> None:
        """Let a held block be found by the key of its content, unless another one already is."""
        # Two sequences may compute the same prefix at once. One copy is enough to find.
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

    @property
    def published(self) -> Collection[int]:
        """Blocks that are found by the keys of their content, held or free."""
        return self._block_of_key.values()

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
        # The bound stops before the last token, even if a whole block ends there.
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
        # Before HOSTED content is fetched: what no window sees needs no block.
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
                # No layer sees it, but it was wanted: a shorter request may need it soon.
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
        # Whole blocks are never written again, so only a partly filled one can need a copy.
        shared = partial and self.pool.holders[table[computed // self.block]] > 1
        return self.blocks_of(computed + count) - len(table) + bool(shared)

    def grow(self, sequence: CachedSequence, count: int) -> None:
        """Make room for the next `count` tokens. The pool must have the blocks that `needs` returns.

        A block that is written to and that others hold is copied first.
        """
        index = sequence.computed // self.block
        if sequence.computed % self.block and self.pool.holders[sequence.table[index]] > 1:
            # A fork shares its last block with its parent. Both would write to the same positions.
            old, new = sequence.table[index], self.pool.take()
            self.pool.release(old)
            sequence.table[index] = new
            self.pool.moves.append(Move("copy", old, new))
        for _ in range(self.blocks_of(sequence.computed + count) - len(sequence.table)):
            sequence.table.append(self.pool.take())

    def advance(self, sequence: CachedSequence, count: int) -> None:
        """Count `count` tokens as computed: publish full blocks, and release those outside every window."""
        sequence.computed += count
        full_blocks = sequence.computed // self.block
        if full_blocks > sequence.published and sequence.cacheable:
            # Keys are hashed here, once per block, and not at each step.
            for index in range(sequence.published, full_blocks):
                tokens = sequence.tokens[index * self.block : (index + 1) * self.block]
                sequence.key = next_key(sequence.key, tokens)
                self.pool.publish(sequence.table[index], sequence.key)
            sequence.published = full_blocks
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
