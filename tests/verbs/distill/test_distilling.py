"""`distill` in Python and on the command line: students by shape, by folder, by layers; and errors."""

import json
import os
import re
import shlex
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.compress.distill_student import shape_of_layers, spread_layers, student_of_layers
from meshwright.formats.hub import import_folder
from meshwright.planfile import read
from meshwright.spec.errors import ArgumentError, HubError, PlanError
from meshwright.store.model_weights import locate, weights
from meshwright.store.run_folder import RunFolder
from meshwright.verbs.distill.answer import distillation_plan
from meshwright.verbs.main import main
from meshwright.verbs.train.display import PlainDisplay
from tests.training.distilling import ROUTED, TEACHER, taught
from tests.training.running import MOE


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("taught"))


def test_layers_are_spread_and_both_ends_kept() -> None:
    assert spread_layers(12, 4) == [0, 4, 7, 11] and spread_layers(3, 2) == [0, 2] and spread_layers(5, 1) == [0]
    with pytest.raises(PlanError, match="must be at least 1 and below 12: take layers=6"):
        spread_layers(12, 12)


def test_a_student_of_layers_has_its_teachers_weights(teacher: Path) -> None:
    folder = student_of_layers(teacher, 2)
    assert folder == student_of_layers(teacher, 2), "made once"
    student_weights: dict[str, torch.Tensor] = {}
    hub = import_folder(folder)
    hub.load(lambda name, tensor: student_weights.__setitem__(name, tensor))
    assert hub.shape.layers == 2 and hub.tokenizer is not None
    theirs = dict(weights(locate(teacher)[1], torch.float32))
    assert torch.equal(student_weights["layers.1.mlp.up.weight"], theirs["layers.2.mlp.up.weight"])
    assert torch.equal(student_weights["layers.0.attention.q.weight"], theirs["layers.0.attention.q.weight"])
    assert torch.equal(student_weights["embed.weight"], theirs["embed.weight"])


def test_layers_of_other_kinds_are_refused() -> None:
    assert MOE.moe is not None
    mixed = replace(ROUTED, layers=4, family="qwen3_moe", moe=replace(MOE.moe, first_dense=2))
    with pytest.raises(PlanError, match="differs in kind"):
        shape_of_layers(mixed, [0, 3])
    assert shape_of_layers(TEACHER, [0, 2]).name == "teacher-2-layers"


def test_a_student_of_layers_is_trained_in_python(teacher: Path, tmp_path: Path) -> None:
    texts = teacher.parent / "texts"
    answer = mw.distill(
        teacher=teacher, student="teacher:layers=2", data=str(texts), run=str(tmp_path / "run"), dry_run=False,
        recipe={"steps": 3, "sequence": 12, "global_batch": 4, "warmup_steps": 1}, watchers=(),
    )  # fmt: skip
    assert answer.done and answer.plan.teacher is not None and answer.plan.teacher.layers == 3
    assert answer.plan.model.layers == 2 and Path(answer.plan.init).is_dir()
    assert answer.plan.recipe.learning_rate == 1e-4 and answer.rows()[-1]["divergence"] > 0
    assert answer.load().generate("1 times", max_new_tokens=4)


