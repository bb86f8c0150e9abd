"""A sequence of tokens that is continued, as the scheduler sees it."""

from dataclasses import dataclass, field
from enum import Enum, auto


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
    """The key that its prefix begins with (prefix_keys)."""
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
