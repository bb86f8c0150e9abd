"""A comparison as JSON, and as lines for people."""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

from meshwright.observe.compare.disagreement import TITLES, explanation, shown
from meshwright.observe.compare.judge import Comparison, Row

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
        "rows": [_row(row) for row in found.rows],
        "disagreeing": len(found.disagreeing),
        "first": None if first is None else {**_row(first), "explanation": explanation(found, first)},
    }


def _row(row: Row) -> dict[str, Any]:
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


def lines(found: Comparison) -> Iterator[str]:
    """The table, the rows of the fullest rank and those of others that disagree; what is missing, and why; the verdict
    and the explanation of the first row that disagrees."""
    for column in found.columns:
        yield f"{column.title:<9} {column.about}"
    section = ""
    for row in found.rows:
        if row.rank not in (None, found.rank) and row.what != "peak" and row.agrees():
            continue
        if row.section != section:
            section = row.section
            yield ""
            yield f"{section:<27}" + "".join(f"{title:>12}" for title in TITLES) + f"{'planned':>10}{'dry run':>9}"
        yield _line(found, row)
    yield ""
    yield from _missing(found)
    yield from verdict(found)


def brief(found: Comparison, run: str) -> Iterator[str]:
    """Under a run that has just ended: the rows that are not empty, and where the rest is."""
    rows = [row for row in found.rows if row.rank in (None, found.rank) and any(row.values)]
    yield f"{'':<27}" + "".join(f"{title:>12}" for title in TITLES) + f"{'planned':>10}{'dry run':>9}"
    yield from (_line(found, row) for row in rows)
    yield from _notes(rows)
    yield f"more: meshwright compare {run}; what is missing: meshwright profile {run}/plan.yaml"


def _line(found: Comparison, row: Row) -> str:
    several = found.plan.layout.pp > 1 and row.rank is not None
    name = (
        f"{row.what}{', rank ' + str(row.rank) if several and (row.what == 'peak' or row.rank != found.rank) else ''}"
    )
    name = f"  {row.unit}" if row.unit == "calls" and row.rank == found.rank else name
    cells = "".join(f"{shown(value, row.unit):>12}" for value in row.values)
    errors = f"{_percent(row.error(0)):>10}{_percent(row.error(1)):>9}"
    return f"{name:<27}{cells}{errors}{'' if row.agrees() else '  <'}".rstrip()


def _percent(error: float | None) -> str:
    if error is None:
        return ""
    if error == 0:
        return "="
    if not isfinite(error):
        return "new"
    return f"{error:+.1%}" if abs(error) < 9.995 else f"{error:+.0%}" if abs(error) < 100 else f"{error + 1:.0f} x"


def _missing(found: Comparison) -> Iterator[str]:
    """Each reason once, with the rows it is of."""
    rows = [row for row in found.rows if row.rank in (None, found.rank)]
    yield from _peaks(found)
    yield from _notes(rows)
    for place, title in enumerate(TITLES):
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row.values[place] is None and row.missing[place]:
                reasons.setdefault(row.missing[place], []).append(row.what)
        for why, names in reasons.items():
            yield f"not {title}: {', '.join(dict.fromkeys(names))} - {why}"


def _notes(rows: Iterable[Row]) -> Iterator[str]:
    """Each note once, with the rows it is of."""
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            notes.setdefault(row.note, []).append(row.what)
    for note, names in notes.items():
        yield f"not of one moment: {', '.join(names)} - {note}"


def _peaks(found: Comparison) -> Iterator[str]:
    """Where in the step the peak of the fullest rank stands, by each column that knows."""
    seen = [(column.title, column.rank(found.rank)) for column in found.columns]
    told = [f"{title} {one.when}" for title, one in seen if one and one.when]
    if told:
        yield f"peak of rank {found.rank} at: {'; '.join(told)}"


def verdict(found: Comparison) -> Iterator[str]:
    """One line, and the explanation where something disagrees."""
    bad, judged = found.disagreeing, found.judged
    if not judged:
        yield "Nothing could be compared: no figure is known twice."
    elif not bad:
        small = sum(row.small for row in judged)
        held = f"traffic exactly, the others within {found.tolerance:.0%}"
        held += f", {small} small parts within {found.tolerance:.0%} of a quarter of their whole" if small else ""
        yield f"All {len(judged)} rows that are known twice agree: {held}."
    else:
        yield f"{len(bad)} of {len(judged)} rows that are known twice disagree, the first of them:"
        yield from (f"  {sentence}" for sentence in explanation(found, bad[0]))
