"""What a run folder is taken for: documents of the same program, records that are numbers, folders of one plan."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import __version__
from meshwright.observe.compare.comparison import columns
from meshwright.observe.compare.finished_run import goodput_document, open_run, refuse_other, same_program
from meshwright.observe.dryrun.document import dry_run_document
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.observe.shared_document import SharedDocument, parse_document
from meshwright.spec import Plan
from meshwright.spec.errors import RunError
from meshwright.training.step.watch import Goodput
from tests.observe.folders import ALONE, PLAN, dry_run_json, metric_rows, profile_json, write_run
from tests.verbs.toy import call, refused


def document_of(
    plan: Plan, source: Any = "measured", device: str = "cuda", version: str = __version__
) -> SharedDocument:
    return SharedDocument(source=source, plan=asdict(plan), device=device, environment={"meshwright": version})


def changed(**keys: Any) -> Plan:
    """PLAN with keys of its recipe and layout otherwise."""
    recipe_keys = {key: value for key, value in keys.items() if hasattr(PLAN.recipe, key)}
    rest = {key: value for key, value in keys.items() if key not in recipe_keys}
    return replace(PLAN, recipe=replace(PLAN.recipe, **recipe_keys), layout=replace(PLAN.layout, **rest))


@pytest.mark.parametrize(
    ("keys", "dry_too", "profile_too"),
    [
        ({}, True, True),
        ({"steps": 7, "learning_rate": 1.0, "seed": 3, "clip": 0.5, "balance_loss": 0.1}, True, True),
        ({"saving": "sync"}, True, True),
        ({"compile": "off"}, True, True),  # what auto may be on a GPU
        ({"compile": "on"}, True, True),
        ({"cuda_graphs": "on"}, True, True),
        ({"clip": 0.0}, False, False),
        ({"balance_loss": 0.0}, False, False),
        ({"noise_scale_every": 10}, False, False),
        ({"precision": "bf16"}, False, False),
        ({"zero": 1}, False, False),
    ],
)
def test_documents_of_the_same_program(keys: dict[str, Any], dry_too: bool, profile_too: bool) -> None:
    other = changed(**keys)
    assert same_program(PLAN, document_of(other, "dryrun")) is dry_too
    assert same_program(PLAN, document_of(other)) is profile_too


def test_what_compile_stands_for_is_told_by_the_device() -> None:
    assert same_program(PLAN, document_of(changed(compile="off"), device="cpu"))
    assert not same_program(PLAN, document_of(changed(compile="on"), device="cpu"))
    on, off = (changed(compile=word, cuda_graphs=word) for word in ("on", "off"))
    assert (
        not same_program(on, document_of(off))
        and not same_program(on, document_of(off, "dryrun"))
        and same_program(on, document_of(on))
    )


def test_a_dry_run_of_another_version_is_made_anew(tmp_path: Path) -> None:
    assert not same_program(PLAN, document_of(PLAN, "dryrun", version="0.0.1")) and same_program(
        PLAN, document_of(PLAN, version="0.0.1")
    )
    assert not same_program(PLAN, replace(document_of(PLAN, "dryrun"), environment={}))
    small = replace(ALONE, recipe=replace(ALONE.recipe, sequence=8))
    assert same_program(
        small, parse_document(json.loads(json.dumps(dry_run_document(dry_run(small, device="cpu")))), "")
    )


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize("verb", ["compare", "report"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.update(global_batch="x"), "no global_batch of 1 or more"),
        (lambda row: row.update(global_batch=0), "no global_batch"),
        (lambda row: row.update(global_batch=True), "no global_batch"),
        (lambda row: row.update(global_batch=None), "no global_batch"),
        (lambda row: row.update(global_batch=10**30), "no global_batch"),
        (lambda row: row.update(global_batch=3), "its last step"),
        (lambda row: row.update(global_batch=2**40), "its last step"),
        (lambda row: row.update(tokens="NaN"), "no number tokens"),
        (lambda row: row.update(seconds=[1]), "no number seconds"),
        (lambda row: row.update(step_seconds="Infinity"), "no number step_seconds"),
        (lambda row: row.update(loss=10**400), "no number loss"),
        (lambda row: row.update(mfu_causal="much"), "no number mfu_causal"),
        (lambda row: row.update(data_wait_seconds={}), "no number data_wait_seconds"),
        (lambda row: row.pop("step"), "no step"),
        (lambda row: row.update(step=-1), "no step"),
        (lambda row: row.update(kind="eval", loss="NaN"), "no number loss"),
        (lambda row: row.update(kind="eval", loss=None), "no number loss"),
        (lambda row: row.update(kind="eval", bits_per_byte="Infinity"), "no number bits_per_byte"),
    ],
)
def test_records_that_are_none_are_one_line(
    tmp_path: Path, verb: str, change: Change, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--no-dry-run"] if verb == "compare" else []
    line = refused(capsys, verb, with_last(tmp_path / "run", change, ALONE), *words)
    assert "metrics.jsonl" in line and message in line


def with_last(folder: Path, change: Change, plan: Plan = PLAN) -> Path:
    """A run folder whose last step is another one."""
    rows = [row for row in metric_rows(5) if "kind" not in row]
    change(rows[-1])
    write_run(folder, plan)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("verb", ["compare", "report"])
def test_an_overflow_and_a_null_are_training_s_own(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(row: dict[str, Any]) -> None:
        row.update(grad_norm="Infinity", loss="NaN", mfu_causal=None)

    words = ["--no-dry-run", "--tolerance", "1e9"] if verb == "compare" else []
    assert call(capsys, verb, with_last(tmp_path / "run", change), *words)[0] == 0


def test_a_folder_of_another_plan_is_refused(tmp_path: Path) -> None:
    refuse_other(tmp_path / "nowhere", PLAN)
    (tmp_path / "empty").mkdir()
    refuse_other(tmp_path / "empty", PLAN)
    run = write_run(tmp_path / "run", profile=profile_json(PLAN), dryrun=dry_run_json(PLAN))
    refuse_other(run, changed(steps=9, learning_rate=1e-5))
    refuse_other(run, changed(compile="off"))  # which auto may be
    for other in (ALONE, changed(kernels="eager"), changed(sequence=256)):
        with pytest.raises(RunError, match=r"holds a plan\.yaml of another model, recipe or layout"):
            refuse_other(run, other)
    (run / "plan.yaml").write_text("name: ci\n")
    with pytest.raises(RunError, match="damaged or of another program"):
        refuse_other(run, PLAN)


def test_a_profile_of_the_batch_that_a_ramp_came_to_is_of_the_folder(tmp_path: Path) -> None:
    run = with_last(tmp_path / "run", lambda row: row.update(global_batch=2))
    assert open_run(run).plan_as_run.recipe.global_batch == 2
    refuse_other(run, changed(global_batch=2))


@pytest.mark.parametrize("steps", [0, 5])
def test_that_kinds_are_of_the_program_uncompiled_stands_in_the_comparison(tmp_path: Path, steps: int) -> None:
    note = "kinds of memory are of the program uncompiled"
    run = open_run(write_run(tmp_path / "run", steps=steps, profile=profile_json(PLAN) | {"notes": [note]}))
    assert f"a profile of the plan (profile.json); {note}" in columns(run)[2].about


@pytest.mark.parametrize(
    ("interruptions", "hours", "rate"),
    [
        (0, 0.5, None),
        (1, 0.5, None),
        (1, 5.0, r"assumed: the rate of .*; 1 interruption in 5 h 00 min would be too few to measure one"),
        (2, 5.0, r"assumed: the rate of .*; 2 interruptions in 5 h 00 min would be too few to measure one"),
        (3, 0.5, r"measured: 3 interruptions in 30 min"),
    ],
)
def test_few_failures_give_no_failure_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruptions: int, hours: float, rate: str | None
) -> None:
    seconds = dict.fromkeys([field.name for field in fields(Goodput) if field.name.endswith("_seconds")], 10.0)
    account = Goodput(
        processes=interruptions + 1, interruptions=interruptions, steps=100, saves=4,
        **{**seconds, "wall_seconds": 3600 * hours, "productive_seconds": 1000 * hours},
    )  # fmt: skip
    monkeypatch.setattr("meshwright.observe.compare.finished_run.read_goodput", lambda path: account)
    document = goodput_document(open_run(write_run(tmp_path / "run")))
    assert document is not None
    assert bool(document["advice"]) == (rate is not None) and re.search(rate or "^$", document["advice"])
