"""What Python decides for a finite set of states, as tables that the explorer's page looks up.

A question is a function of values that it asks for by name. It is asked again for every value of each name that it
reads, so a table branches on what the answer depends on and on nothing else: nobody says by hand which rule reads what.
Equal tables are written once, and a name whose values all lead to one table is left out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Values = dict[str, Any]
"""Name of an axis -> its value."""
Answer = Any
"""What JSON can hold."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Which values of some axes go together."""

    axes: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


class Unread(Exception):
    """A question read an axis that has no value yet."""

    def __init__(self, axis: str) -> None:
        super().__init__(axis)
        self.axis = axis


class Domain:
    """The values of every axis, beside what the others have."""

    def __init__(self, relations: Iterable[Relation]) -> None:
        self._relations = tuple(relations)
        self.axes = frozenset(axis for one in self._relations for axis in one.axes)
        self._known: dict[tuple[Any, ...], frozenset[Any]] = {}

    def values(self, axis: str, given: Values) -> list[Any]:
        """Ascending: those that each relation has beside what is given."""
        found = [self._of(n, axis, given) for n, one in enumerate(self._relations) if axis in one.axes]
        return sorted(frozenset.intersection(*found))

    def _of(self, number: int, axis: str, given: Values) -> frozenset[Any]:
        relation = self._relations[number]
        beside = tuple((n, given[name]) for n, name in enumerate(relation.axes) if name in given)
        key = (number, axis, beside)
        if key not in self._known:
            place = relation.axes.index(axis)
            rows = (row for row in relation.rows if all(row[n] == value for n, value in beside))
            self._known[key] = frozenset(row[place] for row in rows)
        return self._known[key]


class TracedReads:
    """An object some of whose fields are axes: reading one without a value raises Unread. Properties and methods of its
    class read through it; all other fields are those of `real`."""

    def __init__(self, real: object, given: Values, axes: Mapping[str, str]) -> None:
        self._real, self._given, self._axes = real, given, axes

    def __getattr__(self, name: str) -> Any:
        if name in self._axes:
            axis = self._axes[name]
            if axis not in self._given:
                raise Unread(axis)
            return self._given[axis]
        declared = getattr(type(self._real), name, None)
        if isinstance(declared, property) and declared.fget is not None:
            return declared.fget(self)
        if callable(declared):
            return declared.__get__(self)
        return getattr(self._real, name)


@dataclass(slots=True)
class Tables:
    """Nodes of all tables: `{"is": answer}`, or `{"by": axis, "to": {value: node}, "else": node}`."""

    domain: Domain
    nodes: list[dict[str, Any]] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)

    def add(self, question: Callable[[Values], Answer]) -> int:
        """The node with which the answers to a question begin."""
        found = self._of(question, {})
        if found is None:
            raise ValueError("a question about no state at all")
        return found

    def _of(self, question: Callable[[Values], Answer], given: Values) -> int | None:
        """None where no state has these values together."""
        try:
            return self._node({"is": question(given)})
        except Unread as unread:
            axis = unread.axis
        every = {value: self._of(question, {**given, axis: value}) for value in self.domain.values(axis, given)}
        to = {value: node for value, node in every.items() if node is not None}
        if not to:
            return None
        usual, _ = Counter(to.values()).most_common(1)[0]
        others = {as_key(value): node for value, node in to.items() if node != usual}
        return self._node({"by": axis, "to": others, "else": usual}) if others else usual

    def _node(self, node: dict[str, Any]) -> int:
        key = repr(node)
        if key not in self._places:
            self._places[key] = len(self.nodes)
            self.nodes.append(node)
        return self._places[key]


def as_key(value: object) -> str:
    """As JavaScript writes it where it is a key."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def template(sentence: str, given: Values, names: Sequence[str]) -> str:
    """A sentence with `name={name}` where it has `name=value` with a value that is given: sentences that differ in
    nothing else become one."""
    words = sentence.split(" ")
    for n, word in enumerate(words):
        key, equals, rest = word.partition("=")
        name = key.removeprefix("layout.").removeprefix("recipe.")
        if equals and name in names and name in given:
            value = as_key(given[name])
            end = rest[len(value) :]
            if rest.startswith(value) and not end[:1].isalnum() and not end.startswith("-"):
                words[n] = f"{key}={{{name}}}{end}"
    return " ".join(words)
