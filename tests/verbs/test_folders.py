"""Default run folders, plans called from other folders, and the end of an interrupted verb."""

import json
import os
import signal
from pathlib import Path

import pytest

from meshwright import planfile
from meshwright.spec.errors import PlanError
from meshwright.store import default_folders
from tests.verbs import toy
from tests.verbs.toy import call

TODAY = r"2\d\d\d-\d\d-\d\d"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with texts and a plan of a run that takes a second."""
    toy.write_texts(tmp_path / "project" / "texts")
    monkeypatch.chdir(tmp_path / "project")
    words = [*toy.SHAPE, *toy.RECIPE, "recipe.steps=2", "data=texts"]
    planfile.write(planfile.read(None, words), "plan.yaml")
    return tmp_path / "project"


def train(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, object]:
    """Return the summary of a training."""
    code, out, err = call(capsys, "train", "--no-dry-run", "--json", *words)
    assert code == 0, err
    document = json.loads(out)
    assert isinstance(document, dict)
    return document


def names(root: Path) -> list[str]:
    return sorted(path.name.partition("-llama")[2] for path in root.iterdir() if not path.is_symlink())


def test_a_run_that_nobody_named_is_a_new_one(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = train(capsys, "plan.yaml"), train(capsys, "plan.yaml")
    assert names(project / "runs") == ["-tiny", "-tiny-2"]
    assert second["run"] == f"{first['run']}-2"
    assert os.readlink("runs/latest") == Path(str(second["run"])).name
    assert call(capsys, "eval", "runs/latest", "--json")[0] == 0
    third = train(capsys, "plan.yaml", "run=runs/mine")
    assert third["run"] == "runs/mine" and os.readlink("runs/latest") == "mine"


def test_latest_does_not_lead_to_a_run_that_could_not_start(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(capsys, "plan.yaml")

    def refuses(*args: object, **named: object) -> None:
        raise PlanError("this model cannot be built")

    with monkeypatch.context() as patch:
        patch.setattr("meshwright.training.loop.new_state", refuses)
        assert call(capsys, "train", "--no-dry-run", "plan.yaml")[0] == 2
    assert os.readlink("runs/latest") == Path(str(first["run"])).name
    assert names(project / "runs") == ["-tiny"], "nor is its folder left"


def test_a_start_that_fails_leaves_no_folder(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "torn").mkdir()
    for wrong in ("data=nowhere", "resume=torn", "model=./nowhere", "recipe.sequence=30000"):
        assert call(capsys, "train", "--no-dry-run", "plan.yaml", wrong)[0] == 2
        assert not (project / "runs").exists() or names(project / "runs") == []


def test_a_profile_and_a_training_of_the_default_folder(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "profile", "plan.yaml", "--steps", "1", "--json")
    assert code == 0, err
    assert (project / "runs/latest/profile.json").is_file()
    train(capsys, "plan.yaml", "recipe.global_batch=8")
    assert names(project / "runs") == ["-tiny", "-tiny-2"]


def test_resume_auto_goes_on_with_the_newest_run_of_the_plan(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = train(capsys, "plan.yaml", "resume=auto")["run"]
    other = train(capsys, "plan.yaml", "recipe.sequence=16", "resume=auto")["run"]
    assert mine != other, "another length of sequence is no place to go on in"
    summary = train(capsys, "plan.yaml", "recipe.steps=3", "resume=auto")
    assert (summary["run"], summary["step"]) == (mine, 3)
    again = train(capsys, "plan.yaml", "resume=auto", "recipe.sequence=16", "recipe.steps=4")
    assert (again["run"], again["step"]) == (other, 4)
    assert len(names(project / "runs")) == 2


def test_resume_auto_leaves_a_run_of_another_recipe_alone(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its length and its evaluation may differ. The first lines name the run that was left."""
    plan = ("plan.yaml", "resume=auto", "recipe.warmup_steps=-1")
    mine = str(train(capsys, *plan)["run"])
    rate = planfile.read(f"{mine}/plan.yaml").recipe.learning_rate
    code, out, err = call(capsys, "train", "--no-dry-run", *plan, "recipe.learning_rate=0.5", "recipe.clip=0.25")
    assert code == 0, err
    assert names(project / "runs") == ["-tiny", "-tiny-2"] and os.readlink("runs/latest") == Path(f"{mine}-2").name
    message = f"a new run: {mine} has recipe.learning_rate={rate}, this plan 0.5 (1 more key differs); run={mine} "
    assert message in " ".join(out.split())
    looks = ["eval_every=1", "eval_sequences=3", "checkpoint_every=1", "keep_last=1", "log_every=2"]
    summary = train(capsys, *plan, "recipe.steps=30", *(f"recipe.{word}" for word in looks))
    assert (summary["run"], summary["step"]) == (mine, 30), "a warm-up that follows from the steps is no other recipe"


