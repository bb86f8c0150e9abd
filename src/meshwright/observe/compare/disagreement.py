"""Reasons for a disagreeing row: the modules and operations behind the difference between two columns."""

from collections.abc import Iterable, Iterator

from meshwright.observe.compare.judge import ComparedRow, Comparison
from meshwright.observe.compare.sources_of_columns import Column
from meshwright.observe.shared_document import RankRecord
from meshwright.spec.layout.schedule import phase_words
from meshwright.spec.units import count, duration, gib

NAMED = 3
ALIKE = 0.05
"""A difference is attributed to what is as large as it, within this share."""
TITLES = ("planned", "dry run", "measured")


def shown(figure: float | None, unit: str) -> str:
    """Format a figure for people; a dash if it is not known."""
    if figure is None:
        return "-"
    if unit == "bytes":
        return gib(figure) if figure >= 2**20 else f"{figure / 1024:.1f} KiB" if figure >= 1024 else f"{figure:.0f} B"
    if unit == "seconds":
        short = f"{figure * 1e6:.0f} us" if figure < 1e-4 else f"{figure * 1e3:.3g} ms"
        return short if 0 < figure < 0.1 else f"{figure:.3g} s" if figure < 100 else duration(figure)
    return f"{figure:.1%}" if unit == "share" else f"{figure:,.0f}" if unit == "calls" else count(figure)


def explanation(comparison: Comparison, row: ComparedRow) -> list[str]:
    """Return sentences: the figures that disagree, and their sources according to the dry run."""
    reference = row.reference
    assert reference is not None
    worst = max(row.beyond, key=lambda p: abs(row.error(p) or 0.0))
    where = f" of rank {row.rank}" if row.rank is not None else ""
    calls = " (calls)" if row.unit == "calls" else ""
    figures = (f"{TITLES[column]} {shown(row.values[column], row.unit)}" for column in (worst, reference))
    first = f"{row.what}{where}{calls}: {', '.join(figures)}"
    difference = (row.values[reference] or 0.0) - (row.values[worst] or 0.0)
    more = f"{shown(abs(difference), row.unit)} {'more' if difference > 0 else 'less'} than {TITLES[worst]}"
    return [f"{first}: {more}.", *_explain_sources(comparison, row, abs(difference))]


def _explain_sources(comparison: Comparison, row: ComparedRow, difference: float) -> Iterator[str]:
    if row.section == "memory":
        seen = comparison.columns[1].rank(row.rank or 0)
        if seen is None:
            yield f"No dry run to ask for modules: {comparison.columns[1].about}."
        else:
            yield from _explain_memory(comparison, row, seen, difference)
    elif row.section == "traffic":
        yield from _explain_traffic(comparison, row)
    elif row.what == "step":
        yield from _explain_parts(comparison)


def _explain_memory(comparison: Comparison, row: ComparedRow, seen: RankRecord, difference: float) -> Iterator[str]:
    same_rank = (other for other in comparison.rows if other.section == "memory" and other.rank == row.rank)
    kinds = [other for other in same_rank if other.what != "peak"]
    if row.what == "peak":
        yield from _largest_parts(kinds)
    measured = comparison.columns[2].rank(row.rank or 0)
    also = f", the measured one at {phase_words(measured.when)}" if measured and measured.when else ""
    yield f"The dry run's peak is at {phase_words(seen.when)}{also}."
    kind = row.what if row.what != "peak" else "activations"
    sources = [(module.where.strip(), module.bytes) for module in seen.activations] if kind == "activations" else []
    sources = sources or [
        (f"{tensor.module or tensor.operation} ({tensor.line})", tensor.bytes)
        for tensor in seen.largest
        if tensor.kind == kind
    ]
    if sources:
        listed = ", ".join(f"{where} {shown(size, 'bytes')}" for where, size in sources[:NAMED])
        yield f"Its largest {kind}: {listed}."
    if kind == "activations" and measured and measured.activations:
        yield from _compare_activations(seen, measured)
    alike = [where for where, size in sources if difference and abs(size - difference) <= ALIKE * difference]
    if alike:
        yield f"The difference is as large as {alike[0]}."


def _compare_activations(dry: RankRecord, measured: RankRecord) -> Iterator[str]:
    """Name modules and operations whose activations differ between dry run and measurement, largest first."""
    ours, theirs = ({module.where: module.bytes for module in rank.activations} for rank in (dry, measured))
    gaps = {where: theirs.get(where, 0) - ours.get(where, 0) for where in ours | theirs}
    differences = [
        f"{where.strip()} {shown(ours.get(where, 0), 'bytes')} and {shown(theirs.get(where, 0), 'bytes')}"
        for where in sorted(gaps, key=lambda where: -abs(gaps[where]))[:NAMED]
        if gaps[where]
    ]
    if differences:
        yield f"Dry run and measurement differ in {'; '.join(differences)}."


def _largest_parts(rows: Iterable[ComparedRow]) -> Iterator[str]:
    differing = [(row, *_gap(row)) for row in rows if _gap(row)[0]]
    for row, gap, against in sorted(differing, key=lambda item: -abs(item[1]))[:NAMED]:
        yield f"Of it {row.what}: {shown(abs(gap), row.unit)} {'more' if gap > 0 else 'less'} than {against}."


def _gap(row: ComparedRow) -> tuple[float, str]:
    """Return the reference's excess over the first column that knows the figure, and that column's title."""
    at = row.reference
    other = next((column for column in range(at or 0) if row.values[column] is not None), None)
    if at is None or other is None:
        return 0.0, ""
    return (row.values[at] or 0.0) - (row.values[other] or 0.0), TITLES[other]


def _explain_traffic(comparison: Comparison, row: ComparedRow) -> Iterator[str]:
    same = [
        other for other in comparison.rows if (other.section, other.what, other.rank) == ("traffic", row.what, row.rank)
    ]
    for other in same:
        if other.unit != row.unit:
            figures = ", ".join(
                f"{title} {shown(value, other.unit)}" for title, value in zip(TITLES, other.values, strict=True)
            )
            yield f"Its {other.unit}: {figures}."
    absent = [column.title for column in comparison.columns if _lacks_traffic(column, row)]
    if absent:
        yield f"Not there at all: {', '.join(absent)}."


def _lacks_traffic(column: Column, row: ComparedRow) -> bool:
    seen = column.rank(row.rank or 0)
    sent = seen.traffic if seen else None
    return sent is not None and row.what not in {f"{entry.axis} {entry.collective}" for entry in sent}


def _explain_parts(comparison: Comparison) -> Iterator[str]:
    sentences = list(_largest_parts(row for row in comparison.rows if row.section == "time" and row.what != "step"))
    yield from sentences
    if not sentences:
        yield f"No parts to tell by: {comparison.columns[2].timeless or comparison.columns[0].timeless}."
