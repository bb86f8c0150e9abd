"""A comparison as JSON, and in the sentences that terminal and page share."""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

from meshwright.observe.compare.disagreement import TITLES, explanation
from meshwright.observe.compare.judge import ComparedRow, Comparison, room_of_small_parts
from meshwright.spec.schedule import phase_words
from meshwright.spec.units import GIB

KEYS = ("planned", "dryrun", "measured")


def as_json(found: Comparison, run: str) -> dict[str, Any]:
    """All rows; errors are relative to the measured figure (`reference` says to which); null: not known, and of
    `agrees`: no figure is known twice."""
    first = next(iter(found.disagreeing), None)
    return {
        "run": run,
        "tolerance": found.tolerance,
        "judged": len(found.judged),
        "agrees": first is None if found.judged else None,
        "rank": found.rank,
        "columns": {
            key: {"there": column.found is not None, "about": column.about}
            for key, column in zip(KEYS, found.columns, strict=True)
        },
        "rows": [row_json(row) for row in found.rows],
        "disagreeing": len(found.disagreeing),
        "first": None if first is None else {**row_json(first), "explanation": explanation(found, first)},
    }


def row_json(row: ComparedRow) -> dict[str, Any]:
    """A row of the document."""
    at = row.reference
    errors = {
        f"{key}_error": error if error is not None and isfinite(error) else None
        for place, key in enumerate(KEYS[:2])
        for error in [row.error(place)]
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
        "aside": [KEYS[place] for place in row.aside],
        "note": row.note,
        "agrees": row.agrees(),
        "beyond": [KEYS[place] for place in row.beyond],
        "missing": {
            key: why
            for key, why, value in zip(KEYS, row.missing, row.values, strict=True)
            if value is None and why
        },
    }  # fmt: skip


def memory_line(found: Comparison, process_bytes: int) -> str:
    """One sentence under a run that has ended: the peak of tensors, planned, in the dry run and measured; apart from it
    what the process took, where that is known (0 = it is not)."""
    peak = next((row for row in found.rows if row.what == "peak" and row.rank == found.rank), None)
    known = [
        f"{title} {value / GIB:.2f}"
        for title, value in zip(TITLES, peak.values if peak else (), strict=False)
        if value is not None
    ]
    process_bytes = 0 if peak and peak.values[2] is not None else process_bytes
    process = f" (the process: {process_bytes / GIB:.2f} GiB with Python and torch)" if process_bytes else ""
    return f"Memory: {', '.join(known)} GiB of tensors{process}." if known else ""


def percent(error: float | None) -> str:
    """How far a figure is off; empty where nothing is known to compare it with."""
    if error is None:
        return ""
    if error == 0:
        return "="
    if not isfinite(error):
        return "new"
    return f"{error:+.1%}" if abs(error) < 9.995 else f"{error:+.0%}" if abs(error) < 100 else f"{error + 1:.0f} x"


def missing(found: Comparison) -> Iterator[str]:
    """Each reason why a figure is not known once, with the rows it is of."""
    rows = [row for row in found.rows if row.rank in (None, found.rank)]
    for place, title in enumerate(TITLES):
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row.values[place] is None and row.missing[place]:
                reasons.setdefault(row.missing[place], []).append(row.what)
        for why, names in reasons.items():
            yield f"not {title}: {', '.join(dict.fromkeys(names))} - {why}"


def notes(rows: Iterable[ComparedRow]) -> Iterator[str]:
    """Each note once, with the rows it is of."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            found.setdefault(row.note, []).append(row.what)
    for note, names in found.items():
        yield f"sampled at different moments, not comparable: {', '.join(names)} - {note}"


def peaks(found: Comparison) -> Iterator[str]:
    """Where in the step the peak of the fullest rank stands, by each column that knows."""
    seen = [(column.title, column.rank(found.rank)) for column in found.columns]
    told = [f"{title} {phase_words(one.when)}" for title, one in seen if one and one.when]
    if told:
        yield f"peak of rank {found.rank} at: {'; '.join(told)}"


def verdict(found: Comparison) -> Iterator[str]:
    """One line, and the explanation where something disagrees."""
    bad, judged = found.disagreeing, found.judged
    if found.columns[0].elsewhere:
        yield found.columns[0].elsewhere
    if not judged:
        yield "Nothing could be compared: no figure is known twice."
    elif not bad:
        small = sum(row.small for row in judged)
        held = f"traffic exactly, the others within {found.tolerance:.0%}"
        held += f", {small} small parts within {room_of_small_parts(found.tolerance)}" if small else ""
        yield f"All {len(judged)} rows that are known twice agree: {held}."
    else:
        yield f"{len(bad)} of {len(judged)} rows that are known twice disagree, the first of them:"
        yield from (f"  {sentence}" for sentence in explanation(found, bad[0]))
