"""A sequence of tokens that is being continued, as the scheduler sees it."""

from dataclasses import dataclass, field
from enum import Enum, auto


class Phase(Enum):
    """Where a sequence is. WAITING -> RUNNING -> ENDED; a preempted one waits again."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


GONE = -1
"""In a table: a block that was given back, since no window reaches it any more."""
HOSTED = -2
"""In a prefix that was found: content that is in host memory."""


@dataclass(slots=True, eq=False)
class CachedSequence:
    """One sequence. Compared by identity."""

    number: int
    """In order of arrival."""
    tokens: list[int]
    """Its prompt, and what was made."""
    limit: int
    """Most tokens that it may have."""
    first: bytes
    """The key that its prefix begins with (prefix_keys)."""
    priority: int = 0
    """Lower goes first."""
    copies: int = 1
    """Sequences that go on from its prompt; the others begin when the prompt is computed."""
    adapter: int = 0
    """The number of its adapter (loaded_adapters); 0 = the model alone."""
    cacheable: bool = True
    """Whether its blocks may be found by others, and others' by it."""
    prompt: int = 0
    """Tokens of the prompt."""
    key: bytes = b""
    """Of its prefix so far in whole blocks that are published."""
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    table: list[int] = field(default_factory=list)
    """Blocks of its positions, in order."""
    published: int = 0
    """Blocks of the table that have a key, or were passed over."""
    gone: int = 0
    """Blocks of the table that are GONE."""
    found: int = 0
    """Tokens whose keys and values were found in the cache when it began."""
    guessed: int = 0
    """Tokens at its end that are guesses (speculation.py)."""
    preemptions: int = 0
    phase: Phase = Phase.WAITING

    def __post_init__(self) -> None:
        self.prompt, self.key = len(self.tokens), self.first

    def drop_guesses(self, keep: int = 0) -> None:
        """All but so many of them."""
        if self.guessed > keep:
            del self.tokens[len(self.tokens) - self.guessed + keep :]
            self.guessed = keep

    @property
    def rank(self) -> tuple[int, int]:
        """In order of which sequences are served."""
        return self.priority, self.number
