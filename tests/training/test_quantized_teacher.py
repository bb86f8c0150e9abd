"""A teacher whose folder holds codes: what it teaches, holds, and how it is counted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.compress.distill_student import student_of_layers
from meshwright.formats.hub import export_folder, import_folder
from meshwright.interface.trained.opening import load
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.observe.ranks import on_ranks
from meshwright.planner.step.predict import predict
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError
from meshwright.training import loop
from meshwright.training.objectives.teacher import open_teacher
from tests.training.running import Notes
from tests.training.test_frozen_codes import files
from tests.training.test_tuning import plan

__all__ = ["files"]
DISTILLED = ("recipe.objective=distill", "recipe.steps=3")
FOLDERS: list[tuple[str, str, dict[str, Any], str]] = [
    ("awq", "int4-rtn", {}, "int4-g32-zeros-fp16"),
    ("bitsandbytes", "nf4-double", {}, "nf4-double"),
    ("meshwright", "llm-int8", {}, ""),
]
"""Format, scheme, options, and the word under which codes are held; empty = they have none, and are restored."""


def quantized(files: Path, form: str, scheme: str, **more: Any) -> Path:
    mw.quantize(files / "hf", scheme, files / "q", format=form, quality=False, **more)
    return files / "q"


def taught(files: Path, teacher: Path | str, *words: str) -> Plan:
    return plan(files, f"teacher={teacher}", *DISTILLED, *words)


def losses(asked: Plan) -> list[float]:
    watcher = Notes()
    loop.run(asked, watchers=[watcher])
    return [step.loss for step in watcher.steps]


def twin(folder: Path, to: Path) -> Path:
    """The numbers that a folder's codes stand for, in fp32, as a folder."""
    source = open_teacher(folder)
    numbers = dict(source.numbers(torch.float32))
    export_folder(to, model_tensors=iter(numbers.items()), shape=source.shape, tokenizer=None, dtype=torch.float32)
    (to / "tokenizer.json").write_bytes((folder.parent / "hf" / "tokenizer.json").read_bytes())
    return to


@pytest.mark.parametrize(("form", "scheme", "more", "base"), FOLDERS)
def test_it_teaches_what_its_codes_stand_for(
    files: Path, form: str, scheme: str, more: dict[str, Any], base: str
) -> None:
    """Held as codes where they have a name, and the same losses as beside their numbers."""
    folder = quantized(files, form, scheme, **more)
    asked = taught(files, folder)
    assert asked.teacher is not None and (asked.teacher.lora.base if asked.teacher.lora else "") == base
    curve = losses(asked)
    plain = taught(files, twin(folder, files / "twin"), f"run={files / 'plain'}")
    assert curve == pytest.approx(losses(plain), rel=1e-5)
    assert curve != pytest.approx(losses(taught(files, files / "hf", f"run={files / 'whole'}")), rel=1e-5)


def _under(layouts: list[dict[str, Any]], asked: Plan) -> list[list[float]]:
    curves = []
    for number, layout in enumerate(layouts):
        cut = replace(asked.layout, micro_batch=1, **layout)
        curves.append(losses(replace(asked, run=f"{asked.run}-{number}", layout=cut)))
    return curves


@pytest.mark.long
def test_every_layout_has_the_losses_of_one_process(files: Path) -> None:
    folder = quantized(files, "awq", "int4-rtn")
    asked = taught(files, folder, "recipe.distillation_temperature=0.02")  # sharp: a wrong teacher is seen
    layouts: list[dict[str, Any]] = [{"dp_shard": 2, "zero": 3}, {"tp": 2}, {"pp": 2}]
    [curves, _] = on_ranks(2, _under, layouts, asked)
    alone = losses(asked)
    for layout, curve in zip(layouts, curves, strict=True):
        assert curve == pytest.approx(alone, rel=2e-5), layout


def test_plan_and_dry_run_count_its_codes(files: Path) -> None:
    folder = quantized(files, "awq", "int4-rtn")
    asked, whole = taught(files, folder), taught(files, files / "hf")
    coded, plain = dry_run(asked, ranks=[0]).ranks[0], dry_run(whole, ranks=[0]).ranks[0]
    assert coded.kinds["parameters"] < plain.kinds["parameters"]
    predicted_bytes = predict(asked).memory[0].kinds["parameters"] - predict(whole).memory[0].kinds["parameters"]
    assert predicted_bytes == coded.kinds["parameters"] - plain.kinds["parameters"]


def test_a_student_of_its_layers_has_numbers(files: Path) -> None:
    folder = quantized(files, "awq", "int4-rtn")
    student = import_folder(student_of_layers(folder, 1))
    assert student.shape.layers == 1
    numbers = dict(open_teacher(folder).numbers(torch.float32))
    held = dict(load(student.path).model.named_parameters())
    name = "layers.0.attention.q.weight"
    torch.testing.assert_close(held[name], numbers[name], rtol=1e-2, atol=1e-2)
    assert not isinstance(numbers[name], QuantizedMatrix)


def test_what_a_teacher_cannot_be_is_refused(files: Path) -> None:
    folder = quantized(files, "awq", "int4-rtn")
    with pytest.raises(
        PlanError, match=r"is quantized to int4-g32-zeros-fp16 already, .* take teacher.lora.base=int4-g32"
    ):
        loop.run(taught(files, folder, "teacher.lora.base=nf4"))
    with pytest.raises(PlanError, match=r"teacher.lora.targets=q would add adapters that nobody trains"):
        taught(files, folder, "teacher.lora.targets=q").check()
    with pytest.raises(PlanError, match=r"model.lora.targets=none is for teachers"):
        plan(files, "model.lora.rank=4", "model.lora.targets=none").check()
