"""All legal layouts, ranked by step time among those that fit; for the others the reason.

Bounds (planner/search/bounds.py) keep a space of millions cheap. They are true ones, so what is listed is what counting
every layout would list. Families that may fit wait in the order of the least time they can take. The first of them
waits again with what data parallelism adds; then it is opened into the schedules that may fit, the first of those into
its splits of data parallelism. The first of these is timed but for its schedule, and waits again; then it is counted
exactly, its schedule played. All ends when the next can be no faster than the slowest to be listed.

On a GPU a plan may leave open how its passes are run. All layouts wait compiled and without graphs. Those whose passes
may be CUDA graphs wait as such, too. What is listed is settled by the rule of planner/step/execution.py, and ranked
by its time then.
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
from meshwright.planner.search.bounds import CellBounds, families, offered_policies
from meshwright.planner.search.memory_bounds import Split
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
from meshwright.spec.capturing_rules import left_to_auto
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan

LISTED = 20
"""Layouts that are listed."""
ROUNDING = 1e-9
"""Of sums in another order: a bound is that much lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Layouts left aside for one reason, with the nearest of them and how far it is."""

    reason: str
    layout: Layout
    peak_bytes: float
    count: int


@dataclass(slots=True, kw_only=True)
class Ranking:
    """What a search found."""

    best: list[Prediction] = field(default_factory=list)
    """Those that fit, the fastest first."""
    legal: int = 0
    """Layouts of the whole space."""
    too_large: int = 0
    """Of them, those that do not fit."""
    slower: int = 0
    """Those that were not looked at, since no layout of their region can be among the listed."""
    rejected: list[Rejected] = field(default_factory=list)
    nearest: Prediction | None = None
    """Where nothing fits: the layout with the lowest peak."""


class Choice(NamedTuple):
    """One layout of a region."""

    region: Region
    split: Split

    def layout(self, base: Layout) -> Layout:
        """The same with what is not searched."""
        return self.region.layout(*self.split, base=base)


class WholeFamily(NamedTuple):
    """A family that waits with what data parallelism adds."""

    family: RegionFamily


class TimedChoice(NamedTuple):
    """A layout that waits with its own time, but for its schedule's."""

    choice: Choice


Part = RegionFamily | WholeFamily | Region | Choice | TimedChoice
Waiting = tuple[float, int, CellBounds, Part]
"""(no layout of it takes less seconds, its number, bounds, what it is)."""


