"""The least memory that layouts of a kind can take: states shared as far as any split of data parallelism shares them,
kept activations of the first ranks when their first backward pass begins. Below what is counted exactly (tests)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from meshwright.planner.cost.stage_costs import Costs, CostsByPolicy
from meshwright.planner.cost.states import ElementCounts, counts
from meshwright.planner.memory.engine_peak import enough
from meshwright.planner.memory.rank_memory import leading, returns
from meshwright.planner.search.regions import Cell, Region, RegionFamily, batches
from meshwright.planner.step.predict import Estimator
from meshwright.planner.time.timeline import Unhidden
from meshwright.spec.compiled_blocks import compiles_blocks
from meshwright.spec.frozen_code_rules import shares_codes
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import ranges, stage_layers, stages_of_ranks
from meshwright.spec.shape import ModelShape

Split = tuple[int, int, int]
FIRST = 2
"""Ranks looked at for activations: the second has a whole share of layers, the first also the embedding."""


class RankLayers(NamedTuple):
    """Of the layers of a pipeline rank (dense, routed): how many it holds, and how many it has in flight at once, once
    for each micro-batch."""

    held: tuple[int, int]
    alive: tuple[int, int]
    first: int
    """1 = and the embedding."""

    def bytes_of(self, held: "HeldBytes") -> tuple[float, float]:
        """(all of a rank's states, its gradients)."""
        dense, routed, ends = held.gradients
        return (
            self.held[0] * held.dense + self.held[1] * held.routed + self.first * held.ends,
            self.held[0] * dense + self.held[1] * routed + self.first * ends,
        )


class HeldBytes(NamedTuple):
    """Bytes of what stays through a step, by ZeRO stage: of a dense layer, a routed one, the embedding."""

    dense: float
    routed: float
    ends: float
    largest: str
    """Kind of a layer's."""
    gradients: tuple[float, float, float]
    """Of those three, bytes of gradients, which come one by one in the first backward pass."""


class PipelineTerms(NamedTuple):
    """What families have in common that differ in recomputation alone, which come one behind the other."""

    names: tuple[tuple[str, int], ...]
    micro_batch: int
    ranks: "list[Idle]"
    idle_bytes: float
    """The most of any rank, without gradients."""
    stays: bool
    """Whether gradients are all there at the fullest moment."""


class Idle(NamedTuple):
    """A rank: layers in flight, dense and routed, and the bytes it holds without them."""

    dense: int
    routed: int
    idle_bytes: float
    gradient_bytes: float
    """Of those."""


StageLayers = tuple[tuple[int, int], ...]
"""Layers of each stage, dense and routed."""
Wait = tuple[int, int, int, int, int, int, int, int]
"""Of a pipeline rank in a step, how often it does or waits for: forward and backward passes of a dense layer, of a
routed one and of the embedding, both passes of the head, sends."""


class BlockPasses(NamedTuple):
    """Seconds of a micro-batch."""

    whole_s: float
    """Through all layers, forward and back."""
    through_s: float
    """The same but for gradients of weights, which can come later."""
    each_s: tuple[float, ...]
    """Of what a Wait counts, but for sends."""


@dataclass(slots=True)
class BlockTerms:
    """What cells have in common whose ranks compute the same blocks."""

    costs: dict[int, CostsByPolicy] = field(default_factory=dict)
    """Micro-batch -> by recompute policy."""
    between: dict[int, float] = field(default_factory=dict)
    """Micro-batch -> bytes of what a stage passes on."""
    kept: dict[tuple[str, bool], tuple[float, float, float]] = field(default_factory=dict)
    passes: dict[tuple[int, str], BlockPasses] = field(default_factory=dict)


ALONE = (0,)


@dataclass(slots=True)
class CellTerms:
    """What cells have in common."""

    blocks: dict[tuple[int | bool, ...], BlockTerms] = field(default_factory=dict)
    """By degrees inside of a stage; `ALONE`: of a rank that shares neither blocks nor a pipeline."""

    stages: dict[tuple[int, int], StageLayers] = field(default_factory=dict)
    """(ranks, stages of each)."""
    layers: dict[tuple[int, int, tuple[tuple[str, int], ...]], tuple[RankLayers, ...]] = field(default_factory=dict)
    """(ranks, micro-batches, pipelines) -> `lowest` of them."""
    stays: dict[tuple[int, int, tuple[tuple[str, int], ...]], bool] = field(default_factory=dict)
    """The same -> whether gradients are all there when as much is in flight as before the first backward pass."""
    waits: dict[tuple[int, int, tuple[tuple[str, int], ...]], list[Wait]] = field(default_factory=dict)
    """The same -> of pipelines those that can be the fastest."""
    states: dict[tuple[int, int, int, int, bool, bool, bool], HeldBytes] = field(default_factory=dict)
    counts: dict[tuple[object, ...], ElementCounts] = field(default_factory=dict)
    """Degrees that share a layer, and the layer -> its elements on a rank."""
    sharing: dict[tuple[object, ...], list[Unhidden]] = field(default_factory=dict)
    """Cell, splits, layers of a rank, micro-batches -> of each split the least that it adds."""


def least_layers(pipelines: list[tuple[RankLayers, ...]]) -> tuple[RankLayers, ...]:
    """Rank by rank the least that any of these pipelines has."""
    return tuple(
        RankLayers(
            (min(one.held[0] for one in same), min(one.held[1] for one in same)),
            (min(one.alive[0] for one in same), min(one.alive[1] for one in same)),
            same[0].first,
        )
        for same in zip(*pipelines, strict=True)
    )


@cache
def rank_layers(stages: StageLayers, name: str, ranks: int, virtual: int, m: int) -> tuple[RankLayers, ...]:
    """Of the first ranks of a pipeline with these stages."""
    found = []
    few = enough(name, ranks, m, virtual)
    for rank, own in enumerate(stages_of_ranks(name, ranks, virtual)[:FIRST]):
        alive = leading(name, ranks, few, virtual, rank)
        dense, routed = ([stages[stage][kind] for stage in own] for kind in (0, 1))
        in_flight = sum(map(mul, alive, dense)), sum(map(mul, alive, routed))
        found.append(RankLayers((sum(dense), sum(routed)), in_flight, int(rank == 0)))
    return tuple(found)


class MemoryBounds:
    """Of one cell's layouts."""

    def __init__(self, of: Estimator, plan: Plan, cell: Cell, splits: Sequence[Split], known: CellTerms) -> None:
        self.of, self.cell, self.base, self.known = of, cell, plan.layout, known
        self.splits = sorted(splits, key=sharing_degree, reverse=True)
        self.batch, self.largest = plan.recipe.global_batch, batches(plan.recipe)[-1]
        self.dense = of.shape.layers - of.shape.routed_layers
        self._states: dict[bool, list[HeldBytes]] = {}
        self._ranks: dict[tuple[tuple[tuple[str, int], ...], int], list[Idle]] = {}
        self._pipelines = PipelineTerms((), 0, [], 0.0, False)
        self._blocks = known.blocks.setdefault(
            cell[:4] if cell.pp > 1 or max(cell.tp, cell.cp, cell.ep) > 1 else ALONE, BlockTerms()
        )

    def m(self, micro_batch: int, batch: int) -> int:
        """Micro-batches of a step."""
        per_rank = batch // self.cell.dp
        return per_rank // min(per_rank, micro_batch)

    def costs(self, micro_batch: int, recompute: str) -> Costs:
        """Of the cell's blocks."""
        known = self._blocks.costs
        if micro_batch not in known:
            layout = Region(self.cell, micro_batch, "1f1b", 1, "none").layout(base=self.base)
            of, known[micro_batch] = self.of.blocks(layout)
            self._blocks.between[micro_batch] = of.between_bytes
        return known[micro_batch][recompute]

    def family_bytes(self, family: RegionFamily, room: float = float("inf")) -> float:
        """No layout of the family has a lower peak; beyond `room` activations are not asked for."""
        return self._least_bytes(family.pipelines, family.micro_batch, family.recompute, room)

    def region_bytes(self, region: Region) -> float:
        """No layout of the region has a lower peak."""
        return self._least_bytes(((region.schedule, region.vp),), region.micro_batch, region.recompute)

    def _least_bytes(
        self, pipelines: tuple[tuple[str, int], ...], micro_batch: int, recompute: str, room: float = float("inf")
    ) -> float:
        if self._pipelines.names is not pipelines or self._pipelines.micro_batch != micro_batch:
            m = self.m(micro_batch, self.largest)
            ranks = self._idle(pipelines, m)
            idle_bytes = max([rank.idle_bytes - rank.gradient_bytes for rank in ranks])
            stays = self._stays(pipelines, m) or not self.of.stack.own  # other software has all gradients all along
            self._pipelines = PipelineTerms(pipelines, micro_batch, ranks, idle_bytes, stays)
        if self._pipelines.idle_bytes > room:
            return self._pipelines.idle_bytes
        return self._bytes(self._pipelines.ranks, micro_batch, recompute, self._pipelines.stays)

    def _stays(self, pipelines: tuple[tuple[str, int], ...], m: int) -> bool:
        """Whether they do in all of these."""
        key = self.cell.pp, m, pipelines
        if key not in self.known.stays:
            found = all(returns(name, self.cell.pp, m, virtual) for name, virtual in pipelines)
            self.known.stays[key] = found
        return self.known.stays[key]

    def kind(self, family: RegionFamily, peak_bytes: float) -> str:
        """What is largest where the family's least memory is `peak_bytes`."""
        m = self.m(family.micro_batch, self.largest)
        if peak_bytes > 1.5 * max(rank.idle_bytes for rank in self._idle(family.pipelines, m)):
            return "activations"
        return self.states(m > 1)[0].largest

    def _bytes(self, ranks: list[Idle], micro_batch: int, recompute: str, stays: bool) -> float:
        (dense, routed, inside), peak = self.kept(recompute), 0.0
        for rank in ranks:
            found = micro_batch * (rank.dense * dense + rank.routed * routed) + inside + rank.idle_bytes
            if not stays:
                found -= rank.gradient_bytes  # in a step of one micro-batch they are shared out as they come
            if found > peak:
                peak = found
        return peak + self.of.stack.reserve_bytes

    def _idle(self, pipelines: tuple[tuple[str, int], ...], m: int) -> list[Idle]:
        """Rank by rank the least that any of these pipelines has."""
        if (pipelines, m) not in self._ranks:
            held = self.states(m > 1)
            ranks = self.least_layers(pipelines, m)
            self._ranks[pipelines, m] = [Idle(*rank.alive, *min(map(rank.bytes_of, held))) for rank in ranks]
        return self._ranks[pipelines, m]

    def least_layers(self, pipelines: tuple[tuple[str, int], ...], m: int) -> tuple[RankLayers, ...]:
        """The same without bytes."""
        pp = self.cell.pp
        key = pp, m, pipelines
        if key not in self.known.layers:
            each = [rank_layers(self.stage_layers(vp), name, pp, vp, m) for name, vp in pipelines]
            self.known.layers[key] = least_layers(each) if len(each) > 1 else each[0]
        return self.known.layers[key]

    def stage_layers(self, vp: int) -> StageLayers:
        """Of each stage of the cell's pipelines of so many stages a rank."""
        key = self.cell.pp, vp
        if key not in self.known.stages:
            shape = self.of.shape
            places = ranges(stage_sizes(self.of, *key, self.base))
            in_front = [*accumulate(map(shape.is_moe_layer, range(shape.layers)), initial=0)]
            routed = [in_front[place.stop] - in_front[place.start] for place in places]
            self.known.stages[key] = tuple((len(place) - r, r) for place, r in zip(places, routed, strict=True))
        return self.known.stages[key]

    def kept(self, recompute: str) -> tuple[float, float, float]:
        """Bytes kept of a dense and a routed layer for one sequence, more sequences need no less each; and those inside
        one's backward pass, of which gradients of weights do not grow with them, and are not where sums take
        products."""
        known, key = self._blocks.kept, (recompute, self.cell.pp > 1)
        if key not in known:
            costs = self.costs(1, recompute)
            parts = [part for part in (costs.dense, costs.routed) if part.forward_s]
            compiled = compiles_blocks(self.base, self.of.shape, "cuda", self.of.recipe.fake_quantize)
            summed = self.of.may_sum_products and (self.cell.pp > 1 or not compiled)
            inside = [part.inputs_bytes if summed else part.transient_bytes for part in parts]
            here = self.base.offload == "off"  # else in host memory, but for each stage's last block
            kept = (costs.dense.kept_bytes, costs.routed.kept_bytes) if here else (0.0, 0.0)
            known[key] = *kept, min(inside, default=0.0)
        return known[key]

    def states(self, sums: bool) -> list[HeldBytes]:
        """With the most sharing of each ZeRO stage. `sums`: of several micro-batches."""
        if sums not in self._states:
            most = {zero: (replicate, shard, zero) for replicate, shard, zero in reversed(self.splits)}
            self._states[sums] = [self._of_split(split, sums) for split in most.values()][::-1]
        return self._states[sums]

    def _of_split(self, split: Split, sums: bool) -> HeldBytes:
        (tp, _, cp, ep, pp, dp), (_, shard, zero) = self.cell, split
        key = tp, ep, shard * cp, zero, pp > 1, sums, dp * cp == 1
        if key not in self.known.states:
            layout = Region(self.cell, 1, "1f1b", 1, "none").layout(*split, base=self.base)
            self.known.states[key] = self._held(layout, 2 if sums else 1)
        return self.known.states[key]

    def _held(self, layout: Layout, m: int) -> HeldBytes:
        shape, recipe = self.of.shape, self.of.recipe
        parts = []
        few = [_smallest(shape, routed) for routed in (False, True)]
        ranks = layout.dp_shard * layout.cp if layout.zero else 1
        for layers, first in ((few[0], False), (few[1], False), ((), True)):
            key = layout.tp, layout.ep, ranks, shares_codes(layout), layers
            if key not in self.known.counts:
                count = counts(shape, layout, layers, first=first, last=False, storage=recipe.storage)
                self.known.counts[key] = replace(count, gathered=count.whole)  # padding alone grows with sharing
            parts.append(self.of.states(layout, self.known.counts[key], m).step)
        dense, routed, ends = (sum(part.values()) for part in parts)
        gradients = tuple(part["gradients"] for part in parts)
        return HeldBytes(
            dense, routed, ends, max(parts[1], key=parts[1].__getitem__), (gradients[0], gradients[1], gradients[2])
        )


@cache
def _smallest(shape: ModelShape, routed: bool) -> tuple[int, ...]:
    """Of layers of linear attention and others, where a shape has both, the one with fewer parameters."""
    kinds = {bool(shape.linear_of(n)): n for n in range(shape.layers) if shape.is_moe_layer(n) == routed}
    if len(kinds) < 2:
        return (shape.layers - 1 if routed else 0,)
    return (min(kinds.values(), key=lambda n: counts(shape, Layout(), (n,), first=False, last=False).whole),)


@cache
def _even(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(len(layers) for layers in stage_layers(layers, stages))


def stage_sizes(of: Estimator, pp: int, vp: int, base: Layout) -> tuple[int, ...]:
    """Layers of each stage."""
    by_hand = pp > 1 and len(base.stages) == pp * vp
    if of.stack.split == "cost" or by_hand:
        layout = Layout(pp=pp, vp=vp, stages=base.stages if by_hand else ())
        return tuple(len(layers) for layers in of.split(layout))
    return _even(of.shape.layers, pp * vp)


def sharing_degree(split: Split) -> tuple[int, int]:
    """How far (dp_replicate, dp_shard, zero) shares the states."""
    return (split[1] if split[2] else 0, split[2])
