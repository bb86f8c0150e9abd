"""Lower bounds of the step time and peak memory of whole groups of layouts, which the search then leaves uncounted.

A bound of time counts the work of a rank, the waiting that its schedule cannot avoid, and the data parallelism that no
pass can hide. It needs only the costs of a cell's blocks and plays no schedule. Tests check that it never exceeds the
exact time.

A bound of memory shares states as far as any split of data parallelism shares them. Activations are those that the
first ranks keep when their first backward pass begins. Tests check that a bound never exceeds the exact peak.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from operator import le, mul
from typing import NamedTuple

from meshwright.planner.cost.micro_batch import MicroBatchCost
from meshwright.planner.cost.stage_costs import Costs, CostsByPolicy
from meshwright.planner.cost.states import ElementCounts, counts
from meshwright.planner.memory.engine_peak import enough
from meshwright.planner.memory.rank_memory import leading, returns
from meshwright.planner.search.regions import (
    Cell,
    Fixed,
    Region,
    RegionFamily,
    allowed,
    batches,
    cells,
    micro_batches,
    offered_splits,
    pipelines,
)
from meshwright.planner.step.predict import Estimator
from meshwright.planner.time.timeline import Unhidden
from meshwright.spec.layout.layout import Layout, Recompute
from meshwright.spec.layout.schedule import SPLIT, ranges, stage_layers, stages_of_ranks
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.spec.rules.passes import compiles_blocks, keeps_no_norms, shares_codes

Split = tuple[int, int, int]
FIRST = 2
"""Pipeline ranks examined for activations: the second has a full share of layers, the first also the embedding."""


class RankLayers(NamedTuple):
    """Layers (dense, routed) that a pipeline rank holds, and those in flight, counted once per micro-batch."""

    held: tuple[int, int]
    alive: tuple[int, int]
    first: int
    """1 = the rank also holds the embedding."""

    def bytes_of(self, held: "HeldBytes") -> tuple[float, float]:
        """Return (bytes of all states of the rank, bytes of its gradients among them)."""
        dense, routed, ends = held.gradients
        return (
            self.held[0] * held.dense + self.held[1] * held.routed + self.first * held.ends,
            self.held[0] * dense + self.held[1] * routed + self.first * ends,
        )


class HeldBytes(NamedTuple):
    """Bytes that stay through a step under one ZeRO stage: of a dense layer, a routed layer and the embedding."""

    dense: float
    routed: float
    ends: float
    largest: str
    """Largest kind of memory of a layer."""
    gradients: tuple[float, float, float]
    """Bytes of gradients among each of the three. They appear one by one in the first backward pass."""


class PipelineTerms(NamedTuple):
    """Terms shared by consecutive families that differ in recomputation only."""

    names: tuple[tuple[str, int], ...]
    micro_batch: int
    ranks: "list[Idle]"
    idle_bytes: float
    """Most bytes of any rank, without gradients."""
    stays: bool
    """True if all gradients exist at the peak."""


class Idle(NamedTuple):
    """A rank's in-flight layers, dense and routed, and the bytes it holds without their activations."""

    dense: int
    routed: int
    idle_bytes: float
    gradient_bytes: float
    """Gradients among `idle_bytes`."""


StageLayers = tuple[tuple[int, int], ...]
"""(dense, routed) layers of each stage."""
Wait = tuple[int, int, int, int, int, int, int, int]
"""Executions and waits of a rank in one step, counted for each of eight terms.

Forward and backward passes of a dense layer, of a routed layer and of the embedding, both passes of the head, sends.
"""


class BlockPasses(NamedTuple):
    """Seconds of one micro-batch."""

    whole_s: float
    """Forward and backward through all layers."""
    through_s: float
    """The same without weight gradients, which can be computed later."""
    each_s: tuple[float, ...]
    """Seconds of each term of a Wait except sends."""


@dataclass(slots=True)
class BlockTerms:
    """Terms shared by cells whose ranks compute the same blocks."""

    costs: dict[int, CostsByPolicy] = field(default_factory=dict)
    """Micro-batch -> costs by recompute policy."""
    between: dict[int, float] = field(default_factory=dict)
    """Micro-batch -> bytes that a stage sends to the next."""
    kept_by_policy: dict[tuple[str, bool], tuple[float, float, float]] = field(default_factory=dict)
    passes: dict[tuple[int, str], BlockPasses] = field(default_factory=dict)


