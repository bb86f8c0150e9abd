"""All legal layouts, ranked by step time among those that fit; for the others the reason.

Two bounds keep a space of millions cheap. Memory: kept activations grow with the micro-batch, so one counted
micro-batch of one sequence says which regions cannot fit even with everything else shared as far as can be. Time: a
region takes at least the busiest rank's own work and the bubble of its schedule's closed form. Regions that may fit are
looked at in the order of that bound, until it is beyond the slowest layout to be listed. What is listed is counted
exactly, with the schedule played.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop
from itertools import count

from meshwright.planner.memory import DRIVER_BYTES, RankMemory, about
from meshwright.planner.predict import Estimator, Prediction
from meshwright.planner.regions import RECOMPUTE, Cell, Fixed, Region, cells, divisors, keep, pipelines, splits
from meshwright.planner.stages import Cost
from meshwright.planner.states import states
from meshwright.planner.timeline import bubble_about_s
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan

LISTED = 20
"""Layouts that are listed."""
TOLERANCE = 0.02
"""The closed forms may be off by so much: a region is left aside only beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Layouts left aside for one reason, with the nearest of them and how far it is."""

    reason: str
    layout: Layout
    peak_bytes: float
    count: int


@dataclass(slots=True, kw_only=True)
class Found:
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


def usable_bytes(plan: Plan) -> float:
    """What a program can have of a device; unknown = without limit."""
    memory = plan.cluster.device.memory_bytes
    return max(0.0, memory - DRIVER_BYTES) if memory else float("inf")


def search(estimator: Estimator, plan: Plan, *, fixed: Fixed | None = None, listed: int = LISTED) -> Found:
    """Rank the legal layouts of `plan`'s model, recipe and cluster; its own layout does not matter."""
    return _Search(estimator, plan, fixed or {}, listed).run()


