"""Configurations of other trainers' own repositories are read and predicted; what they publish is near."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peer_configurations import entries, read, table

ENTRIES = entries()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_it_is_read_and_predicted_or_refused_with_its_line(entry: dict[str, Any], tmp_path: Path) -> None:
    actual = read(entry, tmp_path)
    if "refused" in entry:
        assert entry["refused"] in actual.refusal and "line " in actual.refusal
        return
    assert actual.refusal == "" and actual.answer.given.step_seconds > 0
    if "published" in entry:
        assert abs(actual.error or 0) < 0.15
    assert entry["name"] in "\n".join(table([actual]))


def test_ten_are_predicted_and_each_has_its_source() -> None:
    assert sum("refused" not in entry for entry in ENTRIES) >= 10
    assert all("/" in entry["source"] and "(" in entry["source"] for entry in ENTRIES)
    assert sum("published" in entry for entry in ENTRIES) >= 2