def test_resume_auto_from_another_folder_goes_on(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its absolute path, by the plan in the run, and from within the run."""
    run = project / str(train(capsys, "plan.yaml")["run"])
    named = planfile.read("plan.yaml", ["run=runs/named", "recipe.seed=1"])
    planfile.write(named, "named.yaml")
    train(capsys, "named.yaml")
    monkeypatch.chdir(tmp_path)
    for steps, (plan, right) in enumerate(
        (
            (project / "plan.yaml", run),
            (run / "plan.yaml", run),
            ("project/named.yaml", project / "runs/named"),
            ("project/runs/latest/plan.yaml", project / "runs/named"),
        ),
        start=3,
    ):
        summary = train(capsys, plan, f"recipe.steps={steps}", "resume=auto")
        assert (Path(str(summary["run"])).resolve(), summary["step"]) == (right, steps)
    monkeypatch.chdir(run)
    assert Path(str(train(capsys, "plan.yaml", "recipe.steps=9", "resume=auto")["run"])).resolve() == run
    assert len(names(project / "runs")) == 2 and not (tmp_path / "runs").exists()


def test_names_are_never_shared(tmp_path: Path) -> None:
    plan = planfile.read(None, [f"run={tmp_path}/auto", "model.name=a b/c (changed)"])
    folders = [default_folders.settle_run(plan) for _ in range(3)]
    assert [Path(path).name.partition("-a-b-c")[2] for path in folders] == ["", "-2", "-3"]
    (tmp_path / "latest").mkdir()
    default_folders.point_latest(Path(folders[0]))
    assert not (tmp_path / "latest").is_symlink(), "a folder of that name is somebody's"


def test_ctrl_c_is_130_with_a_checkpoint_and_a_way_on(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright.verbs.train.display import PlainDisplay

    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):

        def press(self: PlainDisplay, metrics: object, number: signal.Signals = number) -> None:
            os.kill(os.getpid(), number)

        with monkeypatch.context() as patch:
            patch.setattr(PlainDisplay, "stepped", press)
            summary, out, err = call(capsys, "train", "--no-dry-run", "plan.yaml", "recipe.steps=9")
        assert summary == code and not err
        [line] = [line for line in out.splitlines() if " to continue: " in line]
        run = os.readlink("runs/latest")
        assert (
            line.startswith("Saved after step 1 of 9; ")
            and " --no-dry-run " in line
            and f" run=runs/{run} " in line
            and line.endswith(" resume=auto")
        )
        assert (project / "runs/latest/checkpoints/step-000001/COMMIT").is_file()


def test_resume_auto_goes_on_for_more_epochs_or_tokens(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They set the length of a run, as steps do."""
    words = ("plan.yaml", "resume=auto", "recipe.warmup_steps=-1")
    first = train(capsys, *words, "recipe.epochs=0.01")
    longer = train(capsys, *words, "recipe.epochs=0.02")
    assert longer["run"] == first["run"] and int(str(longer["step"])) > int(str(first["step"]))
    tokens = 2 * int(str(longer["tokens"]))
    budget = train(capsys, *words, f"recipe.tokens={tokens}")
    assert budget["run"] == first["run"] and int(str(budget["tokens"])) >= tokens
    assert len(names(project / "runs")) == 1