@pytest.mark.long
def test_the_verb_trains_and_goes_on(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = f"data={teacher.parent / 'texts'}"
    words = ["model.vocab=257", "data.tokenizer=bytes", texts, "run=student", "recipe.steps=2", "recipe.sequence=12"]
    words += ["recipe.global_batch=4", "layout.compile=off"]
    options = ["distill", "--teacher", str(teacher), "--student", "llama-tiny", *words]
    assert main([*options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    saved_plan = read(tmp_path / "student" / "plan.yaml")
    assert saved_plan.teacher_init == str(teacher) and saved_plan.recipe.objective == "distill"
    assert main([*options, "recipe.steps=3", "resume=auto", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3


@pytest.mark.parametrize(
    ("teacher_of", "student", "sentence"),
    [
        ("", "llama-tiny", "distill learns from a teacher: give teacher=DIR"),
        ("llama-10m", "teacher:layers=2", "has no weights: give a Hugging Face folder or a run"),
        ("runs/none", "teacher:layers=2", "does not exist: give a Hugging Face folder or a run"),
        ("llama-10m", "teacher:half", "write teacher:layers=N"),
    ],
)
def test_what_is_missing_is_named(teacher_of: str, student: str, sentence: str) -> None:
    with pytest.raises((PlanError, ArgumentError), match=sentence):
        distillation_plan([], teacher_of, student)


def test_a_student_nobody_chose_and_one_that_is_larger_are_named(teacher: Path) -> None:
    notes: list[str] = []
    distillation_plan(["model.vocab=257"], str(teacher), "", notes=notes)
    assert any("distillation default: student=llama-tiny" in note for note in notes)
    assert any("more parameters than its teacher" in note for note in notes)
    notes.clear()
    distillation_plan([], str(teacher), "teacher:layers=2", notes=notes)
    assert not any("student=" in note or "more parameters" in note for note in notes)


def test_the_text_of_a_teacher_that_is_a_run_is_read_where_no_other_is_named(teacher: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    theirs, tokenizer = RunFolder.open(teacher).plan.data, teacher / "tokenizer.json"
    plan, _ = distillation_plan([f"teacher={teacher}", "data.packing=off"], "", "teacher:layers=2", notes=notes)
    assert Path(theirs.path).is_dir() and Path(plan.data.tokenizer).read_bytes() == tokenizer.read_bytes()
    assert plan.data == replace(theirs, tokenizer=plan.data.tokenizer, packing="off")
    assert f"distillation default: data={theirs.path}, which the teacher was trained on" in notes
    for word in (f"data={tmp_path}", f"data.path={tmp_path}"):
        notes.clear()
        plan, _ = distillation_plan([word], str(teacher), "teacher:layers=2", notes=notes)
        assert plan.data.path == str(tmp_path) and not any("was trained on" in note for note in notes)


@pytest.mark.long
def test_the_hint_of_a_stopped_run_has_the_words_that_were_given(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PlainDisplay, "stepped", lambda self, metrics: os.kill(os.getpid(), signal.SIGINT))
    words = ["recipe.steps=3", "recipe.sequence=12", "recipe.global_batch=4", "layout.compile=off"]
    options = ["--teacher", str(teacher), "--student", "teacher:layers=2"]
    assert main(["distill", *options, *words, "--no-dry-run"]) == 130
    [line] = [line for line in capsys.readouterr().out.splitlines() if " to continue: " in line]
    asked = shlex.split(line.partition(" distill ")[2])
    assert asked[:4] == options and "--no-dry-run" in asked and not any("recipe.objective" in word for word in asked)
    [run] = [word for word in asked if word.startswith("run=")]
    assert re.fullmatch(r"run=runs/\d{4}-\d\d-\d\d-[a-z-]+-2-layers", run), "no hash is in its name"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(["distill", *asked]) == 0


def test_a_run_as_a_student_is_told_to_be_exported(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("model: llama-tiny\n")
    with pytest.raises(ArgumentError, match=r"is a run: export it \(`meshwright export"):
        distillation_plan([], str(teacher), str(tmp_path))
    with pytest.raises(HubError, match=r"it is a run: `meshwright export"):
        import_folder(tmp_path)


def test_another_vocabulary_ends_with_exit_code_2(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"data={teacher.parent / 'texts'}", f"run={tmp_path / 'run'}", "data.tokenizer=bytes"]
    assert main(["distill", "--teacher", str(teacher), "--student", "llama-tiny", *words]) == 2
    assert "take model.vocab=257" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_plans_count_a_teacher() -> None:
    alone = mw.plan("llama-3.1-8b", cluster="h100x8", nodes=2, layout="dp=16,zero=3")
    taught = mw.plan("llama-3.1-8b", teacher="llama-3.1-70b", cluster="h100x8", nodes=2, layout="dp=16,zero=3")
    assert taught.best.prediction.step_s > 2 * alone.best.prediction.step_s
