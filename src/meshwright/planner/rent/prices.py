"""What a device costs an hour: public list prices, or a user's own; a device without a price has none.

The shipped table (data/prices.csv) holds on-demand list prices with the page and the day on which each was read.
Nothing is derived: a device that nobody lists stays without a price. `nodes` says what an offer is good for: `many`
where its nodes are joined by a network for training (InfiniBand, RoCE, EFA), `one` where each node stands alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from meshwright.planner.rent.tables import Row, rows
from meshwright.spec import presets
from meshwright.spec.errors import PlanError
from meshwright.spec.presets import suggested

COLUMNS = ("device", "usd_per_gpu_hour", "nodes", "per_node", "provider", "product", "source", "read_on")
NEEDED = ("device", "usd_per_gpu_hour")
REACHES = ("one", "many")
PER_NODE = 8
"""Devices of a node, where a row says nothing."""
MOST_PER_NODE = 1024
LARGEST_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One offer of one device."""

    device: str
    """Name of a preset, as H100-SXM-80."""
    key: str
    """The same as `--cluster` takes it: h100."""
    usd_per_hour: float
    """Of one device."""
    many_nodes: bool
    """Whether nodes of it are joined by a network."""
    per_node: int
    provider: str = ""
    product: str = ""
    source: str = ""
    read_on: str = ""
    """Day, as 2026-09-20."""

    @property
    def words(self) -> str:
        """Who, what, where and when."""
        return ", ".join(filter(None, (self.provider, self.product, self.source, self.read_on)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A table of offers."""

    offers: tuple[Price, ...]
    file: str

    def of(self, device: str, *, many: bool) -> Price | None:
        """The lowest price of a device, of offers that are good for many nodes where that is asked; None = no price."""
        found = [one for one in self.offers if one.device == device and (one.many_nodes or not many)]
        return min(found, key=lambda one: one.usd_per_hour, default=None)

    def unpriced(self) -> tuple[str, ...]:
        """Devices with known figures that this table has no price of."""
        priced = {one.device for one in self.offers}
        return tuple(name for name in _keys() if name not in priced)


@cache
def _keys() -> Mapping[str, str]:
    """Name of a device -> as `--cluster` takes it."""
    keys = (key for key in presets.device_names() if key != "local")
    return {presets.device(key).name: key for key in keys}


def shipped() -> Prices:
    """The table of this package. Rows of devices that this version does not know are left out."""
    name = "prices.csv"
    text = (files("meshwright.planner.rent.data") / name).read_text(encoding="utf-8")
    found = (_price(row, _known(row)) for row in rows(text, name, COLUMNS, COLUMNS))
    return Prices(offers=tuple(one for one in found if one is not None), file=f"the shipped table ({name})")


def read(file: Path) -> Prices:
    """A user's table; it stands in place of the shipped one. PlanError with file, line and column for a bad row."""
    try:
        with file.open("rb") as table:
            content = table.read(LARGEST_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"prices={str(file)!r} cannot be read: {_reason(error)}") from None
    if len(content) > LARGEST_BYTES:
        raise PlanError(f"prices={str(file)!r} is larger than {LARGEST_BYTES:,} bytes: no table of prices")
    found = []
    for row in rows(text, str(file), NEEDED, COLUMNS):
        key = _known(row)
        if key is None:
            raise row.refuse("device", f"is not known; {suggested(row.text('device').lower(), _keys().values())}")
        found.append(_price(row, key))
    offers = tuple(filter(None, found))
    if not offers:
        raise PlanError(f"{file}: no row: give each device a line with {' and '.join(NEEDED)}")
    return Prices(offers=offers, file=str(file))


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or "no such file" if isinstance(error, OSError) else "it is not UTF-8"


def _known(row: Row) -> str | None:
    """The key of a row's device; None where there is no such device."""
    given = row.text("device")
    if given in _keys():
        return _keys()[given]
    try:
        return _keys().get(presets.device(given).name)
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
    """Names of devices, as presets have them, from what a user typed; PlanError as presets.device."""
    return tuple(presets.device(name, f"devices={name!r}").name for name in devices)
