"""Legal layouts as points of memory and step time, for the explorer's map.

A small space is shown whole, a large one as a sample and its Pareto front. The front is searched like the fastest
layouts in ranking.py: a family or region is discarded if some layout beats both its least memory and its least time
(bounds.py). Points are counted without playing schedules, from closed forms that never exceed the exact figures. Points
of the front are exact.
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
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule import KINDS
from meshwright.spec.plan.plan import Plan

MOST = 4000
"""Points on the map. A larger space has three quarters drawn uniformly, the rest from the search for the front."""
FIELDS = (
    "dp_replicate", "dp_shard", "zero", "tp", "sp", "cp", "pp", "vp", "ep", "schedule", "micro_batch", "recompute",
)  # fmt: skip
PARTS = ("compute_s", "exchange_s", "bubble_s", "weights_s", "gradients_s", "optimizer_s", "other_s")


class LayoutPoint(NamedTuple):
    """A layout with its predicted step time and peak."""

    step_s: float
    peak_bytes: float
    layout: Layout
    time: StepTime


class Front:
    """Pareto front in ascending time: no point is beaten by another in both time and memory."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.points: list[LayoutPoint] = []

    def beats(self, step_s: float, peak_bytes: float) -> bool:
        """Return True if some point takes at most `step_s` and at most `peak_bytes`."""
        index = bisect_right(self.times, step_s)
        return index > 0 and self.points[index - 1].peak_bytes <= peak_bytes

    def add(self, point: LayoutPoint) -> None:
        """Add a point unless it is beaten, and remove the points that it beats."""
        if self.beats(point.step_s, point.peak_bytes):
            return
        begin = end = bisect_left(self.times, point.step_s)
        while end < len(self.points) and self.points[end].peak_bytes >= point.peak_bytes:
            end += 1
        self.times[begin:end] = [point.step_s]
        self.points[begin:end] = [point]


