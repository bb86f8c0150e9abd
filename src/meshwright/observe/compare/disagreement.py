"""Why a row disagrees: which modules and operations made what is more, or less, than another column says."""

from collections.abc import Iterable, Iterator

from meshwright.observe.compare.judge import ComparedRow, Comparison
from meshwright.observe.compare.sources_of_columns import Column
from meshwright.observe.shared_document import RankRecord
from meshwright.spec.schedule import phase_words
from meshwright.spec.units import count, duration, gib

NAMED = 3
"""Sources that are listed."""
ALIKE = 0.05
"""A difference is laid to what is as large as it, within this share."""
TITLES = ("planned", "dry run", "measured")


def shown(value: float | None, unit: str) -> str:
    """A figure for people; a dash where it is not known."""
    if value is None:
        return "-"
    if unit == "bytes":
        return gib(value) if value >= 2**20 else f"{value / 1024:.1f} KiB" if value >= 1024 else f"{value:.0f} B"
    if unit == "seconds":
        short = f"{value * 1e6:.0f} us" if value < 1e-4 else f"{value * 1e3:.3g} ms"
        return short if 0 < value < 0.1 else f"{value:.3g} s" if value < 100 else duration(value)
    return f"{value:.1%}" if unit == "share" else f"{value:,.0f}" if unit == "calls" else count(value)


def explanation(found: Comparison, row: ComparedRow) -> list[str]:
    """Sentences: which figures clash, and what the dry run says of where they come from."""
    place = row.reference
    assert place is not None
    worst = max(row.beyond, key=lambda p: abs(row.error(p) or 0.0))
    where = f" of rank {row.rank}" if row.rank is not None else ""
    calls = " (calls)" if row.unit == "calls" else ""
    told = (f"{TITLES[one]} {shown(row.values[one], row.unit)}" for one in (worst, place))
    first = f"{row.what}{where}{calls}: {', '.join(told)}"
    difference = (row.values[place] or 0.0) - (row.values[worst] or 0.0)
    more = f"{shown(abs(difference), row.unit)} {'more' if difference > 0 else 'less'} than {TITLES[worst]}"
    return [f"{first}: {more}.", *_sources(found, row, abs(difference))]


def _sources(found: Comparison, row: ComparedRow, difference: float) -> Iterator[str]:
    if row.section == "memory":
        seen = found.columns[1].rank(row.rank or 0)
        if seen is None:
            yield f"No dry run to ask for modules: {found.columns[1].about}."
        else:
            yield from _memory(found, row, seen, difference)
    elif row.section == "traffic":
        yield from _traffic(found, row)
    elif row.what == "step":
        yield from _parts(found)


def _memory(found: Comparison, row: ComparedRow, seen: RankRecord, difference: float) -> Iterator[str]:
    kinds = [one for one in found.rows if one.section == "memory" and one.rank == row.rank and one.what != "peak"]
    if row.what == "peak":
        yield from _of_it(kinds)
    measured = found.columns[2].rank(row.rank or 0)
    also = f", the measured one at {phase_words(measured.when)}" if measured and measured.when else ""
    yield f"The dry run's peak is at {phase_words(seen.when)}{also}."
    kind = row.what if row.what != "peak" else "activations"
    sources = [(one.where.strip(), one.bytes) for one in seen.activations] if kind == "activations" else []
    sources = sources or [
        (f"{one.module or one.operation} ({one.line})", one.bytes) for one in seen.largest if one.kind == kind
    ]
    if sources:
        listed = ", ".join(f"{where} {shown(size, 'bytes')}" for where, size in sources[:NAMED])
        yield f"Its largest {kind}: {listed}."
    if kind == "activations" and measured and measured.activations:
        yield from _apart(seen, measured)
    alike = [where for where, size in sources if difference and abs(size - difference) <= ALIKE * difference]
    if alike:
        yield f"The difference is as large as {alike[0]}."


def _apart(dry: RankRecord, measured: RankRecord) -> Iterator[str]:
    """Modules and operations whose activations differ between the two that know them, the largest difference first."""
    ours, theirs = ({one.where: one.bytes for one in of.activations} for of in (dry, measured))
    gaps = {where: theirs.get(where, 0) - ours.get(where, 0) for where in ours | theirs}
    told = [
        f"{where.strip()} {shown(ours.get(where, 0), 'bytes')} and {shown(theirs.get(where, 0), 'bytes')}"
        for where in sorted(gaps, key=lambda where: -abs(gaps[where]))[:NAMED]
        if gaps[where]
    ]
    if told:
        yield f"Dry run and measurement differ in {'; '.join(told)}."


def _of_it(rows: Iterable[ComparedRow]) -> Iterator[str]:
    """The parts of a figure that differ most."""
    apart = [(row, *_gap(row)) for row in rows if _gap(row)[0]]
    for row, gap, against in sorted(apart, key=lambda item: -abs(item[1]))[:NAMED]:
        yield f"Of it {row.what}: {shown(abs(gap), row.unit)} {'more' if gap > 0 else 'less'} than {against}."


def _gap(row: ComparedRow) -> tuple[float, str]:
    """How much more the reference holds of a kind than the first column that knows."""
    at = row.reference
    other = next((place for place in range(at or 0) if row.values[place] is not None), None)
    if at is None or other is None:
        return 0.0, ""
    return (row.values[at] or 0.0) - (row.values[other] or 0.0), TITLES[other]


def _traffic(found: Comparison, row: ComparedRow) -> Iterator[str]:
    same = [one for one in found.rows if (one.section, one.what, one.rank) == ("traffic", row.what, row.rank)]
    for one in same:
        if one.unit != row.unit:
            told = ", ".join(
                f"{title} {shown(value, one.unit)}" for title, value in zip(TITLES, one.values, strict=True)
            )
            yield f"Its {one.unit}: {told}."
    absent = [column.title for column in found.columns if _none_sent(column, row)]
    if absent:
        yield f"Not there at all: {', '.join(absent)}."


def _none_sent(column: Column, row: ComparedRow) -> bool:
    seen = column.rank(row.rank or 0)
    sent = seen.traffic if seen else None
    return sent is not None and row.what not in {f"{one.axis} {one.collective}" for one in sent}


def _parts(found: Comparison) -> Iterator[str]:
    told = list(_of_it(row for row in found.rows if row.section == "time" and row.what != "step"))
    yield from told
    if not told:
        yield f"No parts to tell by: {found.columns[2].timeless or found.columns[0].timeless}."
