"""Keys that overrides set, and which override decides the length of the run."""

from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.planfile.keys import LENGTHS, canonical_key, join, sections
from meshwright.planfile.text import Node, parse_override

OPTIONAL = LENGTHS[1:]
"""Lengths that are 0 when unused."""


def overridden_keys(override: str) -> set[str]:
    """Return the canonical dotted names of the keys that an override sets.

    `recipe.max-steps=5` and `recipe={steps: 5}` both set recipe.steps.
    """
    return set(_settings(override))


def _settings(override: str) -> dict[str, Any]:
    path, node = parse_override(override)
    section = ""
    for key in path:
        section = join(section, canonical_key(section, key) if section in sections() else key)
    return dict(_named(section, node))


def _named(name: str, node: Node) -> Iterator[tuple[str, Any]]:
    if not isinstance(node.value, dict):
        yield name, node.value
        return
    for key, child in node.value.items():
        yield from _named(join(name, canonical_key(name, key) if name in sections() else key), child)


def _lengths(override: str) -> set[str]:
    """Return the LENGTHS that an override sets. `recipe.epochs=0` sets none: it leaves the length to the others."""
    unused = {key for key, word in _settings(override).items() if key in OPTIONAL and _zero(word)}
    return (overridden_keys(override) & set(LENGTHS)) - unused


def _zero(word: Any) -> bool:
    try:
        return float(word) == 0
    except (TypeError, ValueError):
        return False


def with_one_length(overrides: Sequence[str]) -> Sequence[str]:
    """Return the overrides plus those that reset the other LENGTHS: the last override of the length wins."""
    for override in reversed(overrides):
        if keys := _lengths(override):
            return [*overrides, *(f"{key}=0" for key in OPTIONAL if key not in keys)]
    return overrides


def ignored_lengths(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a note for each override of the length that a later one replaces."""
    lengths = [(override, keys) for override in overrides if (keys := _lengths(override))]
    for override, keys in lengths[:-1]:
        last, taken = lengths[-1]
        if keys - taken:
            yield f"{override} is not taken: {last} says how long the run is, and comes later"
