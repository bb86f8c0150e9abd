"""Every refusal of a layout gives advice; whoever takes it must not be refused for the same rule, nor for a new one."""

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from meshwright.spec import Layout, ModelShape, MoEShape, Recipe
from meshwright.spec.errors import PlanError
from meshwright.spec.rules.legal import layout_violations

DRAWS = 2000
SCHEDULES = ("afab", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
ROUNDS, DEALT = "runs # micro-batches in # rounds", "deals # layers to"
HIDDEN = {
    # a part of a refusal: rules that are looked at only once it is obeyed
    "has two stages a rank": ("stages exceed", DEALT, ROUNDS, "micro-batches or more"),
    "has one stage a rank": (DEALT, ROUNDS),
    "puts both ends": (DEALT, ROUNDS),
    "take layout.sp=true": ("cuts a rank's",),
    "take layout.ep=": ("and layout.ep# spreads no experts",),  # experts that are spread are whole
}


def drawn(random_: random.Random) -> tuple[ModelShape, Recipe, Layout]:
    pick = random_.choice
    heads = pick([1, 2, 3, 4, 6, 8, 12, 24])
    moe = pick([None, None, MoEShape(experts=pick([2, 4, 6, 8]), top_k=1, ffn=pick([3, 8, 24]))])
    shape = ModelShape(
        vocab=pick([5, 61, 64]), layers=pick([1, 2, 3, 4, 5, 7]), hidden=heads * 4, heads=heads, head_dim=4,
        kv_heads=pick([k for k in range(1, heads + 1) if heads % k == 0]), ffn=pick([5, 40]), max_positions=64,
        tied=pick([True, False]), moe=moe,
    )  # fmt: skip
    pp = pick([1, 1, 2, 3, 4])
    layout = Layout(
        tp=pick([1, 2, 3, 4, 5, 6, 7, 8]), sp=pick([True, False]), cp=pick([1, 1, 2, 3]), pp=pp,
        vp=pick([1, 1, 2, 3]), schedule=pick(SCHEDULES), dp_shard=pick([1, 2]), ep=pick([1, 1, 2, 3, 4]),
        micro_batch=pick([0, 1, 2]), zero=pick([0, 0, 1]), stages=pick([(), (), (), (2, 1)]),
    )  # fmt: skip
    return shape, Recipe(sequence=pick([12, 16, 17, 24, 48]), global_batch=pick([4, 6, 10, 12])), layout


def rule(sentence: str) -> str:
    """A refusal without its numbers and its advice."""
    told = re.split(r"(?:[:;,]| or) take ", sentence)[0]
    return re.sub(r"\[[\d, ]*\]|=[\w-]+|\d+", "#", told)


def ways(sentence: str) -> list[dict[str, Any]]:
    """Return the changes that the advice of a refusal names, by alternative. Those without a value are ignored."""
    advice = re.split(r"(?:[:;,]| or) take ", sentence)[-1]
    layouts = []
    for way in re.split(r",? or ", advice):
        pairs = re.findall(r"(?:(layout|recipe)\.)?\b(\w+)=(\[[^]]*\]|[\w-]+)", way)
        layouts.append({f"{where or 'layout'}.{key}": value for where, key, value in pairs})
    return [way for way in layouts if way]


def changed(recipe: Recipe, layout: Layout, way: dict[str, Any]) -> tuple[Recipe, Layout]:
    for key, value in way.items():
        where, _, name = key.partition(".")
        old = getattr(recipe if where == "recipe" else layout, name)
        if isinstance(old, bool):
            new: Any = value == "true"
        elif isinstance(old, tuple):
            new = tuple(int(number) for number in re.findall(r"\d+", value))
        else:
            new = int(value) if isinstance(old, int) else value
        if where == "recipe":
            recipe = replace(recipe, **{name: new})
        else:
            layout = replace(layout, **{name: new})
    return recipe, layout


def test_advice_is_legal() -> None:
    random_, taken, wrong = random.Random(13), 0, set()
    for _ in range(DRAWS):
        try:
            shape, recipe, layout = drawn(random_)
        except PlanError:
            continue
        refusals = layout_violations(shape, recipe, layout)
        before = {rule(sentence) for sentence in refusals}
        for sentence in refusals:
            for way in ways(sentence):
                taken += 1
                after = layout_violations(shape, *changed(recipe, layout, way))
                hidden = [part for first, parts in HIDDEN.items() if first in sentence for part in parts]
                for other in after:
                    new = rule(other)
                    if new == rule(sentence) or (new not in before and not any(part in new for part in hidden)):
                        wrong.add(f"{sentence}\n    {way}\n    -> {other}")
    assert taken > DRAWS
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(sorted(wrong, key=len)[:12])


@pytest.mark.parametrize(
    ("layers", "options", "advice"),
    [
        (3, {"pp": 3, "vp": 2, "schedule": "interleaved"}, "layout.vp=1"),
        (4, {"pp": 3, "vp": 2, "schedule": "interleaved"}, "layout.pp=2"),
        (1, {"pp": 2}, "layout.pp=1"),
        (3, {"pp": 2, "vp": 2, "schedule": "zb-v"}, "layout.vp=1 layout.schedule=zb-h1"),
    ],
)
def test_too_many_stages_are_told_a_pipeline_that_runs(layers: int, options: dict[str, Any], advice: str) -> None:
    shape = ModelShape(vocab=61, layers=layers, hidden=24, heads=4, ffn=40, max_positions=64)
    refusals = layout_violations(shape, Recipe(sequence=16, global_batch=8), Layout(micro_batch=1, **options))
    assert [sentence.split("take ")[1] for sentence in refusals if "exceed the model's" in sentence] == [advice]
