"""What overrides of a plan name, and which of them say how long a run is."""

from collections.abc import Iterator, Sequence

from meshwright.planfile.keys import LENGTHS, join, own_name, sections
from meshwright.planfile.text import Given, parse_override


def said(override: str) -> set[str]:
    """Dotted names, ours, of the keys that an override sets: `recipe.max-steps=5` and `recipe={steps: 5}` set
    recipe.steps."""
    path, value = parse_override(override)
    found = ""
    for key in path:
        found = join(found, own_name(found, key) if found in sections() else key)
    return set(_named(found, value))


def _named(name: str, given: Given) -> Iterator[str]:
    if not isinstance(given.value, dict):
        yield name
        return
    for key, item in given.value.items():
        yield from _named(join(name, own_name(name, key) if name in sections() else key), item)


def of_one_length(overrides: Sequence[str]) -> Sequence[str]:
    """The overrides; the last that says how long the run is takes the other keys of LENGTHS away."""
    for override in reversed(overrides):
        if keys := said(override) & set(LENGTHS):
            return [*overrides, *(f"{key}=0" for key in LENGTHS[1:] if key not in keys)]
    return overrides


def passed_over(overrides: Sequence[str]) -> Iterator[str]:
    """What is said of overrides whose length of the run is not taken."""
    found = [(override, keys) for override in overrides if (keys := said(override) & set(LENGTHS))]
    for override, keys in found[:-1]:
        last, taken = found[-1]
        if keys - taken:
            yield f"{override} is not taken: {last} says how long the run is, and comes later"
