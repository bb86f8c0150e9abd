"""What a plan says of a teacher: its frozen weights to the byte, and its passes."""

from dataclasses import replace

import pytest

from meshwright.observe.dryrun.simulate import dry_run
from meshwright.planner.search.ranking import search
from meshwright.planner.search.regions import cells
from meshwright.planner.step.predict import build_estimator, predict
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.weights.inventory import token_flop

TEACHER, STUDENT = presets.model("llama-10m"), presets.model("llama-tiny")
SAME = replace(STUDENT, vocab=TEACHER.vocab)
ALONE = Plan(model=SAME, recipe=Recipe(global_batch=8), layout=Layout(micro_batch=4, compile="off"))
TAUGHT = replace(ALONE, recipe=Recipe(global_batch=8, objective="distill"), teacher=TEACHER)
LAYOUTS: dict[str, Layout] = {
    "one device": ALONE.layout,
    "tp": replace(ALONE.layout, tp=2),
    "ZeRO-3": replace(ALONE.layout, dp_shard=2, zero=3),
    "a pipeline": replace(ALONE.layout, pp=2, micro_batch=2, schedule="1f1b"),
    "a pipeline with ZeRO-3": replace(ALONE.layout, pp=2, micro_batch=1, dp_shard=2, zero=3, schedule="1f1b"),
    "a V": replace(ALONE.layout, pp=2, vp=2, micro_batch=2, schedule="zb-v"),
    "logits in chunks": replace(ALONE.layout, micro_batch=8),
}


SLOW = ("a pipeline with ZeRO-3", "a V")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[pytest.mark.slow] * (name in SLOW), id=name) for name, layout in LAYOUTS.items()],
)
@pytest.mark.long
def test_weights_are_those_of_the_dry_run_and_the_peak_is_near(layout: Layout) -> None:
    plan = replace(TAUGHT, layout=layout)
    for planned in predict(plan).memory:
        first = planned.pp_rank * (layout.world // layout.pp)
        run = dry_run(plan, ranks=[first], device="cpu").worst
        assert planned.kinds["parameters"] == run.kinds["parameters"]
        assert planned.total_bytes - planned.kinds["reserve"] == pytest.approx(run.peak_bytes, rel=0.05)


def test_its_forward_passes_take_time_by_their_flop() -> None:
    """A teacher's pass over its own FLOP a third of a training step's; on one device, whose rate is one."""
    alone, taught = predict(ALONE).step_s, predict(TAUGHT).step_s
    teacher = predict(replace(ALONE, model=TEACHER)).step_s
    assert alone + teacher / 5 < taught < alone + teacher / 2
    assert token_flop(TEACHER, 256, causal=True).training > token_flop(SAME, 256, causal=True).training


def test_one_that_is_asked_before_the_run_costs_a_step_nothing() -> None:
    stored = replace(TAUGHT, recipe=replace(TAUGHT.recipe, distillation_top_k=16))
    assert predict(stored).worst.kinds["parameters"] == predict(ALONE).worst.kinds["parameters"]


def test_the_search_offers_pipelines_for_which_a_teacher_has_layers() -> None:
    short = replace(TAUGHT, teacher=replace(TEACHER, layers=2))
    assert {cell.pp for cell in cells(TAUGHT, 4, {})} == {cell.pp for cell in cells(ALONE, 4, {})} == {1, 2, 4}
    assert {cell.pp for cell in cells(short, 4, {})} == {1, 2}


def test_a_student_that_samples_is_offered_whole_weights_alone() -> None:
    recipe = replace(TAUGHT.recipe, distillation_on_policy=0.5)
    cluster = presets.cluster("h100x8")
    asked = replace(TAUGHT, recipe=recipe, cluster=cluster)
    listed = search(build_estimator(asked), asked).best
    assert listed and not any(prediction.plan.violations() for prediction in listed)
    assert {
        (prediction.plan.layout.tp, prediction.plan.layout.pp, prediction.plan.layout.zero) for prediction in listed
    } == {(1, 1, 0)}


def test_a_pipeline_waits_for_a_teachers_passes() -> None:
    """As long as they take on the busiest of two ranks, and one micro-batch's way through the other."""
    layout = replace(ALONE.layout, pp=2, micro_batch=2)
    alone, taught = (predict(replace(plan, layout=layout)).step_s for plan in (ALONE, TAUGHT))
    teacher = predict(replace(ALONE, model=TEACHER, layout=layout)).step_s
    assert alone + teacher / 5 < taught < alone + teacher / 2


def test_a_memory_does_not_depend_on_what_was_asked_before() -> None:
    """Under ZeRO-3 the student's loss stands beside gathered weights of the teacher; under other stages it does not."""
    layouts = [replace(ALONE.layout, dp_shard=4, micro_batch=1, zero=zero) for zero in (0, 3, 2, 1)]
    fresh = [build_estimator(TAUGHT).memory(layout, [0]) for layout in layouts]
    assert fresh[1][0].kinds["logits"] > fresh[0][0].kinds["logits"]
    for order in (layouts, layouts[::-1]):
        shared = build_estimator(TAUGHT)
        memories = {layout.zero: shared.memory(layout, [0]) for layout in order}
        assert [memories[layout.zero] for layout in layouts] == fresh
