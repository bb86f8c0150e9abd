"""Rows of a CSV file by column. Errors name the file, line and column of a bad cell."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from meshwright.spec.errors import PlanError
from meshwright.spec.presets import suggest


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a file."""

    file: str
    line: int
    cells: dict[str, str]

    def refuse(self, column: str, why: str) -> PlanError:
        """Return the error `prices.csv:3: column usd_per_gpu_hour: 'abc' must be a number above 0`."""
        return PlanError(f"{self.file}:{self.line}: column {column}: {self.cells.get(column, '')[:60]!r} {why}")

    def text(self, column: str, default: str = "") -> str:
        """Return a cell without blanks around it. `default` stands for an empty or missing one."""
        return self.cells.get(column, "").strip() or default

    def number(self, column: str, default: float | None = None) -> float:
        """Return a number above 0. `default` stands for an empty cell. Raises PlanError for anything else."""
        text = self.text(column)
        if not text and default is not None:
            return default
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not (isfinite(number) and number > 0):
            raise self.refuse(column, "must be a number above 0")
        return number

    def whole(self, column: str, default: int) -> int:
        """Return a whole number above 0. Raises PlanError as `number` does."""
        value = self.number(column, default)
        if value != int(value):
            raise self.refuse(column, "must be a whole number")
        return int(value)

    def one_of(self, column: str, known: Sequence[str], default: str) -> str:
        """Return one of some words. Raises PlanError as `number` does."""
        value = self.text(column, default)
        if value not in known:
            raise self.refuse(column, f"must be one of {', '.join(known)}")
        return value


def _cells(reader: Any, file: str) -> Iterator[list[str]]:
    """Yield the cells of each line. Raises PlanError, with the line, for text that is no CSV."""
    try:
        yield from reader
    except csv.Error as error:
        raise PlanError(f"{file}:{reader.line_num}: no CSV ({error})") from None


def rows(text: str, file: str, needed: Sequence[str], known: Sequence[str]) -> Iterator[Row]:
    """Yield the rows. Raises PlanError, with file and line, for missing or unknown columns and uneven rows."""
    reader = csv.reader(io.StringIO(text))
    head = [name.strip() for name in next(_cells(reader, file), [])]
    for name in needed:
        if name not in head:
            raise PlanError(f"{file}:1: column {name} is missing: the first line names the columns, {', '.join(known)}")
    for name in head:
        if name not in known:
            raise PlanError(f"{file}:1: column {name[:60]!r} is not known; {suggest(name, known, 1)}")
    for at, name in enumerate(head):
        if name in head[:at]:
            raise PlanError(f"{file}:1: column {name} is there twice: leave one out")
    for cells in _cells(reader, file):
        if not any(map(str.strip, cells)):
            continue
        if len(cells) != len(head):
            raise PlanError(f"{file}:{reader.line_num}: {len(cells)} cells, and the first line has {len(head)}")
        yield Row(file=file, line=reader.line_num, cells=dict(zip(head, cells, strict=True)))
