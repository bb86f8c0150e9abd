"""Relative paths: of the plan file's folder in a file, of the current folder on a command line."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planfile import absolute, read, without_folders, write
from meshwright.planfile.reading import FolderModel
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError

WORDS = "run: runs/a\ndata: {path: texts, tokenizer: own/tokenizer.json}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan file in a folder, called from there."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "plan.yaml").write_text(WORDS)
    monkeypatch.chdir(folder)
    return folder


def written_plan(plan: Plan, *, trained: bool = True) -> Path:
    """The plan in its run folder."""
    run = Path(plan.run)
    run.mkdir(parents=True)
    write(plan, run / "plan.yaml")
    (run / "checkpoints").mkdir()
    if trained:
        (run / "metrics.jsonl").write_text("")
    return run / "plan.yaml"


def test_a_plan_means_the_same_from_any_folder(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = read("plan.yaml")
    assert (here.run, here.data.path, here.data.tokenizer) == ("runs/a", "texts", "own/tokenizer.json")
    monkeypatch.chdir(tmp_path)
    above = read("project/plan.yaml", ["run=elsewhere"])
    assert (above.run, above.data.path) == ("elsewhere", "project/texts"), "what is on the command line is the caller's"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    beside = read("../project/plan.yaml")
    assert (beside.run, beside.data.path) == (str(project / "runs/a"), str(project / "texts"))
    assert absolute(beside) == absolute(read(project / "plan.yaml"))


@pytest.mark.parametrize("trained", [True, False])
def test_the_plan_of_a_run_means_that_run(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    file, plan = written_plan(read("plan.yaml"), trained=trained), absolute(read("plan.yaml"))
    assert read(file).run == "runs/a", "from where it was begun it reads as it was given"
    monkeypatch.chdir(tmp_path)
    assert absolute(read(project / file)) == plan
    monkeypatch.chdir(project / "runs/a")
    assert absolute(read("plan.yaml")) == plan
    os.symlink("a", "../latest")
    assert absolute(read("../latest/plan.yaml")) == plan


def test_a_plan_in_a_folder_with_the_name_of_its_run_is_not_kept_by_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a folder that holds a run has a plan of its own."""
    monkeypatch.chdir(tmp_path)
    Path("exp1").mkdir()
    Path("exp1/plan.yaml").write_text("run: exp1\ndata: {path: texts}\n")
    actual = read("exp1/plan.yaml")
    assert (actual.run, actual.data.path) == ("exp1/exp1", "exp1/texts")


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "ended before its first step"])
def test_a_run_that_was_moved_goes_on_where_it_is_now(project: Path, trained: bool) -> None:
    written_plan(read("plan.yaml"), trained=trained)
    Path("runs").rename("old")
    actual = read("old/a/plan.yaml")
    assert (actual.run, actual.data.path) == ("old/a", str(project / "texts"))


def test_a_copy_of_a_runs_plan_still_names_that_run(project: Path) -> None:
    """Not the folder of the copy: it would be filled with checkpoints."""
    file = written_plan(read("plan.yaml"))
    Path("next.yaml").write_bytes(file.read_bytes())
    assert absolute(read("next.yaml")) == absolute(read("plan.yaml"))


def test_a_plan_that_was_kept_with_relative_paths(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As run folders had them before: of the folder that the run was begun in, which the end of its path tells."""
    plan = absolute(read("plan.yaml"))
    run = project / "runs/a"
    (run / "checkpoints").mkdir(parents=True)
    (run / "plan.yaml").write_text(WORDS)
    monkeypatch.chdir(tmp_path)
    assert absolute(read(run / "plan.yaml")) == plan
    run.rename(project / "runs/b")
    assert read(project / "runs/b/plan.yaml").run == "project/runs/b", "the run that it lies in, never another one"


def test_words_that_are_no_paths_stay(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = project / "other.yaml"
    monkeypatch.chdir(tmp_path)
    for path, tokenizer in (("stdlib", "auto"), ("hub:a/b", "bytes"), ("/x", "bpe:300"), ("~/x", "/y/tokenizer.json")):
        file.write_text(f"data: {{path: '{path}', tokenizer: {tokenizer}}}\nmodel: llama-10m\n")
        actual = read(file)
        assert (actual.data.path, actual.data.tokenizer, actual.model.name) == (path, tokenizer, "llama-10m")
        assert actual.run == "project/runs/auto", "the default too"
        write(actual, file)
        assert read(file) == actual


def test_the_weights_of_a_folder_come_with_its_shape_unless_somebody_says_otherwise(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(read(None).model, name="hf")
    (project / "hf").mkdir()
    (project / "hf/tokenizer.json").write_text("{}")
    plan = Path("plan.yaml")
    for text, init in (
        ("model: hf", "./hf"),
        ("model: {preset: ./hf, init: random}", "random"),
        ("model: {preset: llama-10m, init: hf}", "hf"),
        ("model: llama-10m", "random"),
    ):
        monkeypatch.chdir(project)
        plan.write_text(text)
        here = read("plan.yaml", read_folder=lambda _: FolderModel(shape=shape))
        assert os.path.normpath(here.init) == os.path.normpath(init)
        ours = "auto" if init == "random" else str(Path("hf/tokenizer.json"))
        assert os.path.normpath(here.data.tokenizer) == ours
        write(here, tmp_path / "saved.yaml")
        monkeypatch.chdir(tmp_path)
        assert (
            absolute(read(project / "plan.yaml", read_folder=lambda _: FolderModel(shape=shape))).init
            == absolute(read("saved.yaml")).init
        )
        assert read("saved.yaml").model == here.model
    monkeypatch.chdir(project)
    inputs = read(None, ["model=./hf", "data.tokenizer=bytes"], read_folder=lambda _: FolderModel(shape=shape))
    assert (inputs.init, inputs.data.tokenizer) == ("hf", "bytes")
    assert (
        read(None, ["model=./hf", "model.init=random"], read_folder=lambda _: FolderModel(shape=shape)).init == "random"
    )
    with pytest.raises(PlanError, match=r"model.init must be random, or a Hugging Face folder"):
        read(None, ["model.init=[1]"])


def test_a_plan_that_is_shown_to_others_says_nothing_of_this_machine() -> None:
    words = ["data=/home/me/texts", "data.tokenizer=/home/me/hf/tokenizer.json", "run=/home/me/runs/a"]
    actual = without_folders(read(None, [*words, "model.init=/home/me/hf"]))
    assert (actual.data.path, actual.data.tokenizer, actual.run, actual.init) == ("texts", "tokenizer.json", "a", "hf")
    assert without_folders(read(None, ["data=hub:a/b", "run=x"])).data == read(None, ["data=hub:a/b"]).data
