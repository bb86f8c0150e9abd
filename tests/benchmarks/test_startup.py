"""What a start costs, counted: compilers and imports, which no other load on the machine changes."""

from pathlib import Path

import pytest

from benchmarks import startup


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    startup.write_inputs(tmp_path)
    return tmp_path


def test_what_is_refused_loads_no_torch(folder: Path) -> None:
    assert startup.refusals_with_torch(folder) == []


def test_a_second_start_compiles_nothing(folder: Path) -> None:
    first, second = startup.compilers_started(folder)
    assert first > 0 and second == 0
