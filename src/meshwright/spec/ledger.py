"""Ledger: what something costs, as entries that can be summed, grouped and subtracted."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

STATES = ("parameters", "shards", "gradients", "masters", "moments", "counters")
"""What a rank keeps from step to step; counters are the optimizer's step numbers, one for each tensor."""
KINDS = (*STATES, "activations", "logits", "buffers", "temporaries", "tokens", "staging")
"""All memory that tensors take, by what it is for: each package that counts, predicts or shows memory names it so."""
PLANNED = (*KINDS, "reserve")
"""And what the planner sets aside for what is no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line. `kind` is memory, traffic, flop or time; `unit` is bytes, calls, flop or s."""

    kind: Literal["memory", "traffic", "flop", "time"]
    what: str
    axis: str = ""
    rank: int = 0
    phase: str = ""
    quantity: float
    unit: Literal["bytes", "calls", "flop", "s"]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """A tuple of entries."""

    entries: tuple[Entry, ...] = ()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __add__(self, other: "Ledger") -> "Ledger":
        return Ledger(self.entries + other.entries)

    def only(self, **fields: object) -> "Ledger":
        """The entries whose fields have these values: `only(kind="memory", rank=0)`."""
        return Ledger(tuple(e for e in self.entries if all(getattr(e, k) == v for k, v in fields.items())))

    def total(self, unit: str = "bytes") -> float:
        """Sum of all quantities of one unit."""
        return sum(e.quantity for e in self.entries if e.unit == unit)

    def by(self, *fields: str, unit: str = "bytes") -> dict[tuple[object, ...], float]:
        """Sums per value of the named fields; they add up to `total(unit)`."""
        sums: dict[tuple[object, ...], float] = {}
        for entry in self.entries:
            if entry.unit == unit:
                key = tuple(getattr(entry, field) for field in fields)
                sums[key] = sums.get(key, 0.0) + entry.quantity
        return sums

    def minus(self, other: "Ledger", *fields: str, unit: str = "bytes") -> dict[tuple[object, ...], float]:
        """Per value of the named fields, this ledger's sum less the other's; a missing side counts as 0."""
        mine, theirs = self.by(*fields, unit=unit), other.by(*fields, unit=unit)
        return {key: mine.get(key, 0.0) - theirs.get(key, 0.0) for key in (mine | theirs)}
