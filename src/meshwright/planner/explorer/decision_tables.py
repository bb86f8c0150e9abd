"""Decisions of Python for a finite set of states, as tables that the explorer's page looks up.

A question is a function of values that it reads by name. It is asked again for every value of each name that it reads.
So a table branches only on values that the answer depends on, and nobody lists by hand which rule reads what. Equal
tables are written once, and a name whose values all lead to one table is left out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Values = dict[str, Any]
"""Name of an axis -> its value."""
Answer = Any
"""Anything that JSON can hold."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Combinations of values of some axes."""

    axes: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


class Unread(Exception):
    """A question read an axis that has no value yet."""

    def __init__(self, axis: str) -> None:
        super().__init__(axis)
        self.axis = axis


class Domain:
    """The values of every axis, given values of the others."""

    def __init__(self, relations: Iterable[Relation]) -> None:
        self._relations = tuple(relations)
        self.axes = frozenset(axis for relation in self._relations for axis in relation.axes)
        self._known: dict[tuple[Any, ...], frozenset[Any]] = {}

    def values(self, axis: str, state: Values) -> list[Any]:
        """Return the ascending values of an axis that every relation allows together with those of `state`."""
        allowed = [self._allowed(n, axis, state) for n, relation in enumerate(self._relations) if axis in relation.axes]
        return sorted(frozenset.intersection(*allowed))

    def _allowed(self, number: int, axis: str, state: Values) -> frozenset[Any]:
        relation = self._relations[number]
        beside = tuple((n, state[name]) for n, name in enumerate(relation.axes) if name in state)
        key = (number, axis, beside)
        if key not in self._known:
            column = relation.axes.index(axis)
            rows = (row for row in relation.rows if all(row[n] == fixed for n, fixed in beside))
            self._known[key] = frozenset(row[column] for row in rows)
        return self._known[key]


class TracedReads:
    """Proxy for `real` whose fields named in `axes` come from `state`. All other fields are those of `real`.

    Properties and methods of `real` run on the proxy, so that their reads are traced, too. Raises Unread for an axis
    that `state` lacks.
    """

    def __init__(self, real: object, state: Values, axes: Mapping[str, str]) -> None:
        self._real, self._state, self._axes = real, state, axes

    def __getattr__(self, name: str) -> Any:
        if name in self._axes:
            axis = self._axes[name]
            if axis not in self._state:
                raise Unread(axis)
            return self._state[axis]
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
    _numbers: dict[str, int] = field(default_factory=dict)

    def add(self, question: Callable[[Values], Answer]) -> int:
        """Return the root node of the answers to a question."""
        root = self._root(question, {})
        if root is None:
            raise ValueError("a question about no state at all")
        return root

    def _root(self, question: Callable[[Values], Answer], state: Values) -> int | None:
        """Return the root node, given values of some axes. None = no state has these values together."""
        try:
            return self._node({"is": question(state)})
        except Unread as unread:
            axis = unread.axis
        every = {x: self._root(question, {**state, axis: x}) for x in self.domain.values(axis, state)}
        to = {x: node for x, node in every.items() if node is not None}
        if not to:
            return None
        usual, _ = Counter(to.values()).most_common(1)[0]
        others = {as_key(x): node for x, node in to.items() if node != usual}
        return self._node({"by": axis, "to": others, "else": usual}) if others else usual

    def _node(self, node: dict[str, Any]) -> int:
        key = repr(node)
        if key not in self._numbers:
            self._numbers[key] = len(self.nodes)
            self.nodes.append(node)
        return self._numbers[key]


def as_key(value: object) -> str:
    """Return a value as JavaScript writes it as a key."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def template(sentence: str, state: Values, names: Sequence[str]) -> str:
    """Replace `name=value` by `name={name}` for known values: equal sentences then become one."""
    words = sentence.split(" ")
    for n, word in enumerate(words):
        key, equals, rest = word.partition("=")
        name = key.removeprefix("layout.").removeprefix("recipe.")
        if equals and name in names and name in state:
            text = as_key(state[name])
            end = rest[len(text) :]
            if rest.startswith(text) and not end[:1].isalnum() and not end.startswith("-"):
                words[n] = f"{key}={{{name}}}{end}"
    return " ".join(words)