class _Search:
    def __init__(self, estimator: Estimator, plan: Plan, fixed: Fixed, listed: int) -> None:
        self.estimator, self.plan, self.fixed, self.listed = estimator, plan, fixed, listed
        self.room = usable_bytes(plan)
        self.found = Found()
        self.numbers = count()
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, tuple[float, Layout]] = {}

    def run(self) -> Found:
        waiting = [(self.bound_s(region), number, region) for number, region in enumerate(self.fitting())]
        heapify(waiting)
        guessed: list[tuple[float, int, Layout]] = []
        while waiting:
            if len(guessed) >= self.listed and waiting[0][0] * (1 - TOLERANCE) > guessed[self.listed - 1][0]:
                break
            guessed += self.look(heappop(waiting)[2])
            guessed = sorted(guessed)[: 4 * self.listed]
        self.found.slower = sum(len(splits(region.cell, self.fixed)) for *_, region in waiting)
        self.found.best = self.exact(guessed)
        self.found.too_large = sum(self.reasons.values())
        self.found.rejected = [
            Rejected(reason=reason, layout=self.examples[reason][1], peak_bytes=self.examples[reason][0], count=count)
            for reason, count in self.reasons.most_common()
        ]
        if not self.found.best and self.examples:
            _, layout = min(self.examples.values(), key=lambda example: example[0])
            self.found.nearest = self.estimator.predict(replace(self.plan, layout=layout))
        return self.found

    def fitting(self) -> Iterator[Region]:
        """The regions whose least memory does not exceed the device's."""
        for cell in cells(self.plan, self.plan.cluster.devices, self.fixed):
            per_rank = self.plan.recipe.global_batch // cell.dp
            layouts = splits(cell, self.fixed)
            if not layouts:
                continue
            least = _Least(self, cell, layouts)
            for micro in keep(self.fixed, "micro_batch", divisors(per_rank)):
                for name, vp in pipelines(self.plan.model, cell, per_rank // micro, self.fixed):
                    for recompute in keep(self.fixed, "recompute", RECOMPUTE):
                        self.found.legal += len(layouts)
                        region = Region(cell, micro, name, vp, recompute)
                        peak, kind = least.peak(region, per_rank // micro)
                        if peak <= self.room:
                            yield region
                        else:
                            self.reject(kind, peak, least.layout(region), len(layouts))

    def bound_s(self, region: Region) -> float:
        """Seconds below which no layout of the region stays, but for TOLERANCE."""
        layout = region.layout()
        _, costs = self.estimator.parts(layout)
        layer = costs.routed if self.estimator.shape.moe else costs.dense
        rank = Cost().plus(layer, self.estimator.shape.layers / layout.pp).plus(costs.head, 1 / layout.pp)
        m = layout.micro_batches(self.plan.recipe.global_batch)
        return m * (rank.forward_s + rank.backward_s) + bubble_about_s(layout, m, rank)

    def look(self, region: Region) -> Iterator[tuple[float, int, Layout]]:
        """The region's layouts that fit, with their seconds, by closed forms."""
        for replicate, shard, zero in splits(region.cell, self.fixed):
            layout = region.layout(dp_replicate=replicate, dp_shard=shard, zero=zero)
            time, memory = self.estimator.measure(layout, exact=False)
            worst = max(memory, key=lambda one: one.total_bytes)
            if worst.total_bytes > self.room:
                self.reject(_largest(worst), worst.total_bytes, layout, 1)
            else:
                yield time.total_s, next(self.numbers), layout

    def exact(self, guessed: list[tuple[float, int, Layout]]) -> list[Prediction]:
        """Play the schedules of the fastest until enough are surely ahead of the next."""
        best: list[Prediction] = []
        for guess_s, _, layout in guessed:
            if len(best) >= self.listed and best[self.listed - 1].step_s < guess_s * (1 - TOLERANCE):
                break
            prediction = self.estimator.predict(replace(self.plan, layout=layout))
            if prediction.peak_bytes <= self.room:
                best = sorted([*best, prediction], key=lambda p: (p.step_s, p.peak_bytes))
            else:
                self.reject(_largest(prediction.worst), prediction.peak_bytes, layout, 1)
        return best[: self.listed]

    def reject(self, kind: str, peak_bytes: float, layout: Layout, count: int) -> None:
        """Count layouts under their largest term, and keep the one that came nearest."""
        self.reasons[kind] += count
        if kind not in self.examples or peak_bytes < self.examples[kind][0]:
            self.examples[kind] = peak_bytes, layout


def _largest(memory: RankMemory) -> str:
    return max(memory.kinds, key=memory.kinds.__getitem__)


class _Least:
    """The least memory of a cell's regions: states shared as far as they can be, activations of a middle rank."""

    def __init__(self, search: _Search, cell: Cell, layouts: tuple[tuple[int, int, int], ...]) -> None:
        self.split = max(layouts, key=lambda v: (v[1] if v[2] else 0, v[2]))
        estimator = search.estimator
        one = Region(cell, 1, "1f1b", 1, "none")
        self.kept: dict[str, float] = {}
        for recompute in RECOMPUTE:
            _, costs = estimator.parts(one._replace(recompute=recompute).layout())
            kept = [cost.kept_bytes for cost in (costs.dense, costs.routed) if cost.kept_bytes]
            self.kept[recompute] = min(kept, default=0.0) * max(1, estimator.shape.layers // cell.pp - 1)
        layout = self.layout(one)
        state = states(estimator.stack, layout, estimator.recipe.precision, estimator.held(layout, cell.pp // 2))
        self.states = min(sum(state.step.values()), sum(state.update.values()))
        self.largest = max(state.step, key=state.step.__getitem__)

    def layout(self, region: Region) -> Layout:
        """The region's layout that shares most."""
        replicate, shard, zero = self.split
        return region.layout(dp_replicate=replicate, dp_shard=shard, zero=zero)

    def peak(self, region: Region, micro_batches: int) -> tuple[float, str]:
        """(bytes, their largest kind)."""
        alive = 1.0
        if region.cell.pp > 1:
            alive = about(region.schedule, region.cell.pp, region.vp, micro_batches, 0)
        kept = self.kept[region.recompute] * region.micro_batch * alive
        return self.states + kept, "activations" if kept > self.states / 2 else self.largest