ALONE = (0,)


@dataclass(slots=True)
class CellTerms:
    """Terms shared by cells, so that each is computed once per search."""

    blocks: dict[tuple[int | bool, ...], BlockTerms] = field(default_factory=dict)
    """Keyed by the degrees within a stage. `ALONE`: a rank that shares neither blocks nor a pipeline."""

    stages: dict[tuple[int, int], StageLayers] = field(default_factory=dict)
    """(pipeline ranks, stages per rank) -> layers of each stage."""
    layers: dict[tuple[int, int, tuple[tuple[str, int], ...]], tuple[RankLayers, ...]] = field(default_factory=dict)
    """(pipeline ranks, micro-batches, pipelines) -> `least_layers` over the pipelines."""
    stays: dict[tuple[int, int, tuple[tuple[str, int], ...]], bool] = field(default_factory=dict)
    """Same key -> True if all gradients exist when as much is in flight as before the first backward pass."""
    waits: dict[tuple[int, int, tuple[tuple[str, int], ...]], list[Wait]] = field(default_factory=dict)
    """Same key -> waits of the pipelines that can be the fastest."""
    states: dict[tuple[int, int, int, int, bool, bool, bool], HeldBytes] = field(default_factory=dict)
    counts: dict[tuple[object, ...], ElementCounts] = field(default_factory=dict)
    """The degrees that share a layer, and the layer -> its elements on a rank."""
    sharing: dict[tuple[object, ...], list[Unhidden]] = field(default_factory=dict)
    """(cell, splits, layers of a rank, micro-batches) -> the least that each split adds to a step."""


def least_layers(pipelines: list[tuple[RankLayers, ...]]) -> tuple[RankLayers, ...]:
    """Return, rank by rank, the fewest layers over these pipelines."""
    return tuple(
        RankLayers(
            (min(layers.held[0] for layers in candidates), min(layers.held[1] for layers in candidates)),
            (min(layers.alive[0] for layers in candidates), min(layers.alive[1] for layers in candidates)),
            candidates[0].first,
        )
        for candidates in zip(*pipelines, strict=True)
    )


@cache
def rank_layers(stages: StageLayers, name: str, ranks: int, virtual: int, m: int) -> tuple[RankLayers, ...]:
    """Return the layers held and in flight on the first ranks of a pipeline with these stages."""
    layers = []
    few = enough(name, ranks, m, virtual)
    for rank, rank_stages in enumerate(stages_of_ranks(name, ranks, virtual)[:FIRST]):
        alive = leading(name, ranks, few, virtual, rank)
        dense, routed = ([stages[stage][kind] for stage in rank_stages] for kind in (0, 1))
        in_flight = sum(map(mul, alive, dense)), sum(map(mul, alive, routed))
        layers.append(RankLayers((sum(dense), sum(routed)), in_flight, int(rank == 0)))
    return tuple(layers)


