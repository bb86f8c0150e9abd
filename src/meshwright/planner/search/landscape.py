"""Every legal layout as a point of memory and step time, for the explorer's map: all of a small space, of a large one a
sample and the Pareto front.

The front is searched as planner/search/ranking.py searches the fastest: a family or region is left aside where some
layout beats both the least memory and the least time that it can have (planner/search/bounds.py). Points are counted
without playing their schedules, from closed forms of what is in flight and of the bubble that are not above the truth;
those of the front exactly.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from math import inf
from random import Random
from typing import Any, NamedTuple

from meshwright.planner.search.bounds import CellBounds, families
from meshwright.planner.search.regions import Fixed, Region, RegionFamily, search_base
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import usable_bytes
from meshwright.planner.time.timeline import StepTime
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.schedule_kinds import KINDS

MOST = 4000
"""Points: of a larger space three quarters of them drawn evenly, the others from those looked at for the front."""
FIELDS = (
    "dp_replicate", "dp_shard", "zero", "tp", "sp", "cp", "pp", "vp", "ep", "schedule", "micro_batch", "recompute",
)  # fmt: skip
PARTS = ("compute_s", "exchange_s", "bubble_s", "weights_s", "gradients_s", "optimizer_s", "other_s")


class LayoutPoint(NamedTuple):
    """A layout, counted."""

    step_s: float
    peak_bytes: float
    layout: Layout
    time: StepTime


class Front:
    """Points none of which another one beats in both time and memory, by ascending time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.points: list[LayoutPoint] = []

    def beats(self, step_s: float, peak_bytes: float) -> bool:
        """Whether one of them is at most as long and as large."""
        place = bisect_right(self.times, step_s)
        return place > 0 and self.points[place - 1].peak_bytes <= peak_bytes

    def add(self, point: LayoutPoint) -> None:
        """Unless it is beaten; those that it beats go."""
        if self.beats(point.step_s, point.peak_bytes):
            return
        place = end = bisect_left(self.times, point.step_s)
        while end < len(self.points) and self.points[end].peak_bytes >= point.peak_bytes:
            end += 1
        self.times[place:end] = [point.step_s]
        self.points[place:end] = [point]


