"""The claims runner: tables are checked, commands run once, figures are kept with their date, a broken claim fails."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from claims import measure, record, run, table
from claims.measure import Finished
from claims.table import Bar, Claim, ClaimsError


def claim(**fields: object) -> Claim:
    base = {"id": "x", "text": "t", "command": "true", "read": "exit status", "bar": Bar.parse("== 0")}
    return Claim(**{**base, **fields})


def rows(folder: Path, *bodies: dict[str, object]) -> Path:
    """A table with these rows; a row holds strings, numbers and booleans, which JSON and TOML write alike."""
    base = {"text": "a text", "command": "true", "read": "exit status", "bar": "== 0"}
    path = folder / "claims.toml"
    tables = ("\n".join(f"{k} = {json.dumps(v)}" for k, v in {**base, **body}.items()) for body in bodies)
    path.write_text("".join(f"[[claim]]\n{text}\n" for text in tables))
    return path


def claims_command(folder: Path, *arguments: str) -> int:
    return run.main(["--table", str(folder / "claims.toml"), "--out", str(folder / "docs"), *arguments])


def recorded(folder: Path) -> dict[str, dict[str, object]]:
    return {row["id"]: row for row in json.loads((folder / "docs" / "claims.json").read_text())["records"]}


@pytest.mark.parametrize(
    ("bar", "figure", "holds"),
    [("<= 2.3", 2.3, True), ("<= 2.3", 2.31, False), (">= 1.2", 1.2, True), ("== 0", 0.5, False), ("< 1", 1, False)],
)
def test_a_bar_holds_on_its_side(bar: str, figure: float, holds: bool) -> None:
    assert Bar.parse(bar).holds(figure) is holds


def test_no_number_never_holds() -> None:
    assert not any(Bar.parse(f"{relation} 0").holds(float("nan")) for relation in table.RELATIONS)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"id": "a", "bar": "about 3"}, "a: bar 'about 3' is not"),
        ({"id": "a", "spead": 3}, "unknown key 'spead'"),
        ({"text": "a"}, "'id' is missing"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, body: dict[str, object], says: str) -> None:
    with pytest.raises(ClaimsError, match=says):
        table.load(rows(tmp_path, body))


def test_an_id_stands_once(tmp_path: Path) -> None:
    with pytest.raises(ClaimsError, match="'a' stands in two rows"):
        table.load(rows(tmp_path, {"id": "a"}, {"id": "a"}))


def test_figures_are_read_in_the_unit_of_the_row() -> None:
    done = Finished(status=0, seconds=1.5, stdout='noise\n{"a": [{"peak_bytes": 1610612736}]}\n', stderr="")
    assert measure.read(claim(read="a.0.peak_bytes", unit="GiB"), done).figure == 1.5
    assert measure.read(claim(read="seconds", unit="ms"), done).figure == 1500
    assert "no number at 'b'" in measure.read(claim(read="b"), done).error


def test_a_failed_command_has_no_figure_but_its_status() -> None:
    done = Finished(status=3, seconds=1.0, stdout='{"a": 1}', stderr="first\nlast words")
    assert measure.read(claim(read="a"), done).error == "exit status 3: last words"
    assert measure.read(claim(read="exit status"), done).figure == 3
    left_out = replace(done, status=0, stdout="SKIPPED [1] tests/a.py:3: could not import 'trl': No module\n1 skipped")
    assert measure.read(claim(read="exit status"), left_out).skipped == "could not import 'trl'"


def test_a_command_that_can_not_run_here_says_why() -> None:
    done = Finished(status=0, seconds=1.0, stdout='{"skipped": "no text"}', stderr="")
    assert measure.read(claim(read="a"), done) == measure.Reading(skipped="no text")


def test_a_command_and_its_children_end_at_the_limit(tmp_path: Path) -> None:
    done = measure.execute('sh -c "sleep 30 & sleep 30; echo late"', 0.3, tmp_path)
    assert (done.status, done.stderr) == (124, "stopped after 0.3 s")


def test_a_missing_command_is_an_outcome_without_paths(tmp_path: Path) -> None:
    done = measure.execute("no-such-command-at-all", 1.0, tmp_path)
    assert done.status == 127
    done = measure.execute("python -c \"import os, sys; sys.exit(os.getcwd() + ' is full')\"", 20.0, tmp_path)
    assert done.stderr.strip() == ". is full"


def test_one_command_serves_several_rows_and_the_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    counter = tmp_path / "counter"
    command = f'sh -c "echo x >> {counter}; echo \'{{\\"a_bytes\\": 1073741824, \\"b\\": 7}}\'"'
    rows(
        tmp_path,
        {"id": "first", "command": command, "read": "a_bytes", "unit": "GiB", "bar": "<= 1"},
        {"id": "second", "command": command, "read": "b", "bar": ">= 8"},
    )
    assert claims_command(tmp_path) == 1
    assert counter.read_text() == "x\n"
    assert "second: 7 (bar >= 8) DOES NOT HOLD" in capsys.readouterr().out
    page = (tmp_path / "docs" / "claims.md").read_text()
    assert "| a text (`first`) | <= 1 GiB | 1 GiB | yes |" in page
    assert "| a text (`second`) | >= 8 | 7 | **no** |" in page


def test_rows_not_run_keep_their_figure_until_their_command_changes(tmp_path: Path) -> None:
    rows(tmp_path, {"id": "fast"}, {"id": "long", "slow": True})
    assert claims_command(tmp_path, "--slow") == 0
    assert set(recorded(tmp_path)) == {"fast", "long"}
    rows(tmp_path, {"id": "fast", "command": "false"}, {"id": "long", "slow": True, "bar": "== 1"})
    assert claims_command(tmp_path, "--only", "fast") == 1
    assert recorded(tmp_path)["fast"]["figure"] == 1
    assert "`long`, slow) | succeeds | succeeded | **no** |" in (tmp_path / "docs" / "claims.md").read_text()
    rows(tmp_path, {"id": "fast"}, {"id": "long", "slow": True, "command": "true again"})
    assert claims_command(tmp_path) == 0
    assert set(recorded(tmp_path)) == {"fast"}


def test_a_skipped_row_keeps_its_last_figure(tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    answer.write_text('{"a": 1}')
    rows(tmp_path, {"id": "x", "command": f"cat {answer}", "read": "a", "bar": "== 1"})
    assert claims_command(tmp_path) == 0
    answer.write_text('{"skipped": "no GPU"}')
    assert claims_command(tmp_path) == 0
    assert recorded(tmp_path)["x"]["figure"] == 1


def test_an_unknown_row_is_answered_with_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows(tmp_path, {"id": "resume-bit-identical"})
    assert claims_command(tmp_path, "--only", "resume-bits") == 2
    assert "nearest is 'resume-bit-identical'" in capsys.readouterr().err


def test_a_damaged_record_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows(tmp_path, {"id": "x"})
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "claims.json").write_text("{")
    assert claims_command(tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_machine_is_described_without_its_name() -> None:
    import socket

    assert socket.gethostname() not in record.machine()
    assert "cores" in record.machine()


def test_the_page_can_be_written_without_running_anything(tmp_path: Path) -> None:
    rows(tmp_path, {"id": "x"})
    assert claims_command(tmp_path) == 0
    rows(tmp_path, {"id": "x", "text": "said better"}, {"id": "new", "command": f"touch {tmp_path}/ran"})
    assert claims_command(tmp_path, "--page") == 0
    page = (tmp_path / "docs" / "claims.md").read_text()
    assert "said better (`x`) | succeeds | succeeded | yes" in page
    assert not (tmp_path / "ran").exists()
