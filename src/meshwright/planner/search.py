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
from functools import cache
from heapq import heapify, heappop
from itertools import count

from meshwright.planner.memory import DRIVER_BYTES, RankMemory, about
from meshwright.planner.predict import Estimator, Prediction
from meshwright.planner.regions import RECOMPUTE, Cell, Fixed, Region, cells, divisors, keep, pipelines, splits
from meshwright.planner.stages import Cost, Costs
from meshwright.planner.states import states
from meshwright.planner.timeline import bubble_about_s, owned
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import stage_layers

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
        waiting = [(bound_s, number, region) for number, (bound_s, region) in enumerate(self.fitting())]
        heapify(waiting)
        guessed: list[tuple[float, int, Layout]] = []
        while waiting:
            limit_s = guessed[self.listed - 1][0] / (1 - TOLERANCE) if len(guessed) >= self.listed else float("inf")
            if waiting[0][0] > limit_s:
                break
            guessed = sorted([*guessed, *self.look(heappop(waiting)[2], limit_s)])[: 2 * self.listed]
        self.found.slower += sum(len(splits(region.cell, self.fixed)) for *_, region in waiting)
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

    def fitting(self) -> Iterator[tuple[float, Region]]:
        """The regions whose least memory does not exceed the device's, each with the least seconds it takes."""
        for least, region, m, layouts in bounded(self.estimator, self.plan, self.fixed):
            self.found.legal += layouts
            peak, kind = least.peak(region, m)
            if peak <= self.room:
                yield least.seconds(region, m), region
            else:
                self.reject(kind, peak, region, least.split, layouts)

    def look(self, region: Region, limit_s: float) -> Iterator[tuple[float, int, Layout]]:
        """The region's layouts that fit, with their seconds, by closed forms; none if all are beyond the limit."""
        found = sorted(splits(region.cell, self.fixed), key=sharing, reverse=True)
        for index, split in enumerate(found):
            layout = region.layout(*split)
            time, memory = self.estimator.measure(layout, exact=False)
            if time.total_s - time.weights_s - time.gradients_s - time.optimizer_s > limit_s:
                self.found.slower += len(found) - index
                return
            worst = max(memory, key=lambda one: one.total_bytes)
            if worst.total_bytes <= self.room:
                yield time.total_s, next(self.numbers), layout
                continue
            lasting = worst.total_bytes - worst.kinds["buffers"]  # what is gathered for a while grows with sharing
            surely = index == 0 and lasting > self.room and self.plan.model.moe is None  # (experts are padded)
            self.reject(_largest(worst), worst.total_bytes, region, split, len(found) if surely else 1)
            if surely:
                return

    def exact(self, guessed: list[tuple[float, int, Layout]]) -> list[Prediction]:
        """Play the schedules of the fastest until enough are surely ahead of the next."""
        best: list[Prediction] = []
        for guess_s, _, layout in guessed:
            if len(best) >= self.listed and best[self.listed - 1].step_s < guess_s * (1 - TOLERANCE):
                break
            prediction = self.estimator.predict(replace(self.plan, layout=layout))
            if prediction.peak_bytes <= self.room:
                best = sorted([*best, prediction], key=_rank)
            else:
                self.reasons[_largest(prediction.worst)] += 1
        return best[: self.listed]

    def reject(self, kind: str, peak_bytes: float, region: Region, split: tuple[int, int, int], count: int) -> None:
        """Count layouts under their largest term, and keep the one that came nearest."""
        self.reasons[kind] += count
        if kind not in self.examples or peak_bytes < self.examples[kind][0]:
            self.examples[kind] = peak_bytes, region.layout(*split)


def _rank(found: Prediction) -> tuple[float, int, float]:
    """The fastest first; of equal ones (to three digits) the simplest, then the smallest."""
    return float(f"{found.step_s:.3g}"), techniques(found.plan.layout), found.peak_bytes


def techniques(layout: Layout) -> int:
    """How many are used beyond data parallelism."""
    degrees = (layout.tp, layout.cp, layout.pp, layout.ep, layout.vp)
    return sum(degree > 1 for degree in degrees) + (layout.recompute != "none") + (layout.schedule != "1f1b")


def sharing(split: tuple[int, int, int]) -> tuple[int, int]:
    """How far (dp_replicate, dp_shard, zero) shares the states."""
    return (split[1] if split[2] else 0, split[2])


def _largest(memory: RankMemory) -> str:
    return max(memory.kinds, key=memory.kinds.__getitem__)


