"""planned | dry run | measured, row by row: every kind of memory, all traffic, every part of the step, and use.

A row is judged by how far the others are from the measured figure, or from the dry run where nothing was measured.
Traffic must agree exactly, but for the bytes that a router sends to experts. A small part is held against a quarter of
its whole: an error in it counts as much as one there. Memory is held against LEAST_MEMORY_BYTES at least. A peak is a
peak wherever it stands; but what it is made of is judged only between columns whose peaks stand at like moments.
Whatever is not known is None, with the reason.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.observe.compare.sources_of_columns import Column
from meshwright.observe.shared_document import RankRecord
from meshwright.spec import Plan
from meshwright.spec.ledger import KINDS, PLANNED, STATES
from meshwright.spec.places import pipeline_ranks

SMALL = 0.25
"""Parts below this share of their whole are judged as if they had it."""
LEAST_MEMORY_BYTES = 20 * 2**20
"""Memory below this is judged as if it were this much. A choice: toy runs of two ranks differ by 1.5 MiB of logits."""
TIMES = ("compute", "exchange", "bubble", "weights", "gradients", "optimizer", "other")
USES = {
    "tokens_per_second_per_device": "tokens/s per device", "mfu_causal": "MFU (causal)", "mfu_full": "MFU (full)",
    "hfu": "HFU (causal)", "bubble_fraction": "bubble",
}  # fmt: skip
UNITS = {"tokens_per_second_per_device": "tokens/s"}
STATES_ONLY = "training counts what it keeps from step to step: meshwright profile measures the rest"
RESIDENT = "resident memory of a process is no peak of its tensors: meshwright profile measures it"
AT_UPDATE = "at the optimizer's update"
ROUTED = ("ep", "all_to_all")
"""How much of it is sent is a router's choice."""
IN_TRAINING = ", in training"
PASSING = ("gradients", "activations", "logits", "buffers", "temporaries", "tokens")
"""Kinds that come and go in a step."""
COPIES = ("parameters", "shards")
"""These do, too, where a rank holds whole copies beside its shards until the update (ZeRO-1 and ZeRO-2)."""
UNCOUNTED = "the planner does not count it"
Values = tuple[float | None, float | None, float | None]
Columns = tuple[Column, Column, Column]
Whys = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One figure, three times."""

    section: str
    """memory, traffic, time or use."""
    what: str
    unit: str
    """bytes, calls, seconds, tokens/s or share."""
    rank: int | None = None
    values: Values
    """planned, dry run, measured."""
    tolerance: float | None = None
    """Relative; None = shown, and not judged: it is not known twice, or follows from other rows."""
    whole: float = 0.0
    """What a small part is held against: a share of this."""
    missing: Whys = ("", "", "")
    """Why a value is None."""
    aside: tuple[int, ...] = ()
    """Columns that are of another moment than the rest: shown, and not judged."""
    note: str = ""
    """Which moments those are."""

    @property
    def reference(self) -> int | None:
        """The column that the others are held against."""
        return next((place for place in (2, 1) if self._judged(place)), None)

    def _judged(self, place: int) -> bool:
        return self.values[place] is not None and place not in self.aside

    def error(self, place: int) -> float | None:
        """(value - reference) / reference of a column; None where there is nothing to compare."""
        value, at = self.values[place], self.reference
        if value is None or at is None or at <= place or place in self.aside:
            return None
        base = self.values[at] or 0.0
        if value == base:
            return 0.0
        return (value - base) / base if base else float("inf")

    @property
    def beyond(self) -> tuple[int, ...]:
        """The columns that are too far from the reference."""
        at = self.reference
        if self.tolerance is None or at is None:
            return ()
        base = self.values[at] or 0.0
        room = self.tolerance * max(abs(base), self._least)
        return tuple(
            n
            for n, value in enumerate(self.values[:at])
            if value is not None and self._judged(n) and abs(value - base) > room
        )

    @property
    def _least(self) -> float:
        """Smallest figure that an error is held against."""
        return max(SMALL * self.whole, LEAST_MEMORY_BYTES if self.section == "memory" else 0.0)

    @property
    def small(self) -> bool:
        """Whether it is held against a share of its whole, or against LEAST_MEMORY_BYTES."""
        at = self.reference
        return at is not None and abs(self.values[at] or 0.0) < self._least

    @property
    def known_twice(self) -> bool:
        """Whether there is anything to judge."""
        at = self.reference
        return self.tolerance is not None and at is not None and any(map(self._judged, range(at)))

    def agrees(self) -> bool:
        """Whether every column is near enough to the reference."""
        return not self.beyond


def room_of_small_parts(tolerance: float) -> str:
    """Say how far small parts may be off."""
    return f"{tolerance:.0%} of a quarter of the sum (of memory: of 20 MiB, where that is more)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The table."""

    columns: Columns
    rows: tuple[ComparedRow, ...]
    rank: int
    """The rank that holds most: whose rows are shown first."""
    tolerance: float
    plan: Plan

    @property
    def judged(self) -> tuple[ComparedRow, ...]:
        """Rows that are known twice, of like moments."""
        return tuple(row for row in self.rows if row.known_twice)

    @property
    def disagreeing(self) -> tuple[ComparedRow, ...]:
        """Rows beyond their tolerance, in order."""
        return tuple(row for row in self.rows if not row.agrees())


