"""Options as read from a file and as written to it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Option that was read."""

    key: str
    """Key, dotted where files nest."""
    value: Any
    line: int
    """Line number from 1. 0 = unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Option to write, with its meaning beside it."""

    key: str
    value: Any
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """Name or call as the value of an option in Python: `SelectiveAC.Config()`."""

    name: str


def nest(settings: Iterable[Setting]) -> dict[str, Any]:
    """Return dotted keys as nested mappings in their order, with each setting at its last name."""
    tree: dict[str, Any] = {}
    for setting in settings:
        *folders, last = setting.key.split(".")
        branch = tree
        for name in folders:
            branch = branch.setdefault(name, {})
        branch[last] = setting
    return tree


def flatten(value: Any, key: str = "") -> Iterable[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that is not a mapping with entries."""
    if isinstance(value, Mapping) and (value or not key):
        for name, inner in value.items():
            yield from flatten(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
