"""A sequence of tokens that is continued, as the scheduler sees it, and the keys of its cached blocks.

Keys are a chain of SHA-256 over blocks of tokens. The key of a block covers its tokens and all before them, so equal
keys mean equal keys and values. A salt begins the chain. Requests with different salts never find each other's blocks,
and no answer's delay betrays another's prompt. The number of an adapter's loading also begins the chain, since an
adapter changes keys and values.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import sha256


def first_key(salt: bytes, adapter: int = 0) -> bytes:
    """Return the key from which a sequence's first block is hashed. `adapter`: the number of its loading, 0 = none."""
    if not adapter:
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
