"""Ranking of all legal layouts by step time among those that fit, with the reason why others do not.

True lower bounds (bounds.py) keep a space of millions cheap: the list equals that of counting every layout.

A priority queue holds parts of the space, ordered by the least time that they can take. The first part is replaced by
smaller ones with tighter bounds:

    family            -> the same with the cost of data parallelism
                      -> its schedules that may fit
                      -> their splits of data parallelism
                      -> timed exactly but for the schedule
                      -> counted exactly, with the schedule played

The search ends when the next part cannot be faster than the slowest listed layout.

On a GPU a plan may leave open how its passes run. Every layout is first queued compiled and without CUDA graphs, and
again with graphs where these are possible. The rule of planner/step/prediction.py then decides for each listed layout,
and the decided time ranks it.
"""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from meshwright.planner.memory.rank_memory import RankMemory
from meshwright.planner.search.bounds import CellBounds, Split, families, offered_policies
from meshwright.planner.search.regions import (
    Fixed,
    Region,
    RegionFamily,
    graph_variants,
    search_base,
    with_sampling_rules,
)
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.layout import Layout
from meshwright.spec.plan.plan import Plan
from meshwright.spec.rules.passes import explain_auto_off

LISTED = 20
"""Layouts listed by default."""
ROUNDING = 1e-9
"""Relative error allowed for sums in another order: a bound is lowered by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Layouts rejected for one reason, with an example nearest to fitting."""

    reason: str
    layout: Layout
    peak_bytes: float
    count: int


@dataclass(slots=True, kw_only=True)
class Ranking:
    """Answer of a search."""

    best: list[Prediction] = field(default_factory=list)
    """Layouts that fit, fastest first."""
    legal: int = 0
    """Number of legal layouts."""
    too_large: int = 0
    """Number of them that do not fit."""
    slower: int = 0
    """Number of them not counted, because none of their region can be listed."""
    rejected: list[Rejected] = field(default_factory=list)
    nearest: Prediction | None = None
    """Layout with the lowest peak, if nothing fits."""


class Choice(NamedTuple):
    """One layout of a region."""

    region: Region
    split: Split

    def layout(self, base: Layout) -> Layout:
        """Return the layout. `base` supplies the fields that are not searched."""
        return self.region.layout(*self.split, base=base)


class WholeFamily(NamedTuple):
    """Family queued with a bound that includes data parallelism."""

    family: RegionFamily


class TimedChoice(NamedTuple):
    """Layout queued with its own time, except for its schedule."""

    choice: Choice


Part = RegionFamily | WholeFamily | Region | Choice | TimedChoice
Waiting = tuple[float, int, CellBounds, Part]
"""(lower bound in seconds, sequence number, bounds of the cell, part of the space)."""


def search(
    estimator: Estimator,
    plan: Plan,
    *,
    fixed: Fixed | None = None,
    listed: int = LISTED,
    share: float = 1.0,
    below_s: float = float("inf"),
) -> Ranking:
    """Rank the legal layouts of a plan's model, recipe and cluster.

    Of the plan's own layout only the fields that are not searched matter (regions.Region.layout).

    Args:
        fixed: Values allowed per field. Absent fields are free.
        listed: Number of layouts to list.
        share: Largest share of a device's memory that a layout may use.
        below_s: Layouts whose step takes this long or longer count as slower, and their memory is not examined.
    """
    with _paused_collector():
        return _Search(estimator, plan, with_sampling_rules(plan, fixed or {}), listed, share, below_s).run()


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Pause Python's cycle collector, which saves a tenth of the time.

    A search creates no cycles and retains all that it allocates. Freezing moves it to the old generation, so that the
    collector does not scan it at the end.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


