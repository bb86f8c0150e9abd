"""The rows of claims.toml: a sentence, the command that makes its figure, where the figure stands, and its bar."""

import operator
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

RELATIONS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}
SCALES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "GB": 10**9, "ms": 1e-3}
"""What one unit of the page is in the base unit (bytes, seconds) that the commands report."""


class ClaimsError(Exception):
    """A table, a command line or a kept record that cannot be used; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A relation a figure must have to a number: `<= 2.3`."""

    relation: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "Bar":
        """Read `RELATION NUMBER`; raises ValueError for anything else."""
        relation, number = text.split()
        if relation not in RELATIONS:
            raise ValueError(relation)
        return cls(relation=relation, value=float(number))

    def holds(self, figure: float) -> bool:
        """Whether the figure is on the right side; a figure that is no number never is."""
        return RELATIONS[self.relation](figure, self.value)

    def __str__(self) -> str:
        return f"{self.relation} {self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One row."""

    id: str
    text: str
    command: str
    """Run from the root of the checkout, without a shell."""
    read: str
    """`exit status`, `seconds` (wall time of the command), or a dotted path into the JSON document on its stdout."""
    bar: Bar
    unit: str = ""
    """As printed. A JSON key ends in its own unit (`_bytes`, `_seconds`); a unit of SCALES converts it."""
    slow: bool = False
    limit_s: float = 900.0
    """The command is stopped, and the claim fails, after so long."""

    @property
    def scale(self) -> float:
        """The figure is divided by this before it meets the bar."""
        return SCALES.get(self.unit, 1.0)


def load(path: Path) -> list[Claim]:
    """Every row of a claims file; raises ClaimsError naming the row and the key that is wrong."""
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("claim", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ClaimsError(f"{path.name} cannot be read: {error}") from error
    claims = [_claim(row, path.name) for row in rows]
    ids = [claim.id for claim in claims]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ClaimsError(f"{path.name}: the id {twice[0]!r} stands in two rows; give each row its own")
    return claims


def _claim(row: Mapping[str, Any], where: str) -> Claim:
    name = row.get("id", "a row without id")
    known = {field.name for field in fields(Claim)}
    if unknown := sorted(set(row) - known):
        raise ClaimsError(f"{where}, {name}: unknown key {unknown[0]!r}; a row has {', '.join(sorted(known))}")
    if missing := sorted({"id", "text", "command", "read", "bar"} - set(row)):
        raise ClaimsError(f"{where}, {name}: {missing[0]!r} is missing")
    try:
        bar = Bar.parse(row["bar"])
    except (ValueError, AttributeError) as error:
        raise ClaimsError(f"{where}, {name}: bar {row['bar']!r} is not a relation and a number, as '<= 2.3'") from error
    return Claim(**{**row, "bar": bar})