def compare(plan: Plan, columns: Columns, tolerance: float = 0.1) -> Comparison:
    """Lay the columns side by side."""
    rank = _fullest(plan, columns)
    ranks = pipeline_ranks(plan.layout)
    order = [rank, *(one for one in ranks if one != rank)]
    rows = [
        *(_peak(one, columns, tolerance) for one in ranks),
        *(row for one in order for row in _kinds(one, columns, tolerance)),
        *(row for one in order for row in _traffic(one, columns, tolerance)),
        *(row for one in order for row in _in_training(one, columns, tolerance)),
        *_times(columns, tolerance),
        *_uses(columns),
    ]
    return Comparison(columns=columns, rows=tuple(rows), rank=rank, tolerance=tolerance, plan=plan)


def _fullest(plan: Plan, columns: Columns) -> int:
    """The pipeline place's rank with the highest peak, by the best that is known."""
    ranks = pipeline_ranks(plan.layout)
    for column in reversed(columns):
        peaks = {one.rank: one.peak_bytes for one in (column.found.ranks if column.found else ()) if one.peak_bytes}
        if all(rank in peaks for rank in ranks):
            return max(ranks, key=lambda rank: peaks[rank] or 0)
    return ranks[0]


def _three(of: Callable[[int], float | None]) -> Values:
    return of(0), of(1), of(2)


def _whys(columns: Columns, rank: int, measured: str) -> Whys:
    """Why a column lacks a figure of a rank; `measured`: what a run without a profile cannot know."""

    def why(place: int) -> str:
        column = columns[place]
        if column.found is None:
            return column.about
        return measured if place == 2 else "" if column.rank(rank) else f"rank {rank} was not run"

    return why(0), why(1), why(2)


def _peak(rank: int, columns: Columns, tolerance: float) -> ComparedRow:
    seen = [column.rank(rank) for column in columns]

    def peak(place: int) -> float | None:
        found = seen[place]
        return found.peak_bytes if found else None

    return ComparedRow(
        section="memory", what="peak", unit="bytes", rank=rank, values=_three(peak), tolerance=tolerance,
        missing=_whys(columns, rank, RESIDENT),
    )  # fmt: skip


def _kinds(rank: int, columns: Columns, tolerance: float) -> Iterator[ComparedRow]:
    seen = [column.rank(rank) for column in columns]
    known = [{one.kind: one.bytes for one in found.memory} if found else {} for found in seen]
    states_only = bool(known[2]) and not any(kind not in STATES for kind in known[2])
    reach: tuple[Sequence[str], ...] = (PLANNED, KINDS, STATES if states_only else KINDS)
    whole = max((one.peak_bytes or 0 for one in seen if one), default=0)
    whys = _whys(columns, rank, STATES_ONLY)

    def held(place: int, kind: str) -> float | None:
        return known[place].get(kind, 0) if known[place] and kind in reach[place] else None

    moments = {
        place: AT_UPDATE if place == 2 and states_only else moment(one)
        for place, one in enumerate(seen)
        if one and known[place]
    }
    aside = _aside(moments)
    note = f"{'; '.join(f'{columns[place].title} {where}' for place, where in moments.items())}" if aside else ""
    copied = any(one.get("shards") for one in known)
    for kind in PLANNED:
        values = held(0, kind), held(1, kind), held(2, kind)
        if not any(values):
            continue
        passing = kind in PASSING or (copied and kind in COPIES)
        yield ComparedRow(
            section="memory", what=kind, unit="bytes", rank=rank, values=values, whole=whole,
            tolerance=None if kind == "reserve" else tolerance,
            aside=aside if passing else (), note=note if passing else "",
            missing=(UNCOUNTED, "no tensor", "no tensor") if kind == "reserve" else (UNCOUNTED, *whys[1:]),
        )  # fmt: skip