class _Search:
    def __init__(
        self, estimator: Estimator, plan: Plan, fixed: Fixed, listed: int, share: float, below_s: float
    ) -> None:
        self.estimator, self.requested_plan, self.fixed, self.listed = estimator, plan, fixed, listed
        self.plan = estimator.search_plan(search_base(plan, fixed))
        self.room, self.below_s = share * usable_bytes(plan), below_s
        self.ranking = Ranking()
        self.numbers = count()
        self.best: list[tuple[float, int, int, Layout]] = []
        self.predictions: dict[Layout, Prediction] = {}
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, tuple[float, Layout]] = {}

    def run(self) -> Ranking:
        waiting: list[Waiting] = list(self.fitting())
        heapify(waiting)
        # Best bound first: when that one cannot be listed, nothing behind it can.
        while waiting and waiting[0][0] * (1 - ROUNDING) <= self.limit_s:
            _, _, bounds, first = heappop(waiting)
            if isinstance(first, TimedChoice):
                self.time_exactly(bounds, first.choice)
                continue
            for part in self.expand(bounds, first):
                heappush(waiting, part)
        self.ranking.best = sorted((self.predict(layout) for *_, layout in self.best), key=ranking_key)
        self.summarize()
        return self.ranking

    @property
    def limit_s(self) -> float:
        """Time that a layout must beat to be listed."""
        return self.best[self.listed - 1][0] if len(self.best) >= self.listed else self.below_s

    def predict(self, layout: Layout) -> Prediction:
        if layout not in self.predictions:
            compiled = self.requested_plan.layout.compile  # as it was asked for, so that the prediction says why
            requested_plan = replace(self.plan, layout=replace(layout, compile=compiled))
            self.predictions[layout] = self.estimator.predict(requested_plan)
        return self.predictions[layout]

    def fitting(self) -> Iterator[Waiting]:
        """Yield the families that may fit, compiled and without graphs, then those that may run as graphs."""
        yield from self.fitting_families()
        for layout, fixed in graph_variants(self.plan, self.fixed) if self.estimator.chooses_execution else ():
            plan = replace(self.plan, layout=layout)
            for bounds, family in families(self.estimator, plan, fixed):
                if self.offers_graphs(bounds, family) and bounds.family_bytes(family, self.room) <= self.room:
                    yield bounds.family_s(family), next(self.numbers), bounds, family

    def offers_graphs(self, bounds: CellBounds, family: RegionFamily) -> bool:
        """Return True if the family is searched and its passes may be CUDA graphs."""
        if family.recompute not in offered_policies(self.estimator, self.plan, family.cell, self.fixed):
            return False
        layout = next(family.regions()).layout(base=bounds.base)
        return not any(explain_auto_off(self.plan.model, self.plan.recipe, layout))

    def fitting_families(self) -> Iterator[Waiting]:
        """Yield the families whose least memory fits, each with the least seconds it takes."""
        for bounds, family in families(self.estimator, self.plan, self.fixed):
            number = len(bounds.splits) * len(family.pipelines)
            self.ranking.legal += number
            # With a limit of time the caller does not ask why slower families would not fit.
            if self.below_s < float("inf") and bounds.family_s(family) >= self.below_s:
                continue
            peak = bounds.family_bytes(family, self.room)
            if peak <= self.room:
                yield bounds.family_s(family), next(self.numbers), bounds, family
                continue
            self.reject(bounds.kind(family, peak), peak, next(family.regions()), bounds.splits[0], number)

    def expand(self, bounds: CellBounds, first: RegionFamily | WholeFamily | Region | Choice) -> Iterator[Waiting]:
        """Yield the next smaller parts, each with its lower bound of the step time."""
        parts: Iterable[tuple[float, Part]]
        # Cheap bounds first: each split of a part costs more and bounds it better.
        if isinstance(first, RegionFamily):
            parts = [(bounds.whole_family_s(first), WholeFamily(first))]
        elif isinstance(first, WholeFamily):
            parts = ((min(bounds.splits_s(region)), region) for region in self.fitting_regions(bounds, first.family))
        elif isinstance(first, Region):
            choices = [Choice(first, split) for split in bounds.splits]
            parts = zip(bounds.splits_s(first), choices, strict=True)
        else:
            parts = [(self.estimator.time(first.layout(bounds.base), exact=False).total_s, TimedChoice(first))]
        for bound_s, part in parts:
            # Sums in another order may differ in the last digits.
            if bound_s * (1 - ROUNDING) <= self.limit_s:
                yield bound_s, next(self.numbers), bounds, part

    def fitting_regions(self, bounds: CellBounds, family: RegionFamily) -> Iterator[Region]:
        """Yield the regions of a family that may fit."""
        for region in family.regions():
            peak = bounds.region_bytes(region)
            if peak <= self.room:
                yield region
            elif bounds.base is self.plan.layout:
                self.reject(bounds.kind(family, peak), peak, region, bounds.splits[0], len(bounds.splits))

    def time_exactly(self, bounds: CellBounds, choice: Choice) -> None:
        """Count a layout exactly. Enter it if it fits and ranks among the listed."""
        layout, searched = choice.layout(bounds.base), choice.layout(self.plan.layout)
        step_s = self.estimator.time(layout).total_s
        # Time first: memory needs the played schedule and costs more.
        if step_s > self.limit_s or step_s >= self.below_s:
            return
        memory = fullest_rank(self.estimator, layout, self.room)
        if memory.total_bytes > self.room:
            if bounds.base is self.plan.layout:
                self.reject(_largest(memory), memory.total_bytes, choice.region, choice.split, 1)
            return
        graphs = bounds.base is not self.plan.layout
        if graphs or (self.estimator.chooses_execution and self.plan.model.norm == "layernorm"):
            # Graphs may gain too little to be taken, and LayerNorm's blocks may run uncompiled, which takes longer.
            step_s = max(step_s, self.predict(searched).step_s)
            if step_s > self.limit_s or step_s >= self.below_s:
                return
        others = [entry for entry in self.best if entry[-1] != searched]
        same = [entry for entry in self.best if entry[-1] == searched]  # listed already, with or without graphs
        entry = min([*same, (step_s, layout.zero, next(self.numbers), searched)])
        self.best = sorted([*others, entry])[: self.listed]

    def reject(self, kind: str, peak_bytes: float, region: Region, split: Split, number: int) -> None:
        """Count layouts under their largest kind of memory, and remember the one nearest to fitting."""
        self.reasons[kind] += number
        if kind not in self.examples or peak_bytes < self.examples[kind][0]:
            self.examples[kind] = peak_bytes, region.layout(*split, base=self.plan.layout)

    def summarize(self) -> None:
        """Fill in how many layouts do not fit and why, each reason with an exact example."""
        self.ranking.too_large = sum(self.reasons.values())
        self.ranking.slower = max(0, self.ranking.legal - self.ranking.too_large - len(self.best))
        for reason, number in self.reasons.most_common():
            layout = self.examples[reason][1]
            peak = fullest_rank(self.estimator, layout).total_bytes
            self.ranking.rejected.append(Rejected(reason=reason, layout=layout, peak_bytes=peak, count=number))
        if not self.ranking.best and self.reasons and self.below_s == float("inf"):
            self.ranking.nearest = self.predict(nearest(self.estimator, self.plan, self.fixed))


