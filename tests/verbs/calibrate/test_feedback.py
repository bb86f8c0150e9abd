"""A run's steps fed back: the next prediction for this machine is nearer."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from meshwright import planfile
from meshwright.observe.compare.finished_run import open_run
from meshwright.planner.machine.clusterfile import ClusterFile, load, text
from meshwright.spec.errors import RunError
from meshwright.verbs.calibrate.feedback import learn, seconds_of
from meshwright.verbs.main import main
from tests.planner.test_clusterfile import machine, plan
from tests.verbs import toy


def quick() -> ClusterFile:
    """Whose steps cost nothing beside their operations."""
    measured = machine()
    return replace(measured, stack=replace(measured.stack, step_s=0.0))


def finished(folder: Path, seconds: list[float], **layout: object) -> Path:
    """A run folder of so many steps: plan and metrics, as train leaves them."""
    folder.mkdir()
    planfile.write(replace(plan(machine(), **layout), run=str(folder)), folder / "plan.yaml")  # type: ignore[arg-type]
    same = dict.fromkeys(("loss", "grad_norm", "lr", "tokens", "tokens_per_second", "seconds"), 1.0)
    rows = [
        {"step": n, **same, "step_seconds": taken, "data_wait_seconds": 0.01}
        for n, taken in enumerate(seconds, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_median_without_waiting_and_without_the_first_steps(tmp_path: Path) -> None:
    run = finished(tmp_path / "a", [9.0, 8.0, 0.51, 0.41, 0.91])
    assert seconds_of(open_run(run)) == pytest.approx(0.5)
    profiled(run, step_seconds=0.25)
    assert seconds_of(open_run(run)) == 0.25
    with pytest.raises(RunError, match="2 steps"):
        seconds_of(open_run(finished(tmp_path / "b", [1.0, 1.0])))


def profiled(run: Path, **changes: object) -> None:
    """A profile.json of the folder's plan, with these keys otherwise."""
    document = {"source": "measured", "plan": asdict(planfile.read(run / "plan.yaml")), "device": "cpu"}
    (run / "profile.json").write_text(json.dumps(document | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_seconds": float("nan")}, "no JSON"),
        ({"step_seconds": -1.0}, "step_seconds: input should be greater than 0"),
        ({"step_seconds": 0}, "step_seconds: input should be greater than 0"),
        ({"step_seconds": None}, "no seconds of a step"),
        ({"step_seconds": "1 s"}, "step_seconds"),
        ({"step_seconds": 123.0, "plan": {}}, "of another plan"),
    ],
)
def test_a_profile_that_is_none_of_this_plan_teaches_nothing(
    tmp_path: Path, changes: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, known, out = finished(tmp_path / "a", [0.5] * 5), tmp_path / "first.toml", tmp_path / "second.toml"
    known.write_text(text(quick()))
    profiled(run, **changes)
    line = toy.refused(capsys, "calibrate", "--from", run, "--cluster", known, "--out", out)
    assert message in line and "profile.json" in line and not out.exists()


def test_a_profile_of_another_layout_teaches_nothing(tmp_path: Path) -> None:
    run, other = finished(tmp_path / "a", [0.5] * 5), finished(tmp_path / "b", [0.5] * 5, micro_batch=2)
    profiled(other, step_seconds=123.0)
    (run / "profile.json").write_bytes((other / "profile.json").read_bytes())
    assert seconds_of(open_run(other)) == 123.0
    with pytest.raises(RunError, match="of another plan"):
        learn(quick(), [run])


def test_what_was_learned_of_some_runs_holds_for_another(tmp_path: Path) -> None:
    """Runs of a machine on which everything takes 1.6 times what its file says."""
    before = quick()
    layouts = ({"micro_batch": 1}, {"micro_batch": 2}, {"tp": 2}, {"dp_replicate": 2})

    def true(timed: object) -> float:
        return 1.6 * before.estimator(timed).predict(timed).step_s  # type: ignore[arg-type]

    runs = [
        finished(tmp_path / str(n), [true(plan(before, **layout)) + 0.01] * 5, **layout)
        for n, layout in enumerate(layouts)
    ]
    after, seen = learn(before, runs)
    for timed, seconds in seen:
        assert abs(after.estimator(timed).predict(timed).step_s / seconds - 1) < 0.1
    other = plan(before, 8, tp=2)
    assert abs(after.estimator(other).predict(other).step_s / true(other) - 1) < 0.1


def test_a_real_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, first, second = tmp_path / "run", tmp_path / "first.toml", tmp_path / "second.toml"
    texts = toy.write_texts(tmp_path / "texts")
    assert main(toy.train(texts, run, "recipe.steps=6")) == 0
    first.write_text(text(quick()))
    assert main(["calibrate", "--from", str(run), "--cluster", str(first), "--out", str(second)]) == 0
    took = seconds_of(open_run(run))
    asked = planfile.read(run / "plan.yaml")
    errors = []
    for path in (first, second):
        there = load(path)
        placed = replace(asked, cluster=there.cluster(1))
        errors.append(abs(there.estimator(placed).predict(placed).step_s / took - 1))
    assert errors[1] < errors[0]
    assert "learned" in load(second).provenance and "predicted" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--from", "x"], ["--cluster", "x.toml"], ["--from", "x", "--cluster", "x.toml"]])
def test_wrong_words_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