class MemoryBounds:
    """Lower bounds of the peak memory of one cell's layouts."""

    def __init__(self, estimator: Estimator, plan: Plan, cell: Cell, splits: Sequence[Split], known: CellTerms) -> None:
        self.estimator, self.cell, self.base, self.known = estimator, cell, plan.layout, known
        self.splits = sorted(splits, key=sharing_degree, reverse=True)
        self.batch, self.largest = plan.recipe.global_batch, batches(plan.recipe)[-1]
        self.dense = estimator.shape.layers - estimator.shape.routed_layers
        self._states: dict[bool, list[HeldBytes]] = {}
        self._ranks: dict[tuple[tuple[tuple[str, int], ...], int], list[Idle]] = {}
        self._pipelines = PipelineTerms((), 0, [], 0.0, False)
        # Blocks depend on tp, sp, cp and ep alone, so cells that differ in dp or pp share terms.
        self._blocks = known.blocks.setdefault(
            cell[:4] if cell.pp > 1 or max(cell.tp, cell.cp, cell.ep) > 1 else ALONE, BlockTerms()
        )

    def m(self, micro_batch: int, batch: int) -> int:
        """Return the number of micro-batches of a step."""
        per_rank = batch // self.cell.dp
        return per_rank // min(per_rank, micro_batch)

    def costs(self, micro_batch: int, recompute: str) -> Costs:
        """Return the costs of the cell's blocks."""
        known = self._blocks.costs
        if micro_batch not in known:
            layout = Region(self.cell, micro_batch, "1f1b", 1, "none").layout(base=self.base)
            block, known[micro_batch] = self.estimator.costs.blocks(layout)
            self._blocks.between[micro_batch] = block.between_bytes
        return known[micro_batch][recompute]

    def family_bytes(self, family: RegionFamily, room: float = float("inf")) -> float:
        """Return a lower bound of the peak over the family. Beyond `room`, activations are not counted."""
        return self._least_bytes(family.pipelines, family.micro_batch, family.recompute, room)

    def region_bytes(self, region: Region) -> float:
        """Return a lower bound of the peak over the region."""
        return self._least_bytes(((region.schedule, region.vp),), region.micro_batch, region.recompute)

    def _least_bytes(
        self, pipelines: tuple[tuple[str, int], ...], micro_batch: int, recompute: str, room: float = float("inf")
    ) -> float:
        # Consecutive families mostly differ in recomputation only, which these terms do not read.
        # Families of a cell share one tuple of pipelines, so identity suffices.
        if self._pipelines.names is not pipelines or self._pipelines.micro_batch != micro_batch:
            m = self.m(micro_batch, self.largest)
            ranks = self._idle(pipelines, m)
            idle_bytes = max([rank.idle_bytes - rank.gradient_bytes for rank in ranks])
            # Other software allocates all gradients from the start.
            stays = self._stays(pipelines, m) or not self.estimator.stack.is_meshwright
            self._pipelines = PipelineTerms(pipelines, micro_batch, ranks, idle_bytes, stays)
        if self._pipelines.idle_bytes > room:
            return self._pipelines.idle_bytes
        return self._bytes(self._pipelines.ranks, micro_batch, recompute, self._pipelines.stays)

    def _stays(self, pipelines: tuple[tuple[str, int], ...], m: int) -> bool:
        """Return True if all gradients exist at the peak under each of these pipelines."""
        key = self.cell.pp, m, pipelines
        if key not in self.known.stays:
            self.known.stays[key] = all(returns(name, self.cell.pp, m, virtual) for name, virtual in pipelines)
        return self.known.stays[key]

    def kind(self, family: RegionFamily, peak_bytes: float) -> str:
        """Return the largest kind of memory of a family whose lower bound is `peak_bytes`."""
        m = self.m(family.micro_batch, self.largest)
        # A bound has no kinds of its own: where it is far above the states, activations are to blame.
        if peak_bytes > 1.5 * max(rank.idle_bytes for rank in self._idle(family.pipelines, m)):
            return "activations"
        return self.states(m > 1)[0].largest

    def _bytes(self, ranks: list[Idle], micro_batch: int, recompute: str, stays: bool) -> float:
        (dense, routed, inside), peak = self.kept_bytes(recompute), 0.0
        for rank in ranks:
            rank_bytes = micro_batch * (rank.dense * dense + rank.routed * routed) + inside + rank.idle_bytes
            if not stays:
                rank_bytes -= rank.gradient_bytes  # with one micro-batch they are reduced as they arise
            if rank_bytes > peak:
                peak = rank_bytes
        return peak + self.estimator.stack.reserve_bytes

    def _idle(self, pipelines: tuple[tuple[str, int], ...], m: int) -> list[Idle]:
        """Return, rank by rank, the least that any of these pipelines holds."""
        if (pipelines, m) not in self._ranks:
            held = self.states(m > 1)
            ranks = self.least_layers(pipelines, m)
            self._ranks[pipelines, m] = [Idle(*rank.alive, *min(map(rank.bytes_of, held))) for rank in ranks]
        return self._ranks[pipelines, m]

    def least_layers(self, pipelines: tuple[tuple[str, int], ...], m: int) -> tuple[RankLayers, ...]:
        """Return, rank by rank, the fewest layers that any of these pipelines holds."""
        pp = self.cell.pp
        key = pp, m, pipelines
        if key not in self.known.layers:
            each = [rank_layers(self.stage_layers(vp), name, pp, vp, m) for name, vp in pipelines]
            self.known.layers[key] = least_layers(each) if len(each) > 1 else each[0]
        return self.known.layers[key]

    def stage_layers(self, vp: int) -> StageLayers:
        """Return the layers of each stage of the cell's pipelines with `vp` stages per rank."""
        key = self.cell.pp, vp
        if key not in self.known.stages:
            shape = self.estimator.shape
            stages = ranges(stage_sizes(self.estimator, *key, self.base))
            in_front = [*accumulate(map(shape.is_moe_layer, range(shape.layers)), initial=0)]
            routed = [in_front[layers.stop] - in_front[layers.start] for layers in stages]
            self.known.stages[key] = tuple(
                (len(layers) - routed_layers, routed_layers)
                for layers, routed_layers in zip(stages, routed, strict=True)
            )
        return self.known.stages[key]

    def kept_bytes(self, recompute: str) -> tuple[float, float, float]:
        """Return bytes that one sequence keeps of a dense and a routed layer, and those inside one backward pass.

        More sequences keep at least as much each. The third term leaves out weight gradients where products are summed
        in place, since these do not grow with sequences.
        """
        known, key = self._blocks.kept_by_policy, (recompute, self.cell.pp > 1)
        if key not in known:
            costs = self.costs(1, recompute)
            parts = [part for part in (costs.dense, costs.routed) if part.forward_s]
            # Where weight gradients may add to sums, their bytes are no part of a lower bound.
            compiled = compiles_blocks(self.base, self.estimator.shape, "cuda", self.estimator.recipe.fake_quantize)
            summed = self.estimator.costs.may_sum_products and (self.cell.pp > 1 or not compiled)
            inside = [part.inputs_bytes if summed else part.transient_bytes for part in parts]
            on_device = (
                self.base.offload == "off"
            )  # offloaded activations leave the device, but for each stage's last block
            dense, routed = (costs.dense.kept_bytes, costs.routed.kept_bytes) if on_device else (0.0, 0.0)
            known[key] = dense, routed, min(inside, default=0.0)
        return known[key]

    def states(self, sums: bool) -> list[HeldBytes]:
        """Return the states under the widest sharing of each ZeRO stage. `sums`: a step has several micro-batches."""
        if sums not in self._states:
            # Walked from the narrowest sharing on, so the widest of each ZeRO stage remains.
            most = {zero: (replicate, shard, zero) for replicate, shard, zero in reversed(self.splits)}
            self._states[sums] = [self._split_states(split, sums) for split in most.values()][::-1]
        return self._states[sums]

    def _split_states(self, split: Split, sums: bool) -> HeldBytes:
        (tp, _, cp, ep, pp, dp), (_, shard, zero) = self.cell, split
        key = tp, ep, shard * cp, zero, pp > 1, sums, dp * cp == 1
        if key not in self.known.states:
            layout = Region(self.cell, 1, "1f1b", 1, "none").layout(*split, base=self.base)
            # Two micro-batches stand for any number: it only matters whether gradients are sums.
            self.known.states[key] = self._held_bytes(layout, 2 if sums else 1)
        return self.known.states[key]

    def _held_bytes(self, layout: Layout, m: int) -> HeldBytes:
        shape, recipe = self.estimator.shape, self.estimator.recipe
        parts = []
        examples = [_smallest_layer(shape, routed) for routed in (False, True)]
        ranks = layout.dp_shard * layout.cp if layout.zero else 1
        # The smallest layer of each kind bounds every rank that holds as many.
        for layers, first in ((examples[0], False), (examples[1], False), ((), True)):
            key = layout.tp, layout.ep, ranks, shares_codes(layout), layers
            if key not in self.known.counts:
                count = counts(shape, layout, layers, first=first, last=False, storage=recipe.storage)
                self.known.counts[key] = replace(count, gathered=count.whole)  # sharing adds only padding
            parts.append(self.estimator.states(layout, self.known.counts[key], m).step)
        dense, routed, ends = (sum(part.values()) for part in parts)
        gradients = tuple(part["gradients"] for part in parts)
        return HeldBytes(
            dense, routed, ends, max(parts[1], key=parts[1].__getitem__), (gradients[0], gradients[1], gradients[2])
        )


