"""A second tier of the prefix cache: content of blocks that were given away, in host memory.

Content is in one tier at a time. A block that is given away leaves its content here if it has a key, and content that
is found here returns to a block. What was saved first is given up first. Like the pool of blocks, this decides and
moves nothing: moves are a list that is carried out, in order, before a step computes.
"""

from typing import Literal, NamedTuple, get_args

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
            if not self._slots:
                return None
            self._free.append(self._slots.pop(next(iter(self._slots))))
        self._slots[key] = slot = self._free.pop()
        self.saved += 1
        return slot

    def touch(self, key: bytes) -> None:
        """Note that content was wanted. It is then given up as late as new content."""
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
