"""Runs that learn from a teacher: against a loss written out, under layouts, and what is refused at the start."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.data import prepare
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.interface.trained.opening import load
from meshwright.model import build
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.observe.ranks import on_ranks
from meshwright.spec import Layout, Plan
from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.spec.weights.inventory import num_parameters
from meshwright.training import loop
from meshwright.training.step.batches import to_batch
from tests.training.distilling import ROUTED, STUDENT, TEACHER, student_plan, taught, trained
from tests.training.running import Notes


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("taught"))


def written_out(asked: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, divergence, cross-entropy) of the first step, from whole logits of both models."""
    recipe, corpus = asked.recipe, prepare(asked.data)
    rows = numbered_rows(asked.data, recipe, corpus, corpus.train, shuffle=True).take(0, recipe.global_batch)
    batch = to_batch(rows, torch.device("cpu"), document_mask=True)
    mask_inputs = {"positions": batch.positions, "documents": batch.documents}
    student, theirs = build(asked.model, seed=recipe.seed), load(Path(asked.teacher_init)).model
    with torch.no_grad():
        teacher_logits, other = (
            model(batch.tokens, **mask_inputs)[..., : asked.teacher.vocab if asked.teacher else 0]
            for model in (student, theirs)
        )
        heat, valid = recipe.distillation_temperature, batch.targets >= 0
        ours, goal = (logits.div(heat).log_softmax(-1) for logits in (teacher_logits, other))
        soft = F.kl_div(ours, goal, reduction="none", log_target=True).sum(-1)[valid].mean() * heat**2
        hard = F.cross_entropy(teacher_logits[valid], batch.targets[valid])
    return (1 - recipe.distillation_hard) * soft + recipe.distillation_hard * hard, soft, hard


def test_the_first_step_is_the_loss_written_out(teacher: Path, tmp_path: Path) -> None:
    asked = student_plan(teacher, tmp_path / "run", distillation_temperature=1.5, distillation_hard=0.25)
    [first, *_] = trained(asked)
    loss, soft, hard = written_out(asked)
    assert first[0] == pytest.approx(loss.item(), rel=1e-5)
    assert first[2:] == (pytest.approx(soft.item(), rel=1e-5), pytest.approx(hard.item(), rel=1e-5))


def test_what_a_run_says_it_holds_is_what_a_dry_run_counts(teacher: Path, tmp_path: Path) -> None:
    asked = student_plan(teacher, tmp_path / "student", steps=1)
    trained(asked)
    memory = json.loads((tmp_path / "student" / "ledger.json").read_text())["memory"]
    held = {row["kind"]: row["bytes"] for row in memory}["parameters"]
    assert held == dry_run(asked, device="cpu").worst.kinds["parameters"]
    assert held > 4 * num_parameters(asked.model)


def test_a_student_comes_closer_and_is_scored_by_cross_entropy(teacher: Path, tmp_path: Path) -> None:
    asked = student_plan(teacher, tmp_path / "run", steps=12)
    watcher = Notes()
    summary = loop.run(asked, watchers=[watcher])
    assert watcher.steps[-1].figures["divergence"] < 0.9 * watcher.steps[0].figures["divergence"]
    [held_out] = watcher.evaluations
    assert held_out.bits_per_byte is not None and summary.bits_per_byte == pytest.approx(held_out.bits_per_byte)
    assert not held_out.figures


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "tp with sp": {"tp": 2, "sp": True},
    "ZeRO-3": {"dp_shard": 2, "zero": 3},
    "ZeRO-1": {"dp_shard": 2, "zero": 1},
    "cp": {"cp": 2, "zero": 0},
    "pp": {"pp": 2},
}


def _under(layouts: list[dict[str, Any]], asked: Plan) -> list[list[tuple[float, ...]]]:
    curves = []
    for number, each in enumerate(layouts):
        layout = Layout(**{"compile": "off", "micro_batch": 2, **each})
        curves.append(trained(replace(asked, run=f"{asked.run}-{number}", layout=layout)))
    return curves


@pytest.mark.parametrize("beta", [0.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_layouts_teach_the_same(teacher: Path, tmp_path: Path, beta: float) -> None:
    """To 1e-6 of the loss: the teacher is cut as the student is."""
    asked = student_plan(teacher, tmp_path / "run", distillation_beta=beta, distillation_hard=0.2)
    right = trained(replace(asked, layout=Layout(compile="off", micro_batch=2)))
    chosen = LAYOUTS if not beta else {name: LAYOUTS[name] for name in ("tp", "ZeRO-3", "pp")}
    [first, _] = on_ranks(2, _under, list(chosen.values()), asked)
    for name, curve in zip(chosen, first, strict=True):
        for step, expected in zip(curve, right, strict=True):
            assert step[0] == pytest.approx(expected[0], rel=1e-6), name
            assert step[1:] == pytest.approx(expected[1:], rel=1e-4), name


@pytest.mark.slow
def test_a_pipeline_teaches_the_same_with_what_else_is_shared(teacher: Path, tmp_path: Path) -> None:
    """Four ranks: two stages, each cut by tp or sharded by ZeRO-3."""
    asked = student_plan(teacher, tmp_path / "run", distillation_beta=0.3)
    right = trained(replace(asked, layout=Layout(compile="off", micro_batch=2)))
    layouts = [{"pp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 1}, {"pp": 2, "cp": 2}]
    [first, *_] = on_ranks(4, _under, layouts, asked)
    for layout, curve in zip(layouts, first, strict=True):
        for step, expected in zip(curve, right, strict=True):
            assert step[0] == pytest.approx(expected[0], rel=1e-6), layout


@pytest.mark.slow
def test_a_routed_teacher_teaches_the_same_under_layouts(tmp_path: Path) -> None:
    """Rounding may send a near-tied token to another expert: hence 1e-4."""
    asked = student_plan(taught(tmp_path, ROUTED), tmp_path / "run")
    right = trained(asked)
    [first, _] = on_ranks(2, _under, [{"tp": 2}, {"dp_shard": 2, "zero": 3}], asked)
    for curve in first:
        assert [figures[0] for figures in curve] == pytest.approx([figures[0] for figures in right], rel=1e-4)


def test_what_a_student_cannot_learn_from_is_refused_before_the_run(teacher: Path, tmp_path: Path) -> None:
    asked = student_plan(teacher, tmp_path / "run")
    assert asked.teacher is not None
    wide = replace(asked.teacher, hidden=32)
    cases = {
        "has no weights to teach with: give teacher=DIR": replace(asked, teacher_init="random"),
        "nowhere does not exist: give a folder with weights": replace(asked, teacher_init=str(tmp_path / "nowhere")),
        "has another shape": replace(asked, teacher=wide),
        "differs from the tokenizer of teacher.init": replace(asked, data=replace(asked.data, tokenizer="auto")),
        "differ, and the student has yet to learn what its tokens mean: take model.vocab=257": replace(
            asked, model=replace(STUDENT, vocab=384)
        ),
        "of the teacher: layout.pp=2 x layout.vp=2 stages exceed the model's 3 layers": replace(
            asked, model=replace(STUDENT, layers=4), layout=Layout(pp=2, vp=2, schedule="zb-v")
        ),
        "of the teacher: layout.tp=8": replace(
            asked, model=replace(STUDENT, hidden=64, heads=8, kv_heads=8), layout=Layout(tp=8)
        ),
    }
    for sentence, wrong in cases.items():
        with pytest.raises((PlanError, IllegalLayout), match=sentence):
            loop.run(wrong)
        assert not (tmp_path / "run").exists()
    assert TEACHER.heads == 4
