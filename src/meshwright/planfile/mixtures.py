"""Short forms of a mixture: `data=a.jsonl:0.7,b.jsonl:0.3`, and lists of such words or mappings."""

import re

from meshwright.planfile.text import Node
from meshwright.spec.errors import PlanError

MAY_BE_MIXED = ("data", "data.path", "data.mixture")
WEIGHTED = r"(.+):(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)"
"""Pattern of a source as one word, PATH:WEIGHT."""
_FORM = "data=a.jsonl:0.7,b.jsonl:0.3"


def mixture_of(node: Node) -> Node | None:
    """Return the `data.mixture` list that a value of one of MAY_BE_MIXED describes, or None for a path or mapping.

    A word is a mixture when it has at least two parts, separated by commas, that end in `:WEIGHT`. Raises PlanError
    when only some of them do.
    """
    if isinstance(node.value, list):
        return Node([_source(source) for source in node.value], node.where) if node.value else None
    if not isinstance(node.value, str) or "," not in node.value:
        return None
    parts = node.value.split(",")
    weighted = [part for part in parts if re.fullmatch(WEIGHTED, part)]
    if not weighted:
        return None
    # a path may contain commas, but not weights: one weight is enough to take the word for a mixture
    if len(weighted) < len(parts):
        bare = next(part for part in parts if part not in weighted)
        raise PlanError(f"data={node.value}: {bare or 'one part'} has no weight: give each its own, as {_FORM}")
    return Node([_source(Node(part, node.where)) for part in parts], node.where)


def _source(source: Node) -> Node:
    """Return one source: the keys of `PATH:WEIGHT`, or a mapping unchanged."""
    if not isinstance(source.value, str):
        return source
    match = re.fullmatch(WEIGHTED, source.value)
    if match is None:
        raise PlanError(
            f"data: {source.value} has no weight: give {{path: {source.value}, weight: 1}}, or {source.value}:1"
        )
    path, weight = (Node(word, source.where) for word in match.groups())
    return Node({"path": path, "weight": weight}, source.where)
