"""The list of tests that skip, in CONTRIBUTING.md, is that of the tests: each reason stands in both."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "CONTRIBUTING.md"
HEADING = "### Tests that skip"


def reasons(source: str) -> Iterator[str]:
    """What the calls of skip, skipif and importorskip in a module say; what is put in at run time is `...`."""
    for call in ast.walk(ast.parse(source)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if call.func.attr not in ("skip", "skipif", "importorskip"):
            continue
        named = {word.arg: word.value for word in call.keywords}
        if "reason" in named:
            yield _text(named["reason"])
        elif call.func.attr == "importorskip":
            yield f"could not import {_text(call.args[0])}"
        elif call.func.attr == "skip" and call.args:
            yield _text(call.args[0])


def _text(value: ast.expr) -> str:
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part) for part in value.values)
    return str(value.value) if isinstance(value, ast.Constant) else "..."


def listed(page: str) -> list[str]:
    """First cells of the table under HEADING."""
    rows = page.split(HEADING)[1].split("\n#")[0].splitlines()
    cells = [row.split("|")[1].strip().strip("`") for row in rows if row.startswith("|")]
    return cells[2:]


def test_each_reason_to_skip_is_listed_once() -> None:
    actual = {reason for path in TESTS.rglob("*.py") for reason in reasons(path.read_text())}
    rows = listed(PAGE.read_text())
    assert sorted(rows) == sorted(actual)


def test_reasons_are_found_however_they_are_given() -> None:
    source = (
        'pytest.skip(f"{name} is not here")\nx = pytest.mark.skipif(a, reason="no b")\n'
        'pytest.importorskip("c")\nskip = pytest.mark.skip(reason=missing())\nother("not this")\n'
    )
    assert list(reasons(source)) == ["... is not here", "no b", "could not import c", "..."]
