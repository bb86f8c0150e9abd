"""A second tier of the prefix cache: content of blocks that were given away, in host memory.

Content is in one tier at a time. A block that is given away leaves its content here, if it has a key; who is found here
goes back to a block. What was saved first is given up first. As the pool of blocks, it decides and moves nothing: what
is to be moved is a list, in whose order it happens before a step computes.
"""

from typing import Literal, NamedTuple, get_args

MoveKind = Literal["copy", "save", "load"]
MOVES: tuple[MoveKind, ...] = get_args(MoveKind)


class Move(NamedTuple):
    """Content that is moved: from a block to another, to a slot of host memory, or back."""

    kind: MoveKind
    source: int
    target: int


class HostTier:
    """Slots 0 to `size` - 1."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.saved = 0
        """Blocks whose content came here."""
        self._slots: dict[bytes, int] = {}  # by key, in the order in which they came
        self._free = list(range(size))

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> list[int]:
        """Those that have content, and those that are free."""
        return [*self._slots.values(), *self._free]

    def save(self, key: bytes) -> int | None:
        """A slot for content of a key, in place of the oldest where there is no room; None = all are on their way
        back."""
        if not self._free:
            if not self._slots:
                return None
            self._free.append(self._slots.pop(next(iter(self._slots))))
        self._slots[key] = slot = self._free.pop()
        self.saved += 1
        return slot

    def touch(self, key: bytes) -> None:
        """It was wanted, and is given up as late as if it had come now."""
        self._slots[key] = self._slots.pop(key)

    def leave(self, key: bytes) -> int:
        """The slot of content that goes back to a block; `release` it when that is decided."""
        return self._slots.pop(key)

    def release(self, slot: int) -> None:
        """It may have other content."""
        self._free.append(slot)

    def drop(self, key: bytes) -> None:
        """A block has that content now."""
        if key in self._slots:
            self._free.append(self._slots.pop(key))