def fullest_rank(estimator: Estimator, layout: Layout, room: float = float("inf")) -> RankMemory:
    """Return the pipeline rank with the highest peak, or one likely to have it that already exceeds `room`."""
    # A rank that is over `room` answers the question, so the likeliest are counted first.
    telling = estimator.likely_fullest(layout)
    if layout.pp > 1 and room < float("inf"):
        bounds = _fullest(estimator.memory(layout, telling, exact=False))
        if bounds.total_bytes > room:
            return bounds
    likely = _fullest(estimator.memory(layout, telling))
    others = [ranking_key for ranking_key in estimator.fullest_candidates(layout) if ranking_key not in telling]
    if likely.total_bytes > room or not others:
        return likely
    return _fullest((likely, *estimator.memory(layout, others)))


def _fullest(memory: Iterable[RankMemory]) -> RankMemory:
    return max(memory, key=lambda rank: rank.total_bytes)


def nearest(estimator: Estimator, plan: Plan, fixed: Fixed) -> Layout:
    """Return the layout with the lowest peak. Raises IllegalLayout if none is legal."""
    # A running number breaks ties, since bounds and regions have no order.
    numbers = count()
    waiting: list[tuple[float, int, CellBounds, RegionFamily | Region]] = [
        (bounds.family_bytes(family), next(numbers), bounds, family)
        for bounds, family in families(estimator, plan, fixed)
    ]
    heapify(waiting)
    best: tuple[float, Layout] | None = None
    while waiting and (best is None or waiting[0][0] < best[0]):
        _, _, bounds, first = heappop(waiting)
        if isinstance(first, RegionFamily):
            for region in first.regions():
                heappush(waiting, (bounds.region_bytes(region), next(numbers), bounds, region))
            continue
        for split in bounds.splits:
            layout = first.layout(*split, base=plan.layout)
            # Ranks beyond the best peak so far need no exact count.
            peak = fullest_rank(estimator, layout, best[0] if best else float("inf")).total_bytes
            if best is None or peak < best[0]:
                best = peak, layout
    if best is None:
        raise IllegalLayout("no layout is legal")
    return best[1]


def ranking_key(prediction: Prediction) -> tuple[float, int, float, int]:
    """Return the sort key: time, then number of techniques, peak and ZeRO stage, each ascending."""
    layout = prediction.plan.layout
    # Seven digits, so that the order of sums does not decide between equal layouts.
    return float(f"{prediction.step_s:.7g}"), techniques(layout), float(f"{prediction.peak_bytes:.7g}"), layout.zero


def techniques(layout: Layout) -> int:
    """Return the number of techniques used beyond data parallelism."""
    degrees = (layout.tp, layout.cp, layout.pp, layout.ep, layout.vp)
    return sum(degree > 1 for degree in degrees) + (layout.recompute != "none") + (layout.schedule != "1f1b")


def _largest(memory: RankMemory) -> str:
    return max(memory.kinds, key=memory.kinds.__getitem__)
