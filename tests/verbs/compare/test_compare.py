"""`meshwright compare` and `meshwright report`: output, files and errors."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.spec import Cluster
from tests.observe.folders import PLAN, dry_run_json, profile_json, write_run
from tests.verbs.toy import call, refused, train, write_texts


def test_a_trained_run_is_compared_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert call(capsys, *train(write_texts(tmp_path / "texts"), run))[0] == 0
    code, out, _ = call(capsys, "compare", run, "--no-dry-run", "--json")
    document = json.loads(out)
    assert code == 0 and document["agrees"] and document["columns"]["measured"]["about"] == "12 steps of training"
    moments = next(row for row in document["rows"] if row["what"] == "moments")
    assert moments["planned"] == moments["measured"] > 0 and moments["dryrun"] is None
    code, out, _ = call(capsys, "compare", run, "--no-dry-run")
    assert code == 0 and re.match(r"AGREES  (\d+) of \1 rows agree \(tolerance 10%, traffic exact\)", out)
    assert " equal (--all)" in out
    assert "peak not measured: resident memory of a process" in out and "step not planned: the plan's device" in out
    code, out, _ = call(capsys, "compare", run, "--no-dry-run", "--all")
    assert code == 0 and re.search(r"moments +[\d.]+ += +- +[\d.]+ [KM]iB", out)
    code, out, _ = call(capsys, "report", run)
    assert code == 0 and str(run / "report.html") in out
    assert "llama-tiny" in (run / "report.html").read_text()


@pytest.mark.slow
def test_the_dry_run_is_made_once_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert call(capsys, *train(write_texts(tmp_path / "texts"), run))[0] == 0
    first = json.loads(call(capsys, "compare", run, "--json", "--tolerance", "1")[1])
    first_document = (run / "dryrun.json").read_bytes()
    again = json.loads(call(capsys, "compare", run, "--json", "--tolerance", "1")[1])
    assert first["rows"] == again["rows"] and (run / "dryrun.json").read_bytes() == first_document
    parameters = next(row for row in first["rows"] if row["what"] == "parameters")
    assert parameters["dryrun"] == parameters["measured"] == parameters["planned"]


def test_beyond_the_tolerance_is_exit_code_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = profile_json(PLAN)
    document["ranks"][0]["peak_bytes"] *= 2
    run = write_run(tmp_path / "run", dryrun=dry_run_json(PLAN), profile=document)
    line = refused(capsys, "compare", run, code=4)
    assert "peak of rank 0: planned" in line
    assert call(capsys, "compare", run, "--tolerance", "0.6")[0] == 0
    code, out, _ = call(capsys, "compare", run, "--json")
    assert code == 4 and json.loads(out)["first"]["what"] == "peak"


def test_the_planned_column_can_be_of_a_device_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a named device, the column is of the device that was measured."""
    run = write_run(tmp_path / "run", replace(PLAN, cluster=Cluster(devices_per_node=4)), profile=profile_json(PLAN))
    assert json.loads(call(capsys, "compare", run, "--no-dry-run", "--json")[1])["columns"]["planned"][
        "about"
    ].endswith(PLAN.cluster.device.name)
    _, out, _ = call(capsys, "compare", run, "--no-dry-run", "--json", "--cluster", "a100x4")
    document = json.loads(out)
    assert document["columns"]["planned"]["about"].endswith("A100-SXM-80")
    assert next(row for row in document["rows"] if row["what"] == "step")["planned"] > 0
    assert (
        call(capsys, "report", run, "--cluster", "a100x4")[0] == 0
        and "A100-SXM-80" in (run / "report.html").read_text()
    )
    for verb in ("compare", "report"):
        assert "nowhere.toml" in refused(capsys, verb, run, "--cluster", "nowhere.toml")


def test_nothing_to_compare_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", replace(PLAN, cluster=Cluster(devices_per_node=4)), ledger=None)
    assert "no figure is known twice" in refused(capsys, "compare", run, "--no-dry-run")


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    damaged = write_run(tmp_path / "damaged", ledger="{")
    for verb in ("compare", "report"):
        assert "does not exist" in refused(capsys, verb, tmp_path / "nowhere")
        assert "has no plan.yaml" in refused(capsys, verb, tmp_path)
        assert "no JSON" in refused(capsys, verb, damaged)
        assert "is a file: give a run folder, which run= named" in refused(capsys, verb, tmp_path / "file")
        assert "--tolerance" in refused(capsys, verb, damaged, "--tolerance", "-1")
    assert "is a folder" in refused(capsys, "report", damaged, "--out", tmp_path)
    assert "make it first" in refused(capsys, "report", damaged, "--out", tmp_path / "a" / "b.html")
    assert not list(tmp_path.rglob("*.html"))


def test_two_runs_in_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name / "run") for name in ("a", "b")]
    code, out, _ = call(capsys, "report", *runs, "--out", tmp_path / "both.html")
    assert code == 0 and "2 runs" in out
    text = (tmp_path / "both.html").read_text()
    assert '"name":"a/run"' in text and '"name":"b/run"' in text


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_the_table_keeps_to_its_width(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdict first, one unit per row, no broken words; equal rows and single figures become sentences."""
    monkeypatch.chdir(tmp_path)
    document = profile_json(PLAN)
    document["ranks"][0]["peak_bytes"] = round(1.03 * document["ranks"][0]["peak_bytes"])
    write_run(tmp_path / "run", dryrun=dry_run_json(PLAN), profile=document)
    monkeypatch.setenv("COLUMNS", "200")
    whole = call(capsys, "compare", "run")[1]
    monkeypatch.setenv("COLUMNS", str(columns))
    for option in ([], ["--all"]):
        code, out, _ = call(capsys, "compare", "run", *option)
        lines = out.splitlines()
        assert code == 0 and lines[0].startswith("AGREES  ") and "\x1b" not in out
        assert max(map(len, lines)) <= columns
        for line in lines:
            assert len(re.findall(r"\b(?:[GKM]iB|calls)\b", line)) <= 1 or "only" in out
        known_once = [line for line in lines if len(re.findall(r" - ", line + " ")) == 2 and re.search(r"\d", line)]
        assert option or not known_once
    assert "collectives, all equal to the byte" in whole
    assert set(out.split()) >= {"peak,", "activations", "optimizer"}
