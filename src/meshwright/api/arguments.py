"""What a function of the Python interface is given, held against the types that it names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, Protocol, TypeVar, get_args, get_origin, runtime_checkable

from meshwright.spec.errors import ArgumentError
from meshwright.spec.presets import suggested

P = ParamSpec("P")
R = TypeVar("R")
LONGEST = 60
"""Letters of a value that is shown."""
WIDER: dict[Any, type] = {int: Integral, float: Real, Path: PathLike, Sequence: Iterable}
"""Types that are as good, as numpy's numbers."""
WORDS = {
    int: "a whole number", float: "a number", str: "text", bool: "True or False", Path: "a path", NoneType: "None",
    Sequence: "a list", Mapping: "a dictionary", Callable: "a function", "HasPlan": "an answer about a plan",
    "HasRun": "an answer about a run", "Plan": "a plan", "Layout": "a layout",
}  # fmt: skip


@runtime_checkable
class HasRun(Protocol):
    """An answer that is of a run."""

    @property
    def run(self) -> Path:
        """Its folder."""
        ...


@runtime_checkable
class HasPlan(Protocol):
    """An answer that is of a plan."""

    @property
    def plan(self) -> Any:
        """That plan."""
        ...


Place = str | Path | HasRun
"""Where a run is."""


def folder_of(place: Place) -> Path:
    """Of a run, or of the answer about one."""
    return Path(place.run if isinstance(place, HasRun) else place)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function; ArgumentError where an argument is of another type than it takes."""
    names = signature(function)
    known = [name for name in names.parameters if name != "self"]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = names.bind(*args, **kwargs)
        except TypeError as error:
            raise _misnamed(function.__name__, str(error), known, list(kwargs)) from None
        for name, value in bound.arguments.items():
            one = names.parameters[name]
            for item in value if one.kind is Parameter.VAR_POSITIONAL else (value,):
                if one.kind is not Parameter.VAR_KEYWORD and not _fits(item, one.annotation):
                    raise ArgumentError(f"{name}={repr(item)[:LONGEST]} must be {_words(one.annotation)}")
        return function(*args, **kwargs)

    return call


def _misnamed(function: str, error: str, known: list[str], given: list[str]) -> ArgumentError:
    """About a keyword that is not known; else what is wrong with the call in Python's own words."""
    for name in given:
        if name not in known:
            near = suggested(name, [f"{one}=" for one in known], 1)
            return ArgumentError(f"{name}= is not known to {function}; {near}")
    return ArgumentError(f"{function}: {error}; it takes {', '.join(known)}")


def _fits(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is UnionType:
        return any(_fits(value, part) for part in parts)
    if kind in (Any, Parameter.empty) or not isinstance(kind, type):  # or a name that only a checker of types resolves
        return True
    if (isinstance(value, bool) and kind in (int, float)) or (isinstance(value, str | Mapping) and kind is Sequence):
        return False
    every = value if kind is Sequence and isinstance(value, list | tuple) else ()
    return isinstance(value, WIDER.get(kind, kind)) and all(_fits(item, parts[0]) for item in every)


def _words(hint: Any) -> str:
    kind = get_origin(hint) or hint
    if kind is UnionType:
        return " or ".join(dict.fromkeys(map(_words, get_args(hint))))
    part = next(iter(get_args(hint)), Any)
    entries = f" of {_words(part) if get_origin(part) else part.__name__}" if kind is Sequence else ""
    return (WORDS.get(kind) or WORDS.get(kind.__name__, kind.__name__)) + entries
