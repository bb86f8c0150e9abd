"""Prices of devices per hour: public list prices, or a user's own CSV file.

The shipped table (data/prices.csv) holds on-demand list prices with the page and the day on which each was read.
Nothing is derived: a device that nobody lists has no price. `nodes` says how far an offer reaches. `many`: nodes are
joined by a network for training (InfiniBand, RoCE, EFA). `one`: each node stands alone.

Errors of a file name the file, line and column of a bad cell.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.spec import presets
from meshwright.spec.errors import PlanError, argument
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


COLUMNS = ("device", "usd_per_gpu_hour", "nodes", "per_node", "provider", "product", "source", "read_on")
NEEDED = ("device", "usd_per_gpu_hour")
REACHES = ("one", "many")
PER_NODE = 8
"""Devices of a node if a row says nothing."""
MOST_PER_NODE = 1024
LARGEST_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One offer of one device."""

    device: str
    """Name of a preset, as H100-SXM-80."""
    key: str
    """Name as `--cluster` takes it: h100."""
    usd_per_hour: float
    """Price of one device."""
    many_nodes: bool
    """True if nodes of it are joined by a network."""
    per_node: int
    provider: str = ""
    product: str = ""
    source: str = ""
    read_on: str = ""
    """Day, as 2026-09-20."""

    @property
    def words(self) -> str:
        """Provider, product, page and day."""
        return ", ".join(filter(None, (self.provider, self.product, self.source, self.read_on)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A table of offers."""

    offers: tuple[Price, ...]
    file: str

    def lowest(self, device: str, *, many: bool) -> Price | None:
        """Return the lowest price of a device; with `many`, of offers that reach over many nodes. None = no price."""
        usable = [price for price in self.offers if price.device == device and (price.many_nodes or not many)]
        return min(usable, key=lambda price: price.usd_per_hour, default=None)

    def unpriced(self) -> tuple[str, ...]:
        """Return the devices with known figures that have no price here."""
        priced = {price.device for price in self.offers}
        return tuple(name for name in _keys() if name not in priced)


@cache
def _keys() -> Mapping[str, str]:
    """Return {name of a device: name as `--cluster` takes it}."""
    keys = (key for key in presets.device_names() if key != "local")
    return {presets.device(key).name: key for key in keys}


def shipped() -> Prices:
    """Return the table of this package, without devices that this version does not know."""
    name = "prices.csv"
    text = (files("meshwright.planner.rent") / "data" / name).read_text(encoding="utf-8")
    offers = (_price(row, _known(row)) for row in rows(text, name, COLUMNS, COLUMNS))
    return Prices(offers=tuple(filter(None, offers)), file=f"the shipped table ({name})")


def read(file: Path) -> Prices:
    """Read a user's table. Raises PlanError with file, line and column for a bad row."""
    try:
        with file.open("rb") as table:
            content = table.read(LARGEST_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{argument('prices', str(file))} cannot be read: {_reason(error)}") from None
    if len(content) > LARGEST_BYTES:
        raise PlanError(f"{argument('prices', str(file))} is larger than {LARGEST_BYTES:,} bytes: no table of prices")
    listed = []
    for row in rows(text, str(file), NEEDED, COLUMNS):
        key = _known(row)
        if key is None:
            raise row.refuse("device", f"is not known; {suggest(row.text('device').lower(), _keys().values())}")
        listed.append(_price(row, key))
    offers = tuple(filter(None, listed))
    if not offers:
        raise PlanError(f"{file}: no row: give each device a line with {' and '.join(NEEDED)}")
    return Prices(offers=offers, file=str(file))


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or "no such file" if isinstance(error, OSError) else "it is not UTF-8"


def _known(row: Row) -> str | None:
    """Return the key of a row's device. None = no such device."""
    name = row.text("device")
    if name in _keys():
        return _keys()[name]
    try:
        return _keys().get(presets.device(name).name)
    except PlanError:
        return None


def _price(row: Row, key: str | None) -> Price | None:
    usd_per_hour = row.number("usd_per_gpu_hour")
    reach = row.one_of("nodes", REACHES, "many")
    per_node = row.whole("per_node", PER_NODE)
    if per_node > MOST_PER_NODE:
        raise row.refuse("per_node", f"must be at most {MOST_PER_NODE}")
    if key is None:
        return None
    return Price(
        device=presets.device(key).name, key=key, usd_per_hour=usd_per_hour, many_nodes=reach == "many",
        per_node=per_node, provider=row.text("provider"), product=row.text("product"), source=row.text("source"),
        read_on=row.text("read_on"),
    )  # fmt: skip


def keys_of(devices: Iterable[str]) -> tuple[str, ...]:
    """Return the devices that a user named, as presets name them. Raises PlanError as presets.device does."""
    return tuple(presets.device(name, "devices").name for name in devices)