def search(
    estimator: Estimator,
    plan: Plan,
    *,
    fixed: Fixed | None = None,
    listed: int = LISTED,
    share: float = 1.0,
    below_s: float = float("inf"),
) -> Ranking:
    """Rank the legal layouts of `plan`'s model, recipe and cluster; of its own layout only what is not searched matters
    (regions.Region.layout). What needs more than `share` of a device does not fit. Layouts whose step takes `below_s`
    or longer are not wanted: they count as slower, without a look at their memory."""
    with _uncollected():
        return _Search(estimator, plan, with_sampling_rules(plan, fixed or {}), listed, share, below_s).run()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's search for cycles, a tenth of the time: a search makes none, and keeps all that it makes. All of
    it counts as old then, so that no cycles are searched for in it at the end."""
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
        self.estimator, self.asked, self.fixed, self.listed = estimator, plan, fixed, listed
        self.plan = estimator.looked_at(search_base(plan, fixed))
        self.room, self.below_s = share * usable_bytes(plan), below_s
        self.found = Ranking()
        self.numbers = count()
        self.best: list[tuple[float, int, int, Layout]] = []
        self.predictions: dict[Layout, Prediction] = {}
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, tuple[float, Layout]] = {}

    def run(self) -> Ranking:
        waiting: list[Waiting] = list(self.fitting())
        heapify(waiting)
        while waiting and waiting[0][0] * (1 - ROUNDING) <= self.limit_s:
            _, _, least, first = heappop(waiting)
            if isinstance(first, TimedChoice):
                self.look(least, first.choice)
                continue
            for part in self.opened(least, first):
                heappush(waiting, part)
        self.found.best = sorted((self.predict(layout) for *_, layout in self.best), key=ranking_key)
        self.tell()
        return self.found

    @property
    def limit_s(self) -> float:
        """What a layout must beat to be listed."""
        return self.best[self.listed - 1][0] if len(self.best) >= self.listed else self.below_s

    def predict(self, layout: Layout) -> Prediction:
        if layout not in self.predictions:
            compiled = self.asked.layout.compile  # as it was asked for, so that the prediction says why
            asked = replace(self.plan, layout=replace(layout, compile=compiled))
            self.predictions[layout] = self.estimator.predict(asked)
        return self.predictions[layout]

    def fitting(self) -> Iterator[Waiting]:
        """The families that may fit, compiled and without graphs, and in graphs where these may be."""
        yield from self.fitting_families()
        for layout, fixed in graph_variants(self.plan, self.fixed) if self.estimator.chooses else ():
            plan = replace(self.plan, layout=layout)
            for least, family in families(self.estimator, plan, fixed):
                if self.runs(least, family) and least.family_bytes(family, self.room) <= self.room:
                    yield least.family_s(family), next(self.numbers), least, family

    def runs(self, least: CellBounds, family: RegionFamily) -> bool:
        """Whether layouts of a family are searched, and their passes may be graphs."""
        if family.recompute not in offered_policies(self.estimator, self.plan, family.cell, self.fixed):
            return False
        layout = next(family.regions()).layout(base=least.base)
        return not any(left_to_auto(self.plan.model, self.plan.recipe, layout))

    def fitting_families(self) -> Iterator[Waiting]:
        """The families whose least memory does not exceed the device's, each with the least seconds it takes."""
        for least, family in families(self.estimator, self.plan, self.fixed):
            number = len(least.splits) * len(family.pipelines)
            self.found.legal += number
            if self.below_s < float("inf") and least.family_s(family) >= self.below_s:
                continue
            peak = least.family_bytes(family, self.room)
            if peak <= self.room:
                yield least.family_s(family), next(self.numbers), least, family
                continue
            self.reject(least.kind(family, peak), peak, next(family.regions()), least.splits[0], number)

    def opened(self, least: CellBounds, first: RegionFamily | WholeFamily | Region | Choice) -> Iterator[Waiting]:
        """The next smaller parts of what is first, each with the least seconds it takes."""
        parts: Iterable[tuple[float, Part]]
        if isinstance(first, RegionFamily):
            parts = [(least.whole_family_s(first), WholeFamily(first))]
        elif isinstance(first, WholeFamily):
            parts = ((min(least.splits_s(region)), region) for region in self.fitting_regions(least, first.family))
        elif isinstance(first, Region):
            choices = [Choice(first, split) for split in least.splits]
            parts = zip(least.splits_s(first), choices, strict=True)
        else:
            parts = [(self.estimator.time(first.layout(least.base), exact=False).total_s, TimedChoice(first))]
        for bound_s, part in parts:
            if bound_s * (1 - ROUNDING) <= self.limit_s:
                yield bound_s, next(self.numbers), least, part

    def fitting_regions(self, least: CellBounds, family: RegionFamily) -> Iterator[Region]:
        """Those of a family that may fit."""
        for region in family.regions():
            peak = least.region_bytes(region)
            if peak <= self.room:
                yield region
            elif least.base is self.plan.layout:
                self.reject(least.kind(family, peak), peak, region, least.splits[0], len(least.splits))

    def look(self, least: CellBounds, choice: Choice) -> None:
        """Count a layout exactly; keep it if it fits and is to be listed so far."""
        layout, searched = choice.layout(least.base), choice.layout(self.plan.layout)
        step_s = self.estimator.time(layout).total_s
        if step_s > self.limit_s or step_s >= self.below_s:
            return
        memory = fullest_rank(self.estimator, layout, self.room)
        if memory.total_bytes > self.room:
            if least.base is self.plan.layout:
                self.reject(_largest(memory), memory.total_bytes, choice.region, choice.split, 1)
            return
        graphs = least.base is not self.plan.layout
        if graphs or (self.estimator.chooses and self.plan.model.norm == "layernorm"):
            # graphs may gain too little to be taken, and LayerNorm's blocks may run uncompiled, which takes longer
            step_s = max(step_s, self.predict(searched).step_s)
            if step_s > self.limit_s or step_s >= self.below_s:
                return
        others = [entry for entry in self.best if entry[-1] != searched]
        same = [entry for entry in self.best if entry[-1] == searched]  # listed already, with or without graphs
        entry = min([*same, (step_s, layout.zero, next(self.numbers), searched)])
        self.best = sorted([*others, entry])[: self.listed]

    def reject(self, kind: str, peak_bytes: float, region: Region, split: Split, number: int) -> None:
        """Count layouts under their largest term, and keep the one that came nearest."""
        self.reasons[kind] += number
        if kind not in self.examples or peak_bytes < self.examples[kind][0]:
            self.examples[kind] = peak_bytes, region.layout(*split, base=self.plan.layout)

    def tell(self) -> None:
        """What does not fit, and why, each with an example counted exactly."""
        self.found.too_large = sum(self.reasons.values())
        self.found.slower = max(0, self.found.legal - self.found.too_large - len(self.best))
        for reason, number in self.reasons.most_common():
            layout = self.examples[reason][1]
            peak = fullest_rank(self.estimator, layout).total_bytes
            self.found.rejected.append(Rejected(reason=reason, layout=layout, peak_bytes=peak, count=number))
        if not self.found.best and self.reasons and self.below_s == float("inf"):
            self.found.nearest = self.predict(nearest(self.estimator, self.plan, self.fixed))


