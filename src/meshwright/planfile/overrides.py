"""Keys that overrides set, and which override decides the length of the run."""

from collections.abc import Iterator, Sequence

from meshwright.planfile.keys import LENGTHS, canonical_key, join, sections
from meshwright.planfile.text import Node, parse_override


def overridden_keys(override: str) -> set[str]:
    """Return the canonical dotted names of the keys that an override sets.

    `recipe.max-steps=5` and `recipe={steps: 5}` both set recipe.steps.
    """
    path, node = parse_override(override)
    section = ""
    for key in path:
        section = join(section, canonical_key(section, key) if section in sections() else key)
    return set(_named(section, node))


def _named(name: str, node: Node) -> Iterator[str]:
    if not isinstance(node.value, dict):
        yield name
        return
    for key, child in node.value.items():
        yield from _named(join(name, canonical_key(name, key) if name in sections() else key), child)


def with_one_length(overrides: Sequence[str]) -> Sequence[str]:
    """Return the overrides plus those that reset the other LENGTHS: the last override of the length wins."""
    for override in reversed(overrides):
        if keys := overridden_keys(override) & set(LENGTHS):
            return [*overrides, *(f"{key}=0" for key in LENGTHS[1:] if key not in keys)]
    return overrides


def ignored_lengths(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a note for each override of the length that a later one replaces."""
    lengths = [(override, keys) for override in overrides if (keys := overridden_keys(override) & set(LENGTHS))]
    for override, keys in lengths[:-1]:
        last, taken = lengths[-1]
        if keys - taken:
            yield f"{override} is not taken: {last} says how long the run is, and comes later"