def landscape(estimator: Estimator, plan: Plan, *, fixed: Fixed | None = None, most: int = MOST) -> dict[str, Any]:
    """Return the data of the map: `points` as columns with the front first, and the number of legal layouts.

    `fixed` restricts the layouts. Raises IllegalLayout if none is legal.
    """
    searched = list(families(estimator, search_base(plan, {"offload": ("off",)}), fixed or {}))
    if not searched:
        recipe = plan.recipe
        raise IllegalLayout(
            f"no layout of {plan.cluster.devices} devices is legal with "
            f"recipe.global_batch={recipe.global_batch} and recipe.sequence={recipe.sequence}: take a "
            "multiple of the number of devices as global_batch"
        )
    # A family has a layout per split and pipeline; the same numbers index a random draw.
    sizes = [len(bounds.splits) * len(family.pipelines) for bounds, family in searched]
    # A fixed seed: the same plan always draws the same map.
    rng = Random(0)
    if sum(sizes) <= most:
        points = [point for bounds, family in searched for point in family_points(estimator, bounds, family)]
        front = Front()
        # Small products first: they beat most of the others, which are then never compared in full.
        for point in sorted(points, key=lambda point: point.step_s * point.peak_bytes):
            add(estimator, front, point)
    else:
        front, looked = search_front(estimator, searched)
        points = rng.sample(looked, min(len(looked), most // 4))
        points += draw_points(estimator, searched, sizes, most - len(points), rng)
    front_layouts = {point.layout for point in front.points}
    rest = {point.layout: point for point in points if point.layout not in front_layouts}
    room = usable_bytes(plan)
    fitting = [index for index, point in enumerate(front.points) if point.peak_bytes <= room]
    return {
        "fields": FIELDS,
        "parts": PARTS,
        "legal": sum(sizes),
        "front": len(front.points),
        "best": fitting[0] if fitting else max(0, len(front.points) - 1),
        "points": [_row(point) for point in [*front.points, *rest.values()]],
    }


def search_front(
    estimator: Estimator, searched: list[tuple[CellBounds, RegionFamily]]
) -> tuple[Front, list[LayoutPoint]]:
    """Return the exact front over all families, and every point counted on the way."""
    front, looked = Front(), []
    least = [(bounds.family_s(family), bounds.family_bytes(family)) for bounds, family in searched]
    # Families that promise most come first, so later ones are beaten by their bounds alone.
    for index in sorted(range(len(searched)), key=lambda index: least[index][0] * least[index][1]):
        bounds, family = searched[index]
        if front.beats(*least[index]):
            continue
        for least_s, least_bytes, region in _promising_regions(bounds, family, least[index][0], front):
            for point in _unbeaten_points(estimator, bounds, region, least_s, least_bytes, front):
                looked.append(point)
                add(estimator, front, point)
    return front, looked


def _promising_regions(
    bounds: CellBounds, family: RegionFamily, least_s: float, front: Front
) -> Iterator[tuple[float, float, Region]]:
    """Yield (least seconds, least bytes, region) of a family's regions that can extend the front.

    An interleaved schedule must be faster than all that take less memory, as far as the bounds tell. They share states
    alike.
    """
    shortest_s = inf
    for least_bytes, region in sorted((bounds.region_bytes(region), region) for region in family.regions()):
        if front.beats(least_s, least_bytes):
            continue
        region_s = max(least_s, bounds.region_s(region))
        if KINDS[region.schedule].deeper:
            if region_s >= shortest_s:
                continue
            shortest_s = region_s
        if not front.beats(region_s, least_bytes):
            yield region_s, least_bytes, region


def _unbeaten_points(
    estimator: Estimator, bounds: CellBounds, region: Region, least_s: float, least_bytes: float, front: Front
) -> Iterator[LayoutPoint]:
    """Yield points of the region's layouts until the front beats the bounds of the rest."""
    layout = region.layout(*bounds.splits[0], base=bounds.base)
    if estimator.shape.moe is None:  # the first split shares states most: the others hold no less apart from buffers
        memory = estimator.memory(layout, estimator.likely_fullest(layout), exact=False)
        least_bytes = max(least_bytes, *(rank.total_bytes - rank.kinds["buffers"] for rank in memory))
    for split in bounds.splits:
        if front.beats(least_s, least_bytes):
            return
        yield count_point(estimator, region.layout(*split, base=bounds.base), exact=False)


def add(estimator: Estimator, front: Front, point: LayoutPoint) -> None:
    """Add a point counted by closed forms. The exact one is no better, so it is computed only if this is not beaten."""
    if not front.beats(point.step_s, point.peak_bytes):
        front.add(count_point(estimator, point.layout))


def family_points(estimator: Estimator, bounds: CellBounds, family: RegionFamily) -> Iterator[LayoutPoint]:
    """Yield the points of the family's layouts, by closed forms."""
    for region in family.regions():
        for split in bounds.splits:
            yield count_point(estimator, region.layout(*split, base=bounds.base), exact=False)


def draw_points(
    estimator: Estimator,
    searched: list[tuple[CellBounds, RegionFamily]],
    sizes: list[int],
    sample_size: int,
    rng: Random,
) -> list[LayoutPoint]:
    """Return `sample_size` layouts drawn uniformly without replacement."""
    # Number the layouts of all families consecutively, and draw numbers.
    ends = list(accumulate(sizes))
    points = []
    for number in sorted(rng.sample(range(ends[-1]), sample_size)):
        family_index = bisect_right(ends, number)
        bounds, family = searched[family_index]
        pipeline, split = divmod(number - (ends[family_index] - sizes[family_index]), len(bounds.splits))
        name, vp = family.pipelines[pipeline]
        region = Region(family.cell, family.micro_batch, name, vp, family.recompute)
        points.append(count_point(estimator, region.layout(*bounds.splits[split], base=bounds.base), exact=False))
    return points


def count_point(estimator: Estimator, layout: Layout, *, exact: bool = True) -> LayoutPoint:
    """Return the point of one layout."""
    time, memory = estimator.measure(layout, exact=exact)
    return LayoutPoint(time.total_s, max(rank.total_bytes for rank in memory), layout, time)


def _row(point: LayoutPoint) -> list[Any]:
    """Return [layout fields, seconds of each part, bytes], to four digits."""
    time = replace(point.time, optimizer_s=point.time.optimizer_s + point.time.muon_s)
    seconds = [round_to_four_digits(getattr(time, part)) for part in PARTS]
    layout = [int(v) if isinstance(v := getattr(point.layout, name), bool) else v for name in FIELDS]
    return [layout, seconds, round_to_four_digits(point.peak_bytes)]


def round_to_four_digits(number: float) -> float:
    """Round to four significant digits, as an int if the result is whole."""
    rounded = float(f"{number:.4g}")
    return int(rounded) if rounded == int(rounded) else rounded
