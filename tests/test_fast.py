"""What `make test-fast` takes: the first test of each module that is not slow, and of every folder something."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import fast, part

TESTS = Path(__file__).resolve().parent


def test_the_first_test_of_each_module_and_none_that_is_slow() -> None:
    given = [("a.py::h", "slow"), ("a.py::i", "long"), ("a.py::f[1]",), ("a.py::f[2]",), ("a.py::g",), ("a.py::k",)]
    found = fast(items(*given, ("b.py::f[3]",), ("c.py::C::f", "slow")))
    assert sorted(one.nodeid for one in found) == ["a.py::f[1]", "b.py::f[3]"]


def test_the_two_parts_are_all_and_of_long_tests_with_cases_the_first_is_in_the_short_one() -> None:
    given = items(("a.py::f[1]", "long"), ("a.py::f[2]", "long"), ("a.py::g[1]",), ("a.py::g[2]",), ("b.py::f", "long"))
    short, long = (sorted(one.nodeid for one in part(given, wanted)) for wanted in ("short", "long"))
    assert short == ["a.py::f[1]", "a.py::g[1]", "a.py::g[2]"] and long == ["a.py::f[2]", "b.py::f"]


class Item(SimpleNamespace):
    __hash__ = object.__hash__


def items(*given: tuple[str, ...]) -> Any:
    """Of names, with their marks."""
    return [
        Item(nodeid=name, get_closest_marker=lambda mark, marks=marks: mark if mark in marks else None)
        for name, *marks in given
    ]


def test_every_folder_has_tests_that_are_not_slow() -> None:
    for folder in (path for path in TESTS.iterdir() if any(path.glob("test_*.py"))):
        functions = (
            one
            for path in folder.glob("test_*.py")
            for one in ast.walk(ast.parse(path.read_text()))
            if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")
        )
        marks = [{ast.unparse(mark) for mark in one.decorator_list} for one in functions]
        quick = [one for one in marks if "pytest.mark.slow" not in one]
        assert quick, folder.name
