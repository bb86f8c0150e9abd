"""planned | dry run | measured, row by row: every kind of memory, all traffic, every part of the step, and use.

A row is judged by how far the others are from the measured figure, or from the dry run where nothing was measured.
Traffic must agree exactly, unless a router decides where tokens go. A small part is held against a quarter of its
whole: an error in it counts as much as one there. Whatever is not known is None, with the reason.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.observe.columns import Column
from meshwright.observe.kinds import KINDS, STATES
from meshwright.planner.memory import KINDS as PLANNED
from meshwright.spec import Plan
from meshwright.spec.places import pipeline_ranks

SMALL = 0.25
"""Parts below this share of their whole are judged as if they had it."""
TIMES = ("compute", "exchange", "bubble", "weights", "gradients", "optimizer", "other")
USES = {
    "tokens_per_second_per_device": "tokens/s a device", "mfu_causal": "MFU (causal)", "mfu_full": "MFU (full)",
    "hfu": "HFU (causal)", "bubble_fraction": "bubble",
}  # fmt: skip
UNITS = {"tokens_per_second_per_device": "tokens/s"}
STATES_ONLY = "training counts what it keeps from step to step: meshwright profile measures the rest"
RESIDENT = "resident memory of a process is no peak of its tensors: meshwright profile measures it"
AT_UPDATE = "measured at the optimizer's update, the others at their peaks"
UNCOUNTED = "the planner does not count it"
Values = tuple[float | None, float | None, float | None]
Columns = tuple[Column, Column, Column]
Whys = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
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
    note: str = ""
    """Why the columns are not of the same thing: then they are shown, and no error is."""

    @property
    def reference(self) -> int | None:
        """The column that the others are held against."""
        return next((place for place in (2, 1) if self.values[place] is not None), None)

    def error(self, place: int) -> float | None:
        """(value - reference) / reference of a column; None where there is nothing to compare."""
        value, at = self.values[place], self.reference
        if value is None or at is None or at <= place or self.note:
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
        room = self.tolerance * max(abs(base), SMALL * self.whole)
        return tuple(n for n, value in enumerate(self.values[:at]) if value is not None and abs(value - base) > room)

    def agrees(self) -> bool:
        """Whether every column is near enough to the reference."""
        return not self.beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The table."""

    columns: Columns
    rows: tuple[Row, ...]
    rank: int
    """The rank that holds most: whose rows are shown first."""
    tolerance: float
    plan: Plan

    @property
    def disagreeing(self) -> tuple[Row, ...]:
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
        *(row for one in order for row in _traffic(one, columns, tolerance if _routed(plan) else 0.0)),
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


def _routed(plan: Plan) -> bool:
    """Whether a router decides how much is sent."""
    return plan.model.moe is not None and plan.layout.ep > 1


def _whys(columns: Columns, rank: int, measured: str) -> Whys:
    """Why a column lacks a figure of a rank; `measured`: what a run without a profile cannot know."""

    def why(place: int) -> str:
        column = columns[place]
        if column.found is None:
            return column.about
        return measured if place == 2 else "" if column.rank(rank) else f"rank {rank} was not run"

    return why(0), why(1), why(2)


def _peak(rank: int, columns: Columns, tolerance: float) -> Row:
    seen = [column.rank(rank) for column in columns]

    def peak(place: int) -> float | None:
        found = seen[place]
        return found.peak_bytes if found else None

    return Row(
        section="memory", what="peak", unit="bytes", rank=rank, values=_three(peak), tolerance=tolerance,
        missing=_whys(columns, rank, RESIDENT),
    )  # fmt: skip


def _kinds(rank: int, columns: Columns, tolerance: float) -> Iterator[Row]:
    seen = [column.rank(rank) for column in columns]
    known = [{one.kind: one.bytes for one in found.memory} if found else {} for found in seen]
    states_only = not any(kind not in STATES for kind in known[2])
    reach: tuple[Sequence[str], ...] = (PLANNED, KINDS, STATES if states_only else KINDS)
    whole = max((one.peak_bytes or 0 for one in seen if one), default=0)
    whys = _whys(columns, rank, STATES_ONLY)

    def held(place: int, kind: str) -> float | None:
        return known[place].get(kind, 0) if known[place] and kind in reach[place] else None

    for kind in dict.fromkeys((*KINDS, *PLANNED)):
        values = held(0, kind), held(1, kind), held(2, kind)
        if not any(values):
            continue
        note = AT_UPDATE if kind == "gradients" and states_only else ""
        yield Row(
            section="memory", what=kind, unit="bytes", rank=rank, values=values, whole=whole,
            tolerance=None if note or kind == "reserve" else tolerance, note=note,
            missing=(UNCOUNTED, "no tensor", "no tensor") if kind == "reserve" else (UNCOUNTED, *whys[1:]),
        )  # fmt: skip


def _traffic(rank: int, columns: Columns, tolerance: float) -> Iterator[Row]:
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
            yield Row(
                section="traffic", what=" ".join(key), unit=unit, rank=rank, values=values, tolerance=tolerance,
                missing=whys,
            )  # fmt: skip


def _timeless(columns: Columns) -> Whys:
    planned, dry, measured = (column.timeless if column.found else column.about for column in columns)
    return planned, dry, measured


def _times(columns: Columns, tolerance: float) -> Iterator[Row]:
    known = [{one.what: one.seconds for one in column.found.time} if column.found else {} for column in columns]
    totals = _three(lambda place: columns[place].found.step_seconds if columns[place].found else None)  # type: ignore[union-attr]
    whole = next((total for total in reversed(totals) if total), 0.0)
    whys = _timeless(columns)
    for what in (*TIMES, "data"):
        values = known[0].get(what), known[1].get(what), known[2].get(what)
        if any(values):
            missing = (whys[0] or UNCOUNTED, *whys[1:])
            yield Row(
                section="time", what=what, unit="seconds", values=values, whole=whole, missing=missing,
                tolerance=tolerance,
            )  # fmt: skip
    yield Row(section="time", what="step", unit="seconds", values=totals, tolerance=tolerance, missing=whys)


def _uses(columns: Columns) -> Iterator[Row]:
    """They follow from the step's time, so none is judged again."""
    for name, title in USES.items():
        planned, dry, measured = _timeless(columns)
        if name in ("mfu_causal", "mfu_full", "hfu"):
            measured = "the peak of this device is not known" if columns[2].found else measured

        def use(place: int, name: str = name) -> float | None:
            found = columns[place].found
            return getattr(found, name) if found else None

        yield Row(
            section="use", what=title, unit=UNITS.get(name, "share"), values=_three(use),
            missing=(planned, dry, measured),
        )  # fmt: skip