def landscape(of: Estimator, plan: Plan, *, fixed: Fixed | None = None, most: int = MOST) -> dict[str, Any]:
    """The map's data: `points` as columns, the front's first and in order, and the number of legal layouts. `fixed`:
    what restricts them."""
    every = list(families(of, search_base(plan, {"offload": ("off",)}), fixed or {}))
    if not every:
        recipe = plan.recipe
        raise IllegalLayout(
            f"no layout of {plan.cluster.devices} devices is legal with "
            f"recipe.global_batch={recipe.global_batch} and recipe.sequence={recipe.sequence}: take a "
            "multiple of the number of devices as global_batch"
        )
    sizes = [len(least.splits) * len(family.pipelines) for least, family in every]
    dice = Random(0)
    if sum(sizes) <= most:
        found = [point for least, family in every for point in family_points(of, least, family)]
        front = Front()
        for point in sorted(found, key=lambda point: point.step_s * point.peak_bytes):
            add(of, front, point)
    else:
        front, looked = search_front(of, every)
        found = dice.sample(looked, min(len(looked), most // 4))
        found += draw_points(of, every, sizes, most - len(found), dice)
    first = {point.layout for point in front.points}
    rest = {point.layout: point for point in found if point.layout not in first}
    room = usable_bytes(plan)
    fitting = [place for place, point in enumerate(front.points) if point.peak_bytes <= room]
    return {
        "fields": FIELDS,
        "parts": PARTS,
        "legal": sum(sizes),
        "front": len(front.points),
        "best": fitting[0] if fitting else max(0, len(front.points) - 1),
        "points": [_row(point) for point in [*front.points, *rest.values()]],
    }


def search_front(of: Estimator, every: list[tuple[CellBounds, RegionFamily]]) -> tuple[Front, list[LayoutPoint]]:
    """The front of all families, counted exactly, and all points looked at."""
    front, looked = Front(), []
    bounds = [(least.family_s(family), least.family_bytes(family)) for least, family in every]
    for place in sorted(range(len(every)), key=lambda place: bounds[place][0] * bounds[place][1]):
        least, family = every[place]
        if front.beats(*bounds[place]):
            continue
        for least_s, least_bytes, region in _promising(least, family, bounds[place][0], front):
            for point in _not_beaten(of, least, region, least_s, least_bytes, front):
                looked.append(point)
                add(of, front, point)
    return front, looked


def _promising(
    least: CellBounds, family: RegionFamily, least_s: float, front: Front
) -> Iterator[tuple[float, float, Region]]:
    """A family's schedules. Of interleaved ones those with less time than all that take less memory, as far as bounds
    can tell: they share the states in the same ways."""
    shortest_s = inf
    for least_bytes, region in sorted((least.region_bytes(region), region) for region in family.regions()):
        if front.beats(least_s, least_bytes):
            continue
        region_s = max(least_s, least.region_s(region))
        if KINDS[region.schedule].deeper:
            if region_s >= shortest_s:
                continue
            shortest_s = region_s
        if not front.beats(region_s, least_bytes):
            yield region_s, least_bytes, region


def _not_beaten(
    of: Estimator, least: CellBounds, region: Region, least_s: float, least_bytes: float, front: Front
) -> Iterator[LayoutPoint]:
    """The region's layouts, for as long as the front does not beat what is left of them."""
    layout = region.layout(*least.splits[0], base=least.base)
    if of.shape.moe is None:  # it shares its states most: the others hold no less, but for what is gathered for a while
        memory = of.memory(layout, of.telling(layout), exact=False)
        least_bytes = max(least_bytes, *(one.total_bytes - one.kinds["buffers"] for one in memory))
    for split in least.splits:
        if front.beats(least_s, least_bytes):
            return
        yield count_point(of, region.layout(*split, base=least.base), exact=False)


def add(of: Estimator, front: Front, point: LayoutPoint) -> None:
    """A point as closed forms count it: the truth is no less, so it is asked for only where that is not beaten."""
    if not front.beats(point.step_s, point.peak_bytes):
        front.add(count_point(of, point.layout))


def family_points(of: Estimator, least: CellBounds, family: RegionFamily) -> Iterator[LayoutPoint]:
    """The family's layouts, by closed forms."""
    for region in family.regions():
        for split in least.splits:
            yield count_point(of, region.layout(*split, base=least.base), exact=False)


def draw_points(
    of: Estimator, every: list[tuple[CellBounds, RegionFamily]], sizes: list[int], number: int, dice: Random
) -> list[LayoutPoint]:
    """So many layouts, each as likely as any other."""
    ends = list(accumulate(sizes))
    found = []
    for place in sorted(dice.sample(range(ends[-1]), number)):
        index = bisect_right(ends, place)
        least, family = every[index]
        pipeline, split = divmod(place - (ends[index] - sizes[index]), len(least.splits))
        name, vp = family.pipelines[pipeline]
        region = Region(family.cell, family.micro_batch, name, vp, family.recompute)
        found.append(count_point(of, region.layout(*least.splits[split], base=least.base), exact=False))
    return found


def count_point(of: Estimator, layout: Layout, *, exact: bool = True) -> LayoutPoint:
    """Of one layout."""
    time, memory = of.measure(layout, exact=exact)
    return LayoutPoint(time.total_s, max(one.total_bytes for one in memory), layout, time)


def _row(point: LayoutPoint) -> list[Any]:
    """[fields of the layout, seconds of each part, bytes], to four digits."""
    together = replace(point.time, optimizer_s=point.time.optimizer_s + point.time.muon_s)
    seconds = [_digits(getattr(together, part)) for part in PARTS]
    layout = [int(v) if isinstance(v := getattr(point.layout, name), bool) else v for name in FIELDS]
    return [layout, seconds, _digits(point.peak_bytes)]


def _digits(value: float) -> float:
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded == int(rounded) else rounded