def moment(of: RankRecord) -> str:
    """Where in a step a peak stands: at head and loss (which end a forward pass), in a forward or backward pass, at the
    update."""
    words = of.when.replace(",", " ").split()
    if words and words[0] in ("update", "optimizer"):
        return AT_UPDATE
    if "head" not in words and "F" not in words:
        return "in a backward pass"
    logits = any(one.kind == "logits" and one.bytes for one in of.memory)
    return "at head and loss" if logits else "in a forward pass"


def _aside(moments: dict[int, str]) -> tuple[int, ...]:
    """Columns whose peak stands elsewhere than the measured one; that one, where plan and dry run stand alike."""
    alike = len(moments) == 3 and moments[0] == moments[1] != moments[2]
    best = moments[0 if alike else max(moments)] if moments else ""
    return tuple(place for place, where in moments.items() if where != best)


def _traffic(rank: int, columns: Columns, tolerance: float) -> Iterator[ComparedRow]:
    """`tolerance`: of what a router decides, the bytes that go to experts; all else is exact."""
    seen = [column.rank(rank) for column in columns]
    sent = [
        None if one is None or one.traffic is None else {(s.axis, s.collective): s for s in one.traffic} for one in seen
    ]
    whys = _whys(columns, rank, "the run left no ledger.json")

    def counted(place: int, key: tuple[str, str], unit: str) -> float | None:
        found = sent[place]
        return None if found is None else getattr(found.get(key), unit, 0)

    for key in sorted({key for one in sent if one for key in one}):
        for unit in ("bytes", "calls"):
            values = counted(0, key, unit), counted(1, key, unit), counted(2, key, unit)
            yield ComparedRow(
                section="traffic", what=" ".join(key), unit=unit, rank=rank, values=values, missing=whys,
                tolerance=tolerance if key == ROUTED and unit == "bytes" else 0.0,
            )  # fmt: skip


def _in_training(rank: int, columns: Columns, tolerance: float) -> Iterator[ComparedRow]:
    """Beside a profile, what training itself left of a rank: its peak, and traffic that is not the profile's."""
    planned, dry, measured = columns
    own = next((one for one in measured.trained.ranks if one.rank == rank), None) if measured.trained else None
    if measured.trained is None or own is None:
        return
    other = planned, dry, replace(measured, found=measured.trained)
    if own.peak_bytes is not None:
        yield replace(_peak(rank, other, tolerance), what=f"peak{IN_TRAINING}")
    if own.traffic is None:
        return
    profiled = {(row.what, row.unit): row.values[2] for row in _traffic(rank, columns, tolerance)}
    for row in _traffic(rank, other, tolerance):
        if profiled.get((row.what, row.unit), 0) != row.values[2]:
            yield replace(row, what=row.what + IN_TRAINING)


def _timeless(columns: Columns) -> Whys:
    planned, dry, measured = (column.timeless if column.found else column.about for column in columns)
    return planned, dry, measured


def _seconds(column: Column) -> dict[str, float]:
    """By part of the step. Passes wait for host memory inside of themselves: a clock counts that as computing; and
    Muon's products as the optimizer."""
    found = {one.what: one.seconds for one in column.found.time} if column.found else {}
    for part, within in (("offload", "compute"), ("muon", "optimizer")):
        if seconds := found.pop(part, 0.0):
            found[within] = found.get(within, 0.0) + seconds
    return found


def _times(columns: Columns, tolerance: float) -> Iterator[ComparedRow]:
    known = [_seconds(column) for column in columns]
    totals = _three(lambda place: columns[place].found.step_seconds if columns[place].found else None)  # type: ignore[union-attr]  # asked in the same line
    whole = next((total for total in reversed(totals) if total), 0.0)
    whys = _timeless(columns)
    for what in (*TIMES, "data"):
        values = known[0].get(what), known[1].get(what), known[2].get(what)
        if any(values):
            missing = (whys[0] or UNCOUNTED, *whys[1:])
            yield ComparedRow(
                section="time", what=what, unit="seconds", values=values, whole=whole, missing=missing,
                tolerance=tolerance,
            )  # fmt: skip
    yield ComparedRow(section="time", what="step", unit="seconds", values=totals, tolerance=tolerance, missing=whys)


def _uses(columns: Columns) -> Iterator[ComparedRow]:
    """They follow from the step's time, so none is judged again."""
    for name, title in USES.items():
        planned, dry, measured = _timeless(columns)
        if name in ("mfu_causal", "mfu_full", "hfu"):
            measured = "the peak of this device is not known" if columns[2].found else measured

        def use(place: int, name: str = name) -> float | None:
            found = columns[place].found
            return getattr(found, name) if found else None

        yield ComparedRow(
            section="use", what=title, unit=UNITS.get(name, "share"), values=_three(use),
            missing=(planned, dry, measured),
        )  # fmt: skip
