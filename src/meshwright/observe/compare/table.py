"""A comparison as JSON, and in the sentences that terminal and page share."""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

from meshwright.observe.compare.disagreement import TITLES, explanation
from meshwright.observe.compare.judge import ComparedRow, Comparison, room_of_small_parts
from meshwright.spec.layout.schedule import phase_words
from meshwright.spec.units import GIB

KEYS = ("planned", "dryrun", "measured")


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
            key: why
            for key, why, value in zip(KEYS, row.missing, row.values, strict=True)
            if value is None and why
        },
    }  # fmt: skip


def memory_line(comparison: Comparison, process_bytes: int) -> str:
    """Return one sentence on the memory of a finished run: the peak of tensors planned, dry run and measured.

    `process_bytes` (0 = not known) is added if the peak was not measured.
    """
    peak = next((row for row in comparison.rows if row.what == "peak" and row.rank == comparison.rank), None)
    known = [
        f"{title} {value / GIB:.2f}"
        for title, value in zip(TITLES, peak.values if peak else (), strict=False)
        if value is not None
    ]
    process_bytes = 0 if peak and peak.values[2] is not None else process_bytes
    process = f" (the process: {process_bytes / GIB:.2f} GiB with Python and torch)" if process_bytes else ""
    return f"Memory: {', '.join(known)} GiB of tensors{process}." if known else ""


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
        held = f"traffic exactly, the others within {comparison.tolerance:.0%}"
        held += f", {small} small parts within {room_of_small_parts(comparison.tolerance)}" if small else ""
        yield f"All {len(judged)} rows that are known twice agree: {held}."
    else:
        yield f"{len(bad)} of {len(judged)} rows that are known twice disagree, the first of them:"
        yield from (f"  {sentence}" for sentence in explanation(comparison, bad[0]))