@cache
def _smallest_layer(shape: ModelShape, routed: bool) -> tuple[int, ...]:
    """Return the layer with the fewest parameters among linear-attention layers and others, if the shape has both."""
    kinds = {bool(shape.linear_of(n)): n for n in range(shape.layers) if shape.is_moe_layer(n) == routed}
    if len(kinds) < 2:
        return (shape.layers - 1 if routed else 0,)
    return (min(kinds.values(), key=lambda n: counts(shape, Layout(), (n,), first=False, last=False).whole),)


@cache
def _even_sizes(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(map(len, stage_layers(layers, stages)))


def stage_sizes(estimator: Estimator, pp: int, vp: int, base: Layout) -> tuple[int, ...]:
    """Return the number of layers of each stage."""
    by_hand = pp > 1 and len(base.stages) == pp * vp
    if estimator.stack.split == "cost" or by_hand:
        layout = Layout(pp=pp, vp=vp, stages=base.stages if by_hand else ())
        return tuple(map(len, estimator.costs.split(layout)))
    return _even_sizes(estimator.shape.layers, pp * vp)


def sharing_degree(split: Split) -> tuple[int, int]:
    """Return how far a split (dp_replicate, dp_shard, zero) shares the states, as a sort key."""
    return (split[1] if split[2] else 0, split[2])


@cache
def longest_wait(layers: StageLayers, name: str, ranks: int, virtual: int, m: int) -> Wait:
    """Return what the busiest pipeline rank does and waits for in a step of `m` micro-batches, counted in layers.

    A rank waits for the forward passes of the stages before its first one. Their backward passes follow its own, unless
    the schedule defers weight gradients and computes them at the same time as the others.
    """
    stages, joint_backward = stages_of_ranks(name, ranks, virtual), int(name not in SPLIT)
    work = [[m * sum([layers[stage][kind] for stage in rank_stages]) for kind in (0, 1)] for rank_stages in stages]
    before = [[*accumulate((stage[kind] for stage in layers), initial=0)] for kind in (0, 1)]
    # A backward pass counts as two forward passes.
    busy = [
        3 * (dense + routed) + (1 + 2 * joint_backward) * (before[0][rank] + before[1][rank])
        for rank, (dense, routed) in enumerate(work)
    ]
    rank = max(range(ranks), key=busy.__getitem__)
    (dense, routed), dense_before, routed_before = work[rank], before[0][rank], before[1][rank]
    # The first rank embeds all micro-batches; others wait for the first one's embedding only.
    embedding = (m, m) if rank == 0 else (1, joint_backward)
    return (
        dense + dense_before, dense + joint_backward * dense_before,
        routed + routed_before, routed + joint_backward * routed_before,
        *embedding, m * (len(layers) - 1 in stages[rank]), (1 + joint_backward) * rank,
    )  # fmt: skip


def _shortest(kinds: Sequence[MicroBatchCost]) -> tuple[float, float]:
    """Return the forward and backward seconds of the fastest kind of layer."""
    if len(kinds) == 1:
        return kinds[0].forward_s, kinds[0].backward_s
    return min((kind.forward_s for kind in kinds), default=0.0), min((kind.backward_s for kind in kinds), default=0.0)


class CellBounds(MemoryBounds):
    """Lower bounds of the memory and time of one cell's layouts."""

    def __init__(self, estimator: Estimator, plan: Plan, cell: Cell, splits: Sequence[Split], known: CellTerms) -> None:
        super().__init__(estimator, plan, cell, splits, known)
        self._unhidden: dict[tuple[int, tuple[tuple[str, int], ...]], list[Unhidden]] = {}
        self._teacher_s: dict[int, float] = {}
        self._sends: dict[int, float] = {}
        self._waited: tuple[tuple[tuple[str, int], ...], int, list[Wait]] = (), 0, []
        """Pipelines and micro-batches of the last call of `waits`, and its answer."""
        self.ranks_per_core = max(1.0, estimator.speeds.ranks_per_core)

    def family_s(self, family: RegionFamily) -> float:
        """Return a lower bound of the step time of a family.

        It is the larger of the evenly spread work and what the busiest rank of its best pipeline does and waits for.
        """
        m, stack = self.m(family.micro_batch, self.batch), self.estimator.stack
        passes = self._pass_s(family)
        passes_s = m * passes.whole_s / self.cell.pp
        if self.cell.pp > 1:
            each_s = *passes.each_s, self._send_s(family.micro_batch)
            waits_s = [sum(map(mul, counts, each_s)) for counts in self.waits(family.pipelines, m)]
            # Ranks that share a core compute while others wait.
            passes_s = max(passes_s, min(waits_s) / self.ranks_per_core)
        return passes_s + m * stack.micro_batch_s + stack.step_s

    def region_s(self, region: Region) -> float:
        """Return a lower bound of the step time of a region: its passes alone."""
        return self.estimator.least_s(region.layout(base=self.base))

    def whole_family_s(self, family: RegionFamily) -> float:
        """Return a tighter bound of a family.

        It adds that one micro-batch passes through all layers and back, after a teacher's passes, and adds what data
        parallelism and the optimizer cost.
        """
        passes_s, teacher_s = self.family_s(family), self._least_teacher_s(family.micro_batch)
        if self.cell.pp == 1:  # communication can hide behind the teacher's passes as well
            return min(self._splits_s(family.micro_batch, family.pipelines, passes_s + teacher_s))
        passes_s = max(passes_s, self._pass_s(family).through_s / self.ranks_per_core)
        return min(self._splits_s(family.micro_batch, family.pipelines, passes_s)) + teacher_s

    def splits_s(self, region: Region) -> list[float]:
        """Return a lower bound of a region's step time for each of `splits`."""
        teacher_s = (
            self._least_teacher_s(region.micro_batch) if self.cell.pp > 1 else 0.0
        )  # else within the region's passes
        pipelines = ((region.schedule, region.vp),)
        return [step_s + teacher_s for step_s in self._splits_s(region.micro_batch, pipelines, self.region_s(region))]

    def _least_teacher_s(self, micro_batch: int) -> float:
        if micro_batch not in self._teacher_s:
            layout = Region(self.cell, micro_batch, "1f1b", 1, "none").layout(base=self.base)
            self._teacher_s[micro_batch] = self.estimator.least_teacher_s(layout, self.m(micro_batch, self.batch))
        return self._teacher_s[micro_batch]

    def _pass_s(self, family: RegionFamily) -> BlockPasses:
        """Return the seconds of one micro-batch's passes."""
        # Where any number of layers may recompute, the fastest is that none does.
        key = family.micro_batch, "none" if self.base.recompute_layers else family.recompute
        known = self._blocks.passes
        if key in known:
            return known[key]
        costs, shape, windowed = self.costs(*key), self.estimator.shape, self.estimator.costs.windowed_layers
        plain = self.dense - windowed
        parts = (
            (costs.embedding, 1), (costs.dense, plain), (costs.windowed, windowed),
            (costs.routed, shape.routed_layers), (costs.head, 1),
        )  # fmt: skip
        # A pass through all layers bounds every pipeline, however it is cut.
        through_s = weights_s = 0.0
        for part, layers in parts:
            through_s += layers * (part.forward_s + part.input_s)
            weights_s += layers * part.weight_s
        dense = [part for part, layers in ((costs.dense, plain), (costs.windowed, windowed)) if layers]
        head_s = costs.head.forward_s + costs.head.backward_s
        each = *_shortest(dense), *_shortest([costs.routed]), *_shortest([costs.embedding]), head_s
        known[key] = BlockPasses(through_s + weights_s, through_s, each)
        return known[key]

    def waits(self, pipelines: tuple[tuple[str, int], ...], m: int) -> list[Wait]:
        """Return the waits of those pipelines that can be the fastest: none is worse than another in every term."""
        # The families of a cell share one tuple, so identity saves hashing it.
        if self._waited[0] is not pipelines or self._waited[1] != m:
            pp, known = self.cell.pp, self.known.waits
            key = pp, m, pipelines
            if key not in known:
                # A set, since many pipelines do and await the same.
                candidates = {longest_wait(self.stage_layers(vp), name, pp, vp, m) for name, vp in pipelines}
                known[key] = [
                    candidate
                    for candidate in candidates
                    if not any(other != candidate and all(map(le, other, candidate)) for other in candidates)
                ]
            self._waited = pipelines, m, known[key]
        return self._waited[2]

    def _send_s(self, micro_batch: int) -> float:
        """Return the seconds of sending one micro-batch's activations to the next stage."""
        if micro_batch not in self._sends:
            self.costs(micro_batch, "none")
            tp, _, cp, _, pp, dp = self.cell
            sent_bytes = self._blocks.between[micro_batch]
            self._sends[micro_batch] = self.estimator.links.send_seconds(sent_bytes, tp * cp * dp, pp)
        return self._sends[micro_batch]

    def _splits_s(self, micro_batch: int, pipelines: tuple[tuple[str, int], ...], passes_s: float) -> list[float]:
        """Return, for each split of data parallelism, a lower bound of the step whose passes take `passes_s`."""
        m = self.m(micro_batch, self.batch)
        if (m, pipelines) not in self._unhidden:
            held = self.least_layers(pipelines, self.m(micro_batch, self.largest))[-1].held
            self._unhidden[m, pipelines] = self._sharing(held, m)
        return [added.step_s(passes_s, m, self.ranks_per_core) for added in self._unhidden[m, pipelines]]

    def _sharing(self, held: tuple[int, int], m: int) -> list[Unhidden]:
        """Return, for each split, the least that data parallelism and the optimizer add to a step of `m` micro-batches.

        `held` counts the (dense, routed) layers of a rank. Sequence parallelism makes no difference: it shares
        activations only.
        """
        # The same bound serves the cell with and without sp.
        key, known = (self.cell._replace(sp=False), tuple(self.splits), held, m), self.known.sharing
        if key not in known:
            any_layout = Region(self.cell, 1, "1f1b", 1, "none").layout
            layouts = [any_layout(*split, base=self.base) for split in self.splits]
            known[key] = [
                self.estimator.unhidden(layout, m, *self.estimator.least_sharing(layout, held, m)) for layout in layouts
            ]
        return known[key]


def offered_policies(estimator: Estimator, plan: Plan, cell: Cell, fixed: Fixed) -> tuple[Recompute, ...]:
    """Return the recompute policies worth searching.

    Without an effect of their own are `norms` where the compiler recomputes norms anyway, and `selective` where no S x
    S weights are stored.
    """
    layout, kind = replace(plan.layout, cp=cell.cp, ep=cell.ep), "cuda" if plan.cluster.device.is_gpu else "cpu"
    without_effect = {
        "norms": estimator.stack.is_meshwright and keeps_no_norms(layout, plan.model, kind, plan.recipe.fake_quantize),
        "selective": estimator.stack.drops_scores_alone and not layout.writes_scores,
    }
    fixed_policies = fixed.get("recompute", ())
    return allowed(
        fixed,
        "recompute",
        tuple(policy for policy in layout.policies if policy in fixed_policies or not without_effect.get(policy)),
    )


def families(estimator: Estimator, plan: Plan, fixed: Fixed) -> Iterator[tuple[CellBounds, RegionFamily]]:
    """Yield every legal family with the bounds of its cell."""
    # One store for all cells, since most terms depend on few of a cell's degrees.
    known = CellTerms()
    for cell in cells(plan, plan.cluster.devices, fixed):
        splits = offered_splits(plan, cell, fixed)
        if not splits:
            continue
        bounds = CellBounds(estimator, plan, cell, splits, known)
        policies = offered_policies(estimator, plan, cell, fixed)
        for micro in micro_batches(plan, cell, fixed):
            schedules = pipelines(plan, cell, micro, fixed)
            if not schedules:
                continue
            for recompute in policies:
                yield bounds, RegionFamily(cell, micro, recompute, schedules)
