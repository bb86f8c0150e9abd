"""A plan and a number of processes that do not go together: both numbers, and the nearest that do."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planfile import read
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.errors import PlanError
from meshwright.spec.plan.plan import nearest_layouts, world_violation

PLAN = Plan(model=presets.model("llama-3.1-8b"), recipe=Recipe(sequence=4096, global_batch=64))


def plan(**layout: Any) -> Plan:
    return replace(PLAN, layout=Layout(**layout))


def test_a_world_that_is_the_layouts() -> None:
    assert world_violation(plan(tp=2, dp_shard=4), 8) is None


def test_both_numbers_and_the_nearest_layouts() -> None:
    sentence = world_violation(plan(tp=2, dp_shard=2), 8)
    assert sentence == (
        "the layout has dp_replicate=1 x dp_shard=2 x cp=1 x tp=2 x pp=1 = 4 ranks and 8 were started: "
        "start 4 processes (torchrun --nproc_per_node 4), or take layout.dp_shard=4, or layout.dp_replicate=2"
    )
    alone = world_violation(plan(tp=2, sp=True), 1)
    assert alone is not None and alone.endswith("(torchrun --nproc_per_node 2), or take layout.tp=1 layout.sp=false")


def test_torchrun_is_told_the_processes_of_one_node() -> None:
    """Not the whole world, which each node would then start."""
    started = world_violation(plan(tp=8, dp_shard=4), 16, nodes=2)
    assert started is not None and "(torchrun --nnodes 2 --nproc_per_node 16, on each node)" in started
    known = replace(plan(tp=8, dp_shard=4), cluster=presets.cluster("h100x8", 4))
    for processes, nodes in ((1, 1), (8, 1), (16, 2)):
        sentence = world_violation(known, processes, nodes)
        assert sentence is not None and "(torchrun --nnodes 4 --nproc_per_node 8, on each node)" in sentence
    odd = world_violation(plan(tp=2), 9, nodes=3)
    assert odd is not None and "2 is no multiple of 3 nodes" in odd


def test_the_number_of_processes_comes_before_what_it_makes_illegal() -> None:
    """Neither the advised batch of 63 nor tp=2 would be the end of it."""
    batch = world_violation(plan(dp_shard=3), 2)
    assert batch is not None and "= 3 ranks and 2 were started: take layout.dp_shard=2, or layout." in batch
    heads = world_violation(plan(tp=3), 1)
    assert heads is not None and heads.endswith("tp=3 x pp=1 = 3 ranks and 1 was started: take layout.tp=1")
    hopeless = replace(plan(tp=2), recipe=replace(PLAN.recipe, noise_scale_every=5, global_batch=1))
    sentence = world_violation(hopeless, 1)
    assert sentence is not None and sentence.startswith("recipe.noise_scale_every=5")


def test_one_is_singular() -> None:
    sentence = world_violation(plan(), 2)
    assert sentence is not None and "= 1 rank and 2 were started: start 1 process (torchrun" in sentence


def test_stages_by_hand_go_with_their_pipeline() -> None:
    by_hand = plan(pp=2, stages=(17, 15), micro_batch=1)
    assert all((layout.stages == (17, 15)) == (layout.pp == 2) for layout in nearest_layouts(by_hand, 4))
    sentence = world_violation(plan(pp=2, stages=(17, 16), micro_batch=1), 2)
    assert sentence is not None and "layout.pp=1 layout.stages=[]" in sentence


def test_what_is_proposed_is_legal() -> None:
    moe = replace(plan(dp_shard=8, ep=8, zero=3), model=presets.model("mixtral-8x7b"))
    for processes in (1, 2, 6, 12, 16):
        layouts = nearest_layouts(moe, processes)
        assert layouts and all(layout.world == processes for layout in layouts)
        assert not any(replace(moe, layout=layout).violations() for layout in layouts)


def test_no_layout_of_so_many() -> None:
    sentence = world_violation(plan(dp_shard=37), 37)
    assert sentence is not None
    assert "recipe.global_batch=64 is not micro_batch=1 x accumulation x dp=37" in sentence
    assert sentence.endswith("; no layout of 37 processes is legal for this plan, one of 36 or 38 is")


@pytest.mark.parametrize(
    ("processes", "words", "expected"),
    [
        (8, ["layout.dp_shard=auto", "layout.tp=2"], {"dp_shard": 4, "tp": 2}),
        (2, ["layout.dp_shard=auto", "layout.tp=2"], {"dp_shard": 1, "tp": 2}),
        (6, ["layout.dp_replicate=AUTO", "layout.dp_shard=3", "layout.zero=1"], {"dp_replicate": 2, "dp_shard": 3}),
        (7, ["layout.dp_shard=auto", "layout.cp=2"], {"dp_shard": 3, "cp": 2}),
        (4, ["layout={dp_shard: auto, zero: 3}"], {"dp_shard": 4, "zero": 3}),
        (1, ["layout={dp_shard: auto, zero: 3}"], {"dp_shard": 1, "zero": 0}),
    ],
)
def test_auto_takes_what_is_there(processes: int, words: list[str], expected: dict[str, int]) -> None:
    notes: list[str] = []
    layout = read(None, words, processes=processes, notes=notes).layout
    assert {name: getattr(layout, name) for name in expected} == expected
    assert bool(notes) == (processes == 1)


def test_one_degree_can_be_auto() -> None:
    with pytest.raises(PlanError, match="one can be auto"):
        read(None, ["layout={dp_shard: auto, dp_replicate: auto}"], processes=4)
    with pytest.raises(PlanError, match=r"layout\.tp=auto must be a whole number"):
        read(None, ["layout.tp=auto"], processes=4)
