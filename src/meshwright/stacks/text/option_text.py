"""An option as it stands in a file, and as it is to be written there."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An option that was read."""

    key: str
    """Dotted where files nest."""
    value: Any
    line: int
    """From 1; 0 = not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An option that is written, with its meaning beside it."""

    key: str
    value: Any
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A name, or a call of one, as the value of an option in Python: `SelectiveAC.Config()`."""

    name: str


def nested(settings: Iterable[Setting]) -> dict[str, Any]:
    """Dotted keys as mappings of mappings, in their order; a setting stands where its value was."""
    found: dict[str, Any] = {}
    for one in settings:
        *folders, last = one.key.split(".")
        place = found
        for name in folders:
            place = place.setdefault(name, {})
        place[last] = one
    return found


def flat(value: Any, key: str = "") -> Iterable[tuple[str, Any]]:
    """(dotted key, value) of all that is no mapping with something in it."""
    if isinstance(value, Mapping) and (value or not key):
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
