"""Rows of planned, dry run and measured on a terminal."""

from collections.abc import Iterable, Iterator

from meshwright.interface.terminal.screen_text import coloured
from meshwright.observe.compare.comparison import ComparedRow
from meshwright.observe.compare.table import TITLES, percent

NAMES = 22
"""Columns for the names of rows."""
SCALES = {
    "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
    "seconds": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "share": ((0.01, "%"),),
}  # fmt: skip
"""Units of a row, the largest first. The largest figure of the row chooses."""
VALUE, ERROR, UNIT = 8, 8, 9
"""Columns of a figure, of its error, and of the unit at the end."""


def heads(wide: int) -> str:
    """Return the titles of the columns, behind names of `wide` letters."""
    return " " * wide + f"{TITLES[0]:>{VALUE}}{'':{ERROR}}{TITLES[1]:>{VALUE}}{'':{ERROR}}{TITLES[2]:>{VALUE}}"


def row_line(row: ComparedRow, name: str, wide: int) -> Iterator[str]:
    """Yield a row: name, planned and its error, dry run and its error, measured, unit.

    Long names have their own line.
    """
    lead = f"  {name}"
    if len(lead) > wide:
        yield lead
        lead = ""
    numbers, unit = in_one_unit(row)
    errors = [
        "small" if row.small and row.agrees() and abs(error or 0.0) > (row.tolerance or 0.0) else percent(error)
        for error in (row.error(0), row.error(1))
    ]
    cells = "".join(f"{number:>{VALUE}}{error:>{ERROR}}" for number, error in zip(numbers, errors, strict=False))
    end = "" if row.agrees() else coloured(" !", "red")
    yield f"{lead:<{wide}}{cells}{numbers[2]:>{VALUE}} {unit}{end}"


def in_one_unit(row: ComparedRow) -> tuple[list[str], str]:
    """Return the three figures in the unit of the largest, with three digits of it, and that unit. A dash = unknown."""
    most = max((abs(value) for value in row.values if value is not None), default=0.0)
    scales: Iterable[tuple[float, str]] = SCALES.get(row.unit, ((1.0, row.unit),))
    scale, unit = next((step for step in scales if most >= step[0]), list(scales)[-1])
    digits = 0 if row.unit == "calls" or unit == "B" else max(0, 2 - len(f"{most / scale:.0f}") + 1)
    digits = 1 if row.unit == "share" else digits
    return ["-" if value is None else f"{value / scale:,.{digits}f}" for value in row.values], unit


def served_rows(rows: Iterable[ComparedRow]) -> Iterator[str]:
    """Yield planned, dry run and measured of a load that ran on this machine."""
    yield heads(NAMES)
    for row in rows:
        yield from row_line(row, row.what, NAMES)
