"""The short forms of a mixture, written out: `data=a.jsonl:0.7,b.jsonl:0.3`, and lists of such words or mappings."""

import re

from meshwright.planfile.text import Given
from meshwright.spec.errors import PlanError

MAY_BE_MIXED = ("data", "data.path", "data.mixture")
_WEIGHTED = re.compile(r"(?P<path>.+):(?P<weight>\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)")
_FORM = "data=a.jsonl:0.7,b.jsonl:0.3"


def mixture_of(given: Given) -> Given | None:
    """The list of `data.mixture` that a value of one of MAY_BE_MIXED means; None where it is one path or a mapping.

    A word is a mixture where two parts or more, with commas between, end in `:WEIGHT`. PlanError where some do only.
    """
    if isinstance(given.value, list):
        return Given([_source(item) for item in given.value], given.where) if given.value else None
    if not isinstance(given.value, str) or "," not in given.value:
        return None
    parts = given.value.split(",")
    weighted = [part for part in parts if _WEIGHTED.fullmatch(part)]
    if not weighted:
        return None
    if len(weighted) < len(parts):
        bare = next(part for part in parts if part not in weighted)
        raise PlanError(f"data={given.value}: {bare or 'one part'} has no weight: give each its own, as {_FORM}")
    return Given([_source(Given(part, given.where)) for part in parts], given.where)


def _source(item: Given) -> Given:
    """One source: `PATH:WEIGHT` as its keys, a mapping as it is."""
    if not isinstance(item.value, str):
        return item
    found = _WEIGHTED.fullmatch(item.value)
    if found is None:
        raise PlanError(f"data: {item.value} has no weight: give {{path: {item.value}, weight: 1}}, or {item.value}:1")
    return Given({key: Given(word, item.where) for key, word in found.groupdict().items()}, item.where)
