"""Events of a rank's trace: each collective and message, its wait, and the work between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MESSAGES = ("send", "receive")
"""Operations between two ranks of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A process group as its members know it. They meet under its name."""

    name: str
    ranks: tuple[int, ...]
    axis: str
    """The mesh's name for it, used in messages."""

    def __str__(self) -> str:
        return f"{self.axis} group of ranks {abbreviate_ranks(self.ranks)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationOperation:
    """A collective, or one end of a message, of one rank."""

    group: int
    """Index among the rank's communicators."""
    kind: str
    elements: int
    """Elements of the tensor that this rank contributes (a receive: takes)."""
    dtype: str
    element_bytes: int
    reduce: str = ""
    """Reduction, such as sum or max. Empty = none."""
    peer: int = 0
    """Distance from this rank to the other one along the group, wrapping around."""
    sent: tuple[int, ...] = ()
    """all_to_all: elements for each rank."""
    received: tuple[int, ...] = ()
    where: str = ""
    """Step, action of the schedule, line of the engine."""

    @property
    def size_bytes(self) -> int:
        """Size of that tensor in bytes."""
        return self.elements * self.element_bytes

    @property
    def is_message(self) -> bool:
        """True for a send or a receive."""
        return self.kind in MESSAGES

    def __str__(self) -> str:
        combined = f" ({self.reduce})" if self.reduce else ""
        return f"{self.kind}{combined} of {self.elements} x {self.dtype} ({self.size_bytes} bytes)"


@dataclass(frozen=True, slots=True)
class Start:
    """Start of operations of one group together, by number (NCCL: one group call)."""

    operations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaitEvent:
    """Kernels launched from here on run after an operation. The host does not stop."""

    operation: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Launch of kernels."""

    first: bool
    """True if one of them runs for the first time in this process, so that its code may have to be loaded."""
    where: str = ""
    """The first of those, or the first of all."""


@dataclass(frozen=True, slots=True)
class Touch:
    """Local work that meets a buffer of an operation that was not waited for."""

    operation: int
    what: Literal["read", "written", "freed"]
    where: str


Event = Start | WaitEvent | Compute | Touch


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything one rank does, in order. Ranks with equal traces differ in their communicators only."""

    operations: tuple[CommunicationOperation, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class RankTrace:
    """A rank with its trace and the communicators that the trace numbers."""

    rank: int
    trace: Trace
    communicators: tuple[Communicator, ...]

    def partner(self, operation: CommunicationOperation) -> int:
        """Return the other rank of a message."""
        ranks = self.communicators[operation.group].ranks
        return ranks[(ranks.index(self.rank) + operation.peer) % len(ranks)]

    def describe(self, number: int) -> str:
        """Describe an operation: `send of 64 x float32 (256 bytes) to rank 3 in the pp group of ...`."""
        operation = self.trace.operations[number]
        to = (
            f" {'to' if operation.kind == 'send' else 'from'} rank {self.partner(operation)}"
            if operation.is_message
            else ""
        )
        return f"{operation}{to} in the {self.communicators[operation.group]}, {operation.where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that the traces break."""

    rule: Literal["mismatch", "buffer", "deadlock"]
    text: str
    """One sentence, or several lines for a cycle of waits."""


def abbreviate_ranks(ranks: Sequence[int]) -> str:
    """Format ranks: `0 to 7`, `0, 2, 4`, `0, 4, 8 ... 60 (16 ranks)`."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]} to {ranks[-1]}"
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))} ... {ranks[-1]} ({len(ranks)} ranks)"