def bounded(estimator: Estimator, plan: Plan, fixed: Fixed) -> Iterator[tuple["Least", Region, int, int]]:
    """Every legal region: (its cell's bounds, the region, micro-batches of a step, layouts)."""
    for cell in cells(plan, plan.cluster.devices, fixed):
        per_rank = plan.recipe.global_batch // cell.dp
        layouts = splits(cell, fixed)
        if not layouts:
            continue
        least = Least(estimator, cell, layouts)
        for micro in keep(fixed, "micro_batch", divisors(per_rank)):
            schedules = pipelines(plan.model, cell, per_rank // micro, fixed)
            for recompute in keep(fixed, "recompute", RECOMPUTE):
                for name, vp in schedules:
                    yield least, Region(cell, micro, name, vp, recompute), per_rank // micro, len(layouts)


class Least:
    """The least a cell's regions take: states shared as far as they can be, activations of the first rank."""

    def __init__(self, estimator: Estimator, cell: Cell, layouts: tuple[tuple[int, int, int], ...]) -> None:
        self.estimator, self.cell = estimator, cell
        self.split = max(layouts, key=sharing)
        self.layers = estimator.shape.layers / cell.pp
        self.kept: dict[str, float] = {}
        self.ranks: dict[tuple[int, str], Cost] = {}
        for recompute in RECOMPUTE:
            costs = self._costs(1, recompute)
            kept = [cost.kept_bytes for cost in (costs.dense, costs.routed) if cost.kept_bytes]
            self.kept[recompute] = min(kept, default=0.0)
        layout = Region(cell, 1, "1f1b", 1, "none").layout(*self.split)
        state = states(estimator.stack, layout, estimator.recipe.precision, estimator.held(layout, cell.pp // 2))
        self.states, self.update = sum(state.step.values()), sum(state.update.values())
        self.largest = max(state.step, key=state.step.__getitem__)

    def _costs(self, micro_batch: int, recompute: str) -> Costs:
        return self.estimator.parts(Region(self.cell, micro_batch, "1f1b", 1, recompute).layout())[1]

    def peak(self, region: Region, micro_batches: int) -> tuple[float, str]:
        """(bytes, their largest kind)."""
        name, ranks, vp = region.schedule, region.cell.pp, region.vp
        layers = first_layers(self.estimator.shape.layers, name, ranks, vp)
        kept = self.kept[region.recompute] * region.micro_batch * layers * about(name, ranks, vp, micro_batches, 0)
        return max(self.states + kept, self.update), "activations" if kept > self.states / 2 else self.largest

    def seconds(self, region: Region, micro_batches: int) -> float:
        """The busiest rank's own work, and the bubble of the schedule's closed form."""
        rank = self.rank(region.micro_batch, region.recompute)
        busy_s = (rank.forward_s + rank.backward_s) * self.unevenness(region.schedule, region.vp)
        bubble_s = bubble_about_s(region.schedule, self.cell.pp, region.vp, micro_batches, rank)
        return micro_batches * busy_s + bubble_s

    def rank(self, micro_batch: int, recompute: str) -> Cost:
        """Seconds of a pipeline rank's share of one micro-batch, as if all were equal."""
        key = micro_batch, recompute
        if key not in self.ranks:
            costs = self._costs(micro_batch, recompute)
            layer = costs.routed if self.estimator.shape.moe else costs.dense
            n, share, head = self.layers, 1 / self.cell.pp, costs.head
            self.ranks[key] = Cost(
                forward_s=n * layer.forward_s + share * head.forward_s,
                input_s=n * layer.input_s + share * head.input_s,
                weight_s=n * layer.weight_s + share * head.weight_s,
            )
        return self.ranks[key]

    def unevenness(self, name: str, vp: int) -> float:
        """Layers of the rank that has most, over the average with the ends counted as one layer each."""
        return most_layers(self.estimator.shape.layers, name, self.cell.pp, vp) / (self.layers + 2 / self.cell.pp)


@cache
def first_layers(layers: int, name: str, ranks: int, virtual: int) -> int:
    """Of the first pipeline rank."""
    split = stage_layers(layers, ranks * virtual)
    return sum(len(split[s]) for s in owned(name, ranks, virtual)[0])


@cache
def most_layers(layers: int, name: str, ranks: int, virtual: int) -> int:
    """Of all pipeline ranks, ends counted as one layer each."""
    split = stage_layers(layers, ranks * virtual)
    ends = {0: 1, len(split) - 1: 1}
    return max(sum(len(split[s]) + ends.get(s, 0) for s in own) for own in owned(name, ranks, virtual))
