"""A comparison as JSON, and in the sentences that terminal and page share.

The explanation of a disagreeing row names the modules and operations behind the difference between two columns.
"""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

from meshwright.observe.compare.comparison import Column, ComparedRow, Comparison, room_of_small_parts
from meshwright.observe.shared_document import RankRecord
from meshwright.spec.layout.schedule import phase_words
from meshwright.spec.units import GIB, count, duration, gib

NAMED = 3
"""Most sources that a sentence names."""
ALIKE = 0.05
"""A difference is attributed to what is as large as it, within this share."""
TITLES = ("planned", "dry run", "measured")
KEYS = ("planned", "dryrun", "measured")


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
    # States follow from the plan, so a peak that is off is mostly off in activations.
    kind = row.what if row.what != "peak" else "activations"
    sources = [(module.where.strip(), module.bytes) for module in seen.activations] if kind == "activations" else []
    # Only activations are summed by module. Of other kinds the largest tensors have to do.
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
    # A source as large as the gap is often the cause: one column counts it, and another does not.
    as_large = [where for where, size in sources if difference and abs(size - difference) <= ALIKE * difference]
    if as_large:
        yield f"The difference is as large as {as_large[0]}."


def _compare_activations(dry: RankRecord, measured: RankRecord) -> Iterator[str]:
    """Name modules and operations whose activations differ between dry run and measurement, largest first."""
    dry_bytes, measured_bytes = (
        {module.where: module.bytes for module in rank.activations} for rank in (dry, measured)
    )
    gaps = {where: measured_bytes.get(where, 0) - dry_bytes.get(where, 0) for where in dry_bytes | measured_bytes}
    differences = [
        f"{where.strip()} {shown(dry_bytes.get(where, 0), 'bytes')} and {shown(measured_bytes.get(where, 0), 'bytes')}"
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


def as_json(comparison: Comparison, run: str) -> dict[str, Any]:
    """Return all rows.

    Errors are relative to the measured figure (or that of `reference`). null = not known; of `agrees`, no figure is
    known twice.
    """
    first = next(iter(comparison.disagreeing), None)
    return {
        "run": run,
        "tolerance": comparison.tolerance,
        "judged": len(comparison.judged),
        "agrees": first is None if comparison.judged else None,
        "rank": comparison.rank,
        "columns": {
            key: {"there": column.document is not None, "about": column.about}
            for key, column in zip(KEYS, comparison.columns, strict=True)
        },
        "rows": [row_json(row) for row in comparison.rows],
        "disagreeing": len(comparison.disagreeing),
        "first": None if first is None else {**row_json(first), "explanation": explanation(comparison, first)},
    }


def row_json(row: ComparedRow) -> dict[str, Any]:
    """Return one row of the document."""
    at = row.reference
    errors = {
        f"{key}_error": error if error is not None and isfinite(error) else None
        for column, key in enumerate(KEYS[:2])
        for error in [row.error(column)]
    }
    return {
        "section": row.section,
        "what": row.what,
        "rank": row.rank,
        "unit": row.unit,
        **dict(zip(KEYS, row.values, strict=True)),
        **errors,
        "reference": None if at is None else KEYS[at],
        "tolerance": row.tolerance,
        "aside": [KEYS[column] for column in row.aside],
        "note": row.note,
        "agrees": row.agrees(),
        "beyond": [KEYS[column] for column in row.beyond],
        "missing": {
            key: why for key, why, value in zip(KEYS, row.missing, row.values, strict=True) if value is None and why
        },
    }


def memory_line(comparison: Comparison, process_bytes: int) -> str:
    """Return one sentence on the memory of a finished run: the peak of tensors planned, dry run and measured.

    `process_bytes` (0 = not known) is added if the peak was not measured.
    """
    peak = next((row for row in comparison.rows if row.what == "peak" and row.rank == comparison.rank), None)
    figures = [
        f"{title} {value / GIB:.2f}"
        for title, value in zip(TITLES, peak.values if peak else (), strict=False)
        if value is not None
    ]
    # Resident memory says little where a peak of tensors is measured: libraries take most of a small run's.
    process_bytes = 0 if peak and peak.values[2] is not None else process_bytes
    process = f" (the process: {process_bytes / GIB:.2f} GiB with Python and torch)" if process_bytes else ""
    return f"Memory: {', '.join(figures)} GiB of tensors{process}." if figures else ""


def percent(error: float | None) -> str:
    """Format the error of a figure. Empty = nothing to compare it with."""
    if error is None:
        return ""
    if error == 0:
        return "="
    if not isfinite(error):
        return "new"
    return f"{error:+.1%}" if abs(error) < 9.995 else f"{error:+.0%}" if abs(error) < 100 else f"{error + 1:.0f} x"


def missing(comparison: Comparison) -> Iterator[str]:
    """Yield each reason for missing figures once, with its rows."""
    rows = [row for row in comparison.rows if row.rank in (None, comparison.rank)]
    for column, title in enumerate(TITLES):
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row.values[column] is None and row.missing[column]:
                reasons.setdefault(row.missing[column], []).append(row.what)
        for reason, names in reasons.items():
            yield f"not {title}: {', '.join(dict.fromkeys(names))} - {reason}"


def notes(rows: Iterable[ComparedRow]) -> Iterator[str]:
    """Yield each note once, with its rows."""
    rows_by_note: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            rows_by_note.setdefault(row.note, []).append(row.what)
    for note, names in rows_by_note.items():
        yield f"sampled at different moments, not comparable: {', '.join(names)} - {note}"


def peaks(comparison: Comparison) -> Iterator[str]:
    """Yield where in the step the peak of the fullest rank occurs, by each column that knows."""
    seen = [(column.title, column.rank(comparison.rank)) for column in comparison.columns]
    moments = [f"{title} {phase_words(record.when)}" for title, record in seen if record and record.when]
    if moments:
        yield f"peak of rank {comparison.rank} at: {'; '.join(moments)}"


def verdict(comparison: Comparison) -> Iterator[str]:
    """Yield one line, and the explanation of the first disagreement."""
    bad, judged = comparison.disagreeing, comparison.judged
    if comparison.columns[0].elsewhere:
        yield comparison.columns[0].elsewhere
    if not judged:
        yield "Nothing could be compared: no figure is known twice."
    elif not bad:
        small = sum(row.small for row in judged)
        tolerances = f"traffic exactly, the others within {comparison.tolerance:.0%}"
        tolerances += f", {small} small parts within {room_of_small_parts(comparison.tolerance)}" if small else ""
        yield f"All {len(judged)} rows that are known twice agree: {tolerances}."
    else:
        yield f"{len(bad)} of {len(judged)} rows that are known twice disagree, the first of them:"
        yield from (f"  {sentence}" for sentence in explanation(comparison, bad[0]))
