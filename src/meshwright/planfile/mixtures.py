"""The short forms of a mixture, written out: `data=a.jsonl:0.7,b.jsonl:0.3`, and lists of such words or mappings."""

import re

from meshwright.planfile.text import Given
from meshwright.spec.errors import PlanError

MAY_BE_MIXED = ("data", "data.path", "data.mixture")
WEIGHTED = r"(.+):(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)"
"""A source as a word: PATH:WEIGHT."""
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
    weighted = [part for part in parts if re.fullmatch(WEIGHTED, part)]
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
    found = re.fullmatch(WEIGHTED, item.value)
    if found is None:
        raise PlanError(f"data: {item.value} has no weight: give {{path: {item.value}, weight: 1}}, or {item.value}:1")
    path, weight = (Given(word, item.where) for word in found.groups())
    return Given({"path": path, "weight": weight}, item.where)
