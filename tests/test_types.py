"""Types are checked strictly on every package (make lint); what is left unchecked says why."""

import re
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "meshwright"
IGNORED = re.compile(r"#\s*type:\s*ignore(?P<codes>\[[a-z, -]+\])?(?P<why>.*)")


def unexplained(text: str) -> list[int]:
    """Numbers of the lines whose `type: ignore` names no code, or has no reason after it."""
    actual = []
    for number, line in enumerate(text.splitlines(), start=1):
        ignored = IGNORED.search(line)
        if ignored and not (ignored["codes"] and ignored["why"].strip().startswith("# ")):
            actual.append(number)
    return actual


def test_what_is_not_checked_has_a_code_and_a_reason() -> None:
    files = {path.relative_to(SOURCE): unexplained(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert not {str(path): lines for path, lines in files.items() if lines}


def test_an_ignore_without_code_or_reason_is_found() -> None:
    good = "x = f()  # type: ignore[no-untyped-call]  # torch has no annotations there\n"
    assert unexplained(good + "y = 1  # type: ignore\nz = 2  # type: ignore[arg-type]\n") == [2, 3]