def fullest_rank(of: Estimator, layout: Layout, room: float = float("inf")) -> RankMemory:
    """The pipeline rank with the highest peak, or one of those likely to have it that exceeds the room."""
    telling = of.telling(layout)
    if layout.pp > 1 and room < float("inf"):
        least = _fullest(of.memory(layout, telling, exact=False))
        if least.total_bytes > room:
            return least
    likely = _fullest(of.memory(layout, telling))
    others = [ranking_key for ranking_key in of.fullest(layout) if ranking_key not in telling]
    if likely.total_bytes > room or not others:
        return likely
    return _fullest((likely, *of.memory(layout, others)))


def _fullest(memory: Iterable[RankMemory]) -> RankMemory:
    return max(memory, key=lambda one: one.total_bytes)


def nearest(of: Estimator, plan: Plan, fixed: Fixed) -> Layout:
    """The layout with the lowest peak; IllegalLayout where none is legal."""
    numbers = count()
    waiting: list[tuple[float, int, CellBounds, RegionFamily | Region]] = [
        (least.family_bytes(family), next(numbers), least, family) for least, family in families(of, plan, fixed)
    ]
    heapify(waiting)
    best: tuple[float, Layout] | None = None
    while waiting and (best is None or waiting[0][0] < best[0]):
        _, _, least, first = heappop(waiting)
        if isinstance(first, RegionFamily):
            for region in first.regions():
                heappush(waiting, (least.region_bytes(region), next(numbers), least, region))
            continue
        for split in least.splits:
            layout = first.layout(*split, base=plan.layout)
            peak = fullest_rank(of, layout, best[0] if best else float("inf")).total_bytes
            if best is None or peak < best[0]:
                best = peak, layout
    if best is None:
        raise IllegalLayout("no layout is legal")
    return best[1]


def ranking_key(found: Prediction) -> tuple[float, int, float, int]:
    """The fastest first; of equal ones the simplest, then the smallest, then the lowest stage of ZeRO."""
    layout = found.plan.layout
    return float(f"{found.step_s:.7g}"), techniques(layout), float(f"{found.peak_bytes:.7g}"), layout.zero


def techniques(layout: Layout) -> int:
    """How many are used beyond data parallelism."""
    degrees = (layout.tp, layout.cp, layout.pp, layout.ep, layout.vp)
    return sum(degree > 1 for degree in degrees) + (layout.recompute != "none") + (layout.schedule != "1f1b")


def _largest(memory: RankMemory) -> str:
    return max(memory.kinds, key=memory.kinds.__getitem__)
