"""Answer of `compare` on the terminal: the verdict, then the rows that differ. Equal rows take one sentence."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.interface.terminal.compared_rows import ERROR, UNIT, VALUE, heads, row_line, served_rows
from meshwright.interface.terminal.screen_text import dot, marked, width, wrapped
from meshwright.observe.compare.comparison import ComparedRow, Comparison, room_of_small_parts
from meshwright.observe.compare.table import TITLES, explanation, missing, notes, peaks, shown
from meshwright.spec.units import many

if TYPE_CHECKING:
    from meshwright.verbs.compare.answer import ServingComparison

UNKNOWN = "--all also says why a figure is unknown; meshwright profile measures the most figures."


def answer(
    comparison: Comparison, run: str, *, every: bool = False, goodput: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield all lines. `every`: all rows of all ranks, also those that agree or have one figure."""
    columns = width()
    yield from _verdict(comparison, run)
    rows = [row for row in comparison.rows if any(value is not None for value in row.values)]
    table = rows if every else [row for row in rows if _differs(row)]
    names = {id(row): _name(comparison, row) for row in table}
    # Names share a width, which leaves room for the figures.
    wide = min(max((len(name) for name in names.values()), default=0) + 2, columns - 3 * VALUE - 2 * ERROR - UNIT)
    if table:
        yield ""
        yield heads(wide)
    for section in dict.fromkeys(row.section for row in rows):
        listed = [row for row in table if row.section == section]
        if listed:
            yield section
        for row in listed:
            yield from row_line(row, names[id(row)], wide)
        if not every:
            yield from _rest(comparison, [row for row in rows if row.section == section and row not in listed], section)
    yield ""
    of_rank = [row for row in comparison.rows if row.rank in (None, comparison.rank)]
    for sentence in (
        *peaks(comparison),
        *notes(of_rank),
        *(missing(comparison) if every else [*_unjudged(comparison), UNKNOWN]),
    ):
        yield from wrapped(sentence, columns, "", "  ")
    if goodput is not None:
        yield from wrapped(f"{goodput['words']}. {goodput['advice']}".strip(), columns, f"{'hours:':<10}")
    for column in comparison.columns:
        yield from wrapped(column.about, columns, f"{column.title + ':':<10}")


def _unjudged(comparison: Comparison) -> Iterator[str]:
    """Explain why peak and step time, which people look for first, are not judged."""
    for row in comparison.rows:
        if row.what in ("peak", "step") and row.rank in (None, comparison.rank):
            for column in (0, 2):
                if row.values[column] is None and row.missing[column]:
                    yield f"{row.what} not {TITLES[column]}: {row.missing[column]}"


def _verdict(comparison: Comparison, run: str) -> Iterator[str]:
    bad, judged, columns = comparison.disagreeing, comparison.judged, width()
    bounds = f"tolerance {comparison.tolerance:.0%}, traffic exact"
    if not judged:
        yield from wrapped(f"Nothing could be compared: no figure is known twice. {run}", columns)
        return
    good = len(judged) - len(bad)
    word, colour = ("DIFFERS", "red") if bad else ("AGREES", "green")
    summary = f"{good} of {many(len(judged), 'row')} {'agrees' if good == 1 else 'agree'} ({bounds})  {run}"
    yield from marked(wrapped(summary, columns, f"{word}  "), word, colour)
    for sentence in filter(None, (comparison.columns[0].elsewhere, *(explanation(comparison, bad[0]) if bad else ()))):
        yield from wrapped(sentence, columns, "  ")
    small = sum(row.small for row in judged)
    if small and not bad:
        room = room_of_small_parts(comparison.tolerance)
        yield from wrapped(f"{many(small, 'small part')} may differ by {room}.", columns, "  ")


def _differs(row: ComparedRow) -> bool:
    """Return if a row deserves a line: known twice and unequal, or a peak that is known twice."""
    number_of_figures = sum(value is not None for value in row.values)
    if number_of_figures < 2:
        return False
    return row.what.startswith("peak") or bool(row.note) or any(row.error(column) for column in (0, 1))


def _rest(comparison: Comparison, rows: Sequence[ComparedRow], section: str) -> Iterator[str]:
    """Summarize the rows without a line of their own: equal ones, and those of one column."""
    equal = [row for row in rows if sum(value is not None for value in row.values) > 1]
    if section == "traffic" and equal:
        number = len({row.what for row in equal})
        all_of = "all " if len(equal) == len([row for row in comparison.rows if row.section == section]) else ""
        yield f"traffic  {many(number, 'collective')}, {all_of}equal to the byte (--all)"
    elif equal:
        yield f"  ... {many(len(equal), 'row')} equal (--all)"
    for column, title in enumerate(TITLES):
        alone = [row for row in rows if row not in equal and row.values[column] is not None]
        shown_rows = [
            row for row in alone if row.rank in (None, comparison.rank) and row.unit != "calls" and row.values[column]
        ]
        if shown_rows:
            figures = ", ".join(f"{row.what} {shown(row.values[column], row.unit)}" for row in shown_rows)
            yield from wrapped(figures, width(), f"{section}, only {title}: ", "  ")


def _name(comparison: Comparison, row: ComparedRow) -> str:
    several = comparison.plan.layout.pp > 1 and row.rank is not None
    rank = f", rank {row.rank}" if several and (row.what == "peak" or row.rank != comparison.rank) else ""
    return f"{row.what}{rank}"


def served_load(comparison: "ServingComparison") -> Iterator[str]:
    """Yield all lines of `compare --serve`."""
    asked = comparison.plan.asked
    word, colour = ("AGREES", "green") if comparison.agrees else ("DIFFERS", "red")
    yield from marked(wrapped(repr(comparison), width(), f"{word}  "), word, colour)
    parts = [f"{asked.input_tokens:,} tokens in", f"{asked.output_tokens:,} out", f"{asked.concurrency:,} in flight"]
    yield "  " + dot().join(parts)
    yield ""
    yield from served_rows(comparison.compared)
