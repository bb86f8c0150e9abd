"""`meshwright drill`: a fault is found, survived and measured; what would not be survived is not called so."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.interface.planning.plan_reading import read_plan
from meshwright.spec.errors import ArgumentError, PlanError, RunError
from meshwright.verbs.drill import answer, faults
from meshwright.verbs.drill.answer import drill
from meshwright.verbs.drill.faults import FAULTS
from tests.verbs import toy


def test_an_unknown_fault_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"is no fault.*damage"):
        drill(only=["damaged"], out=tmp_path / "drill")


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="must be at least 14"):
        drill(steps=9, out=tmp_path / "drill")


def test_one_rank_is_refused(tmp_path: Path) -> None:
    texts = toy.write_texts(tmp_path / "texts")
    with pytest.raises(PlanError, match=r"needs two: take layout\.dp_shard=2"):
        drill("model=llama-tiny", f"data={texts}", out=tmp_path / "drill")


def test_a_plan_that_fails_by_itself_is_no_drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, run: Path, fault: Any) -> tuple[int, list[tuple[float, str]]]:
        return 2, [(0.0, "no such data")]

    monkeypatch.setattr(answer._Runs, "_start", fail)
    with pytest.raises(RunError, match="without a fault ended with code 2 after step 0: no such data"):
        drill(out=tmp_path / "drill")


def test_a_run_that_ends_or_changes_is_not_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged by the records of a run alone: here they are written by hand."""
    records = {
        "undisturbed": range(1, 61), "kill": range(1, 61), "stop": range(1, 20), "hang": range(1, 61),
        "error": range(1, 61),
    }  # fmt: skip
    lines = {
        "kill": "rank 1 died without a message",
        "stop": "rank 1 has been silent",
        "error": "failed at step",
    }

    def record(self: Any, run: Path, fault: Any) -> tuple[int, list[tuple[float, str]]]:
        run.mkdir(exist_ok=True)
        other = 0.5 if run.name == "error" else 0.0
        rows = (f'{{"step": {step}, "loss": {step + other * (step > 12)}}}\n' for step in records[run.name])
        (run / "metrics.jsonl").write_text("".join(rows))
        if run.name != "undisturbed":
            (tmp_path / "drill" / f"{run.name}.mark").write_text("1.0 10")
        return 1, [(3.5, lines[run.name])] if run.name in lines else []

    monkeypatch.setattr(answer._Runs, "_start", record)
    outcomes = {
        entry.fault: entry for entry in drill(only=["kill", "stop", "hang", "error"], out=tmp_path / "drill").outcomes
    }
    assert outcomes["kill"].problem == "" and outcomes["kill"].noticed_seconds == 2.5
    assert outcomes["stop"].problem == "ended after step 19: rank 1 has been silent" and outcomes["stop"].starts == 3
    assert outcomes["hang"].problem == "nothing named it"
    assert outcomes["error"].problem == "other losses from step 13 on"


def test_every_fault_has_a_name_of_its_own() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) == 13
    assert all(callable(fault.act) and fault.what for fault in FAULTS)
    assert faults.SLOW_STEPS < answer.STEPS - answer.FAULT_STEP


@pytest.mark.long
def test_a_dead_rank_and_a_broken_number(tmp_path: Path) -> None:
    """Two real runs that break, under torchrun: each goes on from its checkpoint to the losses of the sound one."""
    outcomes = {entry.fault: entry for entry in drill(only=["kill", "nan"], out=tmp_path / "drill").outcomes}
    for entry in outcomes.values():
        assert not entry.problem and entry.starts == 1, entry
        assert entry.noticed_seconds is not None and entry.noticed_seconds < 10
    assert "rank 1 died without a message" in outcomes["kill"].line
    assert "the loss is nan" in outcomes["nan"].line


@pytest.mark.slow
def test_all_faults(tmp_path: Path) -> None:
    answer = drill(out=tmp_path / "drill")
    assert not answer.problems and not answer.skipped, "\n".join(answer.lines())
    noticed = {entry.fault: entry.noticed_seconds for entry in answer.outcomes}
    # A dead rank within 5 s, one that hangs within a minute of its limit.
    assert noticed["kill"] is not None and noticed["kill"] < 5
    assert noticed["hang"] is not None and noticed["hang"] < 60 + answer.ranks * 5


def test_a_drill_leaves_the_store_of_the_plan_alone(tmp_path: Path) -> None:
    """And a plan that skips a bad step does not skip the drill's."""
    words = answer._words(("store=s3://bucket/real", "recipe.skip_nonfinite=3"), tmp_path, answer.STEPS)
    plan, resume = read_plan(words, {})
    assert (plan.store.url, plan.recipe.skip_nonfinite, resume) == ("", 0, "auto")
