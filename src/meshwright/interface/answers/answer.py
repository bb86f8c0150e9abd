"""Base of all answers, and the check of the arguments that the Python functions get.

An answer has a document (values for JSON) and a table. Files that it is written to are checked before.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, Protocol, TypeVar, get_args, get_origin, runtime_checkable

from meshwright.remote.locations import is_url
from meshwright.spec.errors import ArgumentError, argument
from meshwright.spec.extras import require
from meshwright.spec.presets import suggest
from meshwright.store.durable import refuse_unwritable, replace_file, report_in_one_line

P = ParamSpec("P")
R = TypeVar("R")
LONGEST = 60
"""Most letters of a value in an error."""
WIDER: dict[Any, type] = {int: Integral, float: Real, Path: PathLike, Sequence: Iterable}
"""Annotated type -> wider type that is accepted too, as for numpy's numbers."""
WORDS = {
    int: "a whole number", float: "a number", str: "text", bool: "True or False", Path: "a path", NoneType: "None",
    Sequence: "a list", Mapping: "a dictionary", Callable: "a function", "HasPlan": "an answer about a plan",
    "HasRun": "an answer about a run", "Plan": "a plan", "Layout": "a layout",
}  # fmt: skip


class Answer(ABC):
    """An answer with a JSON document, a table, and a view in a notebook."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the document that the verb prints with --json."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return the table as one dictionary per row."""

    @abstractmethod
    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""

    def to_pandas(self) -> Any:
        """Return `rows` as a pandas.DataFrame. Raises PlanError, which names the extra, without pandas."""
        require("pandas", "to_pandas", ", or take rows()")
        return import_module("pandas").DataFrame(self.rows())


def plain(content: Any) -> Any:
    """Convert to what JSON can hold. Dataclasses become their fields, NaN and infinity null."""
    if is_dataclass(content) and not isinstance(content, type):
        return plain(asdict(content))
    if isinstance(content, dict):
        return {str(key): plain(entry) for key, entry in content.items()}
    if isinstance(content, list | tuple):
        return [plain(entry) for entry in content]
    if isinstance(content, Path):
        return str(content)
    # JSON has neither NaN nor infinity, and many readers refuse Python's words for them.
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def check_parent(file: Path, key: str) -> None:
    """Raise ArgumentError if the folder of a file does not exist. `key`: name of the argument."""
    if not file.absolute().parent.is_dir():
        raise ArgumentError(key, file, remedy=f"there is no folder {file.parent}; make it first")


def check_new_file(file: Path, key: str = "out") -> None:
    """Raise ArgumentError if the file exists or its folder does not. `key`: name of the argument."""
    if file.exists():
        raise ArgumentError(key, file, "is there already", "name another file")
    check_parent(file, key)


def check_page(file: Path, name: str, key: str = "out") -> None:
    """Raise ArgumentError, before anything is computed, if no page can be written.

    `name`: suggested name of a page in a folder. `key`: name of the argument.
    """
    if file.is_dir():
        raise ArgumentError(key, file, "is a folder", f"name a file, as {argument(key, file / name)}")
    if file.suffix not in (".html", ".htm"):
        page = file.with_suffix(".html")
        raise ArgumentError(key, file, remedy=f"name a file that ends in .html, as {argument(key, page)}")
    check_parent(file, key)
    refuse_unwritable(file.parent, key)


def write_page(file: Path, page: str, key: str = "html") -> None:
    """Write a page whole or not at all. Names that are no valid text get question marks. Raises RunError."""
    with report_in_one_line(file, argument(key)):
        replace_file(file, page.encode(errors="replace"))


@runtime_checkable
class HasRun(Protocol):
    """An answer about a run."""

    @property
    def run(self) -> Path:
        """Its folder."""
        ...


@runtime_checkable
class HasPlan(Protocol):
    """An answer about a plan."""

    @property
    def plan(self) -> Any:
        """Its plan."""
        ...


Place = str | Path | HasRun
"""A run: its folder, or an answer about it."""


def folder_of(run: Place, checkpoint: str = "last") -> Path:
    """Return the folder of a run or a model. A name of the hub stands for its folder in the cache.

    `checkpoint`: which one is copied of a run behind a URL.
    """
    if is_url(run):
        from meshwright.store.local_copies import copy_to_cache

        return copy_to_cache(str(run), checkpoint)
    path = Path(run.run if isinstance(run, HasRun) else run)
    if path.exists():
        return path
    from meshwright.formats.hub.download import local_folder

    return local_folder(path)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function to raise ArgumentError for arguments of other types than annotated."""
    names = signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = names.bind(*args, **kwargs)
        # Python's own error names internals of the wrapper, and suggests nothing.
        except TypeError as error:
            raise _misnamed(function.__name__, str(error), names, len(args), list(kwargs)) from None
        for name, setting in bound.arguments.items():
            parameter = names.parameters[name]
            for passed in setting if parameter.kind is Parameter.VAR_POSITIONAL else (setting,):
                if parameter.kind is not Parameter.VAR_KEYWORD and not _fits(passed, parameter.annotation):
                    rule = f"must be {_words(parameter.annotation)}"
                    sentence = f"{name}={repr(passed)[:LONGEST]} {rule}"
                    raise ArgumentError(name, passed, rule, sentence=sentence)
        return function(*args, **kwargs)

    return call


def _misnamed(function: str, error: str, names: Signature, positional: int, keywords: list[str]) -> ArgumentError:
    """Return the error about an unknown keyword, else about the call in Python's own words."""
    parameters = [name for name in names.parameters if name != "self"]
    for name in keywords:
        if name not in parameters:
            near = suggest(name, [f"{parameter}=" for parameter in parameters], 1)
            return ArgumentError(name, rule=f"is not known to {function}; {near}")
    missing = [name for name in list(names.parameters)[positional:] if name not in keywords]
    name = missing[0] if missing else parameters[-1]
    return ArgumentError(name, sentence=f"{function}: {error}; it takes {', '.join(parameters)}")


def _fits(argument: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is UnionType:
        return any(_fits(argument, part) for part in parts)
    if kind in (Any, Parameter.empty) or not isinstance(kind, type):  # or a name that only a type checker resolves
        return True
    # True is an int and text a sequence to Python: neither is what a caller meant.
    if (isinstance(argument, bool) and kind in (int, float)) or (
        isinstance(argument, str | Mapping) and kind is Sequence
    ):
        return False
    every = argument if kind is Sequence and isinstance(argument, list | tuple) else ()
    return isinstance(argument, WIDER.get(kind, kind)) and all(_fits(item, parts[0]) for item in every)


def _words(hint: Any) -> str:
    kind = get_origin(hint) or hint
    if kind is UnionType:
        return " or ".join(dict.fromkeys(map(_words, get_args(hint))))
    part = next(iter(get_args(hint)), Any)
    entries = f" of {_words(part) if get_origin(part) else part.__name__}" if kind is Sequence else ""
    return (WORDS.get(kind) or WORDS.get(kind.__name__, kind.__name__)) + entries
