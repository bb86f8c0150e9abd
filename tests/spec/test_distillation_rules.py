"""Rules of distillation: each refusal names the key to change. Layout of a teacher."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planfile import dump, read
from meshwright.spec import Layout, ModelShape, Plan, Recipe, presets
from meshwright.spec.errors import PlanError
from meshwright.spec.plan.plan import Data, MixtureSource
from meshwright.spec.rules.legal import teacher_layout

TEACHER, STUDENT = presets.model("llama-10m"), presets.model("llama-tiny")
SAME = replace(STUDENT, vocab=TEACHER.vocab)


def plan(student: ModelShape = SAME, teacher: ModelShape | None = TEACHER, **recipe: Any) -> Plan:
    return Plan(model=student, teacher=teacher, recipe=Recipe(**{"objective": "distill", **recipe}))


CASES: dict[str, Plan] = {
    "there is none: give teacher=DIR": plan(teacher=None),
    "teacher=llama-10m belongs to recipe.objective=distill": plan(objective="cross-entropy"),
    "recipe.distillation_hard=0.5 belongs to recipe.objective=distill": plan(
        teacher=None, objective="cross-entropy", distillation_hard=0.5
    ),
    "take model.vocab=": plan(replace(STUDENT, vocab=TEACHER.vocab + 128)),
    "layout.tp=2 would cut them at different tokens: take layout.tp=1": replace(
        plan(replace(STUDENT, vocab=TEACHER.vocab + 128)), init="hf", layout=Layout(tp=2)
    ),
    "of the teacher: layout.pp=7 x layout.vp=1 stages exceed": replace(
        plan(replace(STUDENT, layers=8, vocab=TEACHER.vocab)), layout=Layout(pp=7)
    ),
    "take recipe.distillation_beta=0": plan(distillation_beta=0.5, distillation_top_k=8),
    "is stored for the rows of one text": replace(
        plan(distillation_top_k=8),
        data=Data(mixture=(MixtureSource(path="a", weight=1), MixtureSource(path="b", weight=1))),
    ),
    "take recipe.noise_scale_every=0": replace(plan(noise_scale_every=2), layout=Layout(micro_batch=4)),
    "of the teacher: layout.tp=16": replace(
        plan(replace(SAME, hidden=512, heads=16, kv_heads=16)), layout=Layout(tp=16)
    ),
    "learned positions of the teacher: take recipe.sequence=64": plan(
        teacher=replace(TEACHER, positions="learned", max_positions=64)
    ),
}


@pytest.mark.parametrize("sentence", CASES)
def test_what_does_not_go_together_is_refused_with_what_to_change(sentence: str) -> None:
    refusals = CASES[sentence].violations()
    assert any(sentence in refusal for refusal in refusals), refusals


def test_legal_ones_are_not_refused() -> None:
    padded = replace(plan(replace(STUDENT, vocab=TEACHER.vocab + 128)), init="hf")
    offline = replace(plan(distillation_top_k=8), layout=Layout(pp=2, micro_batch=4))
    for legal in (plan(), padded, offline, replace(plan(), layout=Layout(tp=2, dp_shard=2, zero=3))):
        assert not legal.violations()


@pytest.mark.parametrize(
    ("key", "value"),
    [("beta", 1.5), ("beta", -0.1), ("temperature", 0.0), ("temperature", float("inf")), ("hard", 1.0), ("top_k", -1)],
)
def test_numbers_out_of_range(key: str, value: float) -> None:
    with pytest.raises(PlanError, match=f"recipe.distillation_{key}"):
        Recipe(**{f"distillation_{key}": value})  # type: ignore[arg-type]  # one of several types


def test_a_teacher_has_no_states_to_share_and_nothing_to_recompute() -> None:
    student = Layout(dp_shard=4, zero=2, recompute="full", offload="activations")
    assert teacher_layout(student, TEACHER) == Layout(dp_shard=4, zero=0)
    assert teacher_layout(replace(student, zero=3), TEACHER) == Layout(dp_shard=4, zero=3)


def test_a_teacher_is_given_as_a_model_is_and_written_out() -> None:
    loaded = read(None, ["teacher=llama-10m", "teacher.layers=4", "recipe.objective=distill"])
    assert loaded.teacher is not None and loaded.teacher.layers == 4 and loaded.teacher.name == "llama-10m (changed)"
    assert dump(loaded)["teacher"]["layers"] == 4 and "teacher" not in dump(read(None))
    assert read(None, ["teacher.layers=3", "teacher=llama-10m"]).teacher == TEACHER, "the last word wins"
