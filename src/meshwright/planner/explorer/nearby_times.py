"""Step times of the states around the page's first layout, which the explorer looks up.

All states of the controls are too many to count: ten million for an 8B model on 64 devices. The map has up to 4,000
layouts. These tables add all layouts that differ from the first one in few controls, and its neighbours with other
sequences and batches. The page shows no time for all other states.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwright.planner.search.landscape import FIELDS, round_to_four_digits
from meshwright.planner.search.regions import (
    Fixed,
    Region,
    allowed,
    cells,
    micro_batches,
    offered_splits,
    pipelines,
    search_base,
)
from meshwright.planner.step.predict import Estimator
from meshwright.spec.layout.layout import RECOMPUTE, Layout
from meshwright.spec.layout.schedule import stage_numbers
from meshwright.spec.plan.plan import Plan

AXES = tuple(name for name in FIELDS if name != "dp_replicate")
"""Fields that determine a layout of a cluster."""
REACH = 3
"""Most controls in which a counted layout differs from the first one."""
MOST = 8000
"""Counted layouts with the page's recipe, nearest first."""


def nearby_times(
    estimator: Estimator, plan: Plan, first: Layout, controls: dict[str, Any], fixed: Fixed | None = None
) -> dict[str, Any]:
    """Return the step times of nearby states.

    `values`: axis -> its values. `seconds`: "sequence,global_batch" -> number of a layout -> seconds. Digits of that
    number are positions in `values`. With the page's recipe, layouts up to REACH controls away are counted; with
    another sequence or batch, layouts at most one control away.
    """
    base = search_base(plan, {"offload": ("off",)})
    nearby = sorted(_nearby_layouts(base, first, fixed or {}), key=lambda counted: counted[0])[:MOST]
    neighbours = [layout for distance, layout in nearby if distance <= 1]
    values = {axis: sorted({getattr(layout, axis) for _, layout in nearby}) for axis in AXES}
    recipe = plan.recipe
    others = [replace(recipe, sequence=length) for length in controls["sequence"] if length != recipe.sequence]
    others += [
        replace(recipe, global_batch=batch) for batch in controls["global_batch"] if batch != recipe.global_batch
    ]
    seconds = {_recipe_key(plan): _seconds(estimator, [layout for _, layout in nearby], values)}
    for other in others:
        changed = replace(plan, recipe=other)
        legal = [layout for layout in neighbours if not replace(changed, layout=layout).violations()]
        seconds[_recipe_key(changed)] = _seconds(estimator.with_recipe(other), legal, values)
    return {"axes": AXES, "values": values, "seconds": seconds}


def _recipe_key(plan: Plan) -> str:
    return f"{plan.recipe.sequence},{plan.recipe.global_batch}"


def _seconds(estimator: Estimator, layouts: list[Layout], values: dict[str, list[Any]]) -> dict[int, float]:
    seconds = {}
    for layout in layouts:
        number = 0
        for axis in AXES:
            number = number * len(values[axis]) + values[axis].index(getattr(layout, axis))
        seconds[number] = round_to_four_digits(estimator.time(layout, exact=False).total_s)
    return seconds


def _nearby_layouts(base: Plan, first: Layout, fixed: Fixed) -> Iterator[tuple[int, Layout]]:
    """Yield (changed controls, layout) of layouts within REACH, also of those that the search leaves out."""
    for cell in cells(base, base.cluster.devices, fixed):
        near = sum(getattr(cell, axis) != getattr(first, axis) for axis in ("tp", "cp", "ep", "pp"))
        near += cell.tp > 1 and cell.sp != (first.sp or first.tp == 1)
        if near > REACH:
            continue
        splits = offered_splits(base, cell, fixed)
        if cell.pp > 1 and 2 in allowed(fixed, "zero", (2,)):  # the search leaves it out: it does what 1 does there
            splits += tuple((copies, shards, 2) for copies, shards, zero in splits if zero == 1)
        for micro_batch in micro_batches(base, cell, fixed):
            for recompute in allowed(fixed, "recompute", RECOMPUTE):
                inside = near + (micro_batch != first.micro_batch) + (recompute != first.recompute)
                if inside > REACH:
                    continue
                for schedule, vp in pipelines(base, cell, micro_batch, fixed):
                    region = Region(cell, micro_batch, schedule, vp, recompute)
                    piped = inside + _pipeline_changes(first, region, base.model.layers)
                    for copies, shards, zero in splits:
                        distance = (
                            piped + (zero != first.zero) + (shards not in (cell.dp if zero else 1, first.dp_shard))
                        )
                        if distance <= REACH:
                            yield distance, region.layout(copies, shards, zero, base=base.layout)


def _pipeline_changes(first: Layout, region: Region, layers: int) -> int:
    """Return how many of schedule and virtual stages are not what the page sets by itself."""
    if region.cell.pp == 1:
        return 0
    usual = {stage_numbers(region.schedule, region.cell.pp, layers)[0]}
    if region.schedule == first.schedule:
        usual.add(first.vp)
    return (region.schedule != first.schedule) + (region.vp not in usual)
