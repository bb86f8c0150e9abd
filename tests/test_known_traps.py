"""The page of traps: every row has a report and a test that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(
    r"^\| \[([\w./-]+)#(\d+)\]\(https://github\.com/([\w./-]+)/issues/(\d+)\) \|.*\| `(tests/[\w/]+\.py)::(\w+)` \|$"
)
"""Repository and number, the same in the link, and a test."""


def test_every_trap_has_its_report_and_its_test() -> None:
    lines = (ROOT / "docs" / "known-traps.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| [")]
    assert len(rows) > 40
    for row in rows:
        match = ROW.match(row)
        assert match, row
        named, number, linked, thread, file, test = match.groups()
        assert (named, number) == (linked, thread), row
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), row
