"""Lower bounds of the step time of whole groups of layouts, with which the search discards most of them uncounted.

A bound counts the work of a rank, the waiting that its schedule cannot avoid, and the data parallelism that no pass can
hide. It needs only the costs of a cell's blocks and plays no schedule. Tests check that it never exceeds the exact
time. The bounds of memory are in memory_bounds.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from operator import le, mul

from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.search.memory_bounds import BlockPasses, CellTerms, MemoryBounds, Split, StageLayers, Wait
from meshwright.planner.search.regions import (
    Cell,
    Fixed,
    Region,
    RegionFamily,
    allowed,
    cells,
    micro_batches,
    offered_splits,
    pipelines,
)
from meshwright.planner.step.predict import Estimator
from meshwright.planner.time.timeline import Unhidden
from meshwright.spec.layout.layout import Recompute
from meshwright.spec.layout.schedule import SPLIT, stages_of_ranks
from meshwright.spec.plan.plan import Plan
from meshwright.spec.rules.compilation import keeps_no_norms


@cache
def longest_wait(layers: StageLayers, name: str, ranks: int, virtual: int, m: int) -> Wait:
    """Return what the busiest pipeline rank does and waits for in a step of `m` micro-batches, counted in layers.

    A rank waits for the forward passes of the stages before its first one. Their backward passes follow its own, unless
    the schedule defers weight gradients and computes them beside the others.
    """
    stages, joint_backward = stages_of_ranks(name, ranks, virtual), int(name not in SPLIT)
    work = [[m * sum([layers[stage][kind] for stage in rank_stages]) for kind in (0, 1)] for rank_stages in stages]
    before = [[*accumulate((stage[kind] for stage in layers), initial=0)] for kind in (0, 1)]
    # a backward pass counts as two forward passes
    busy = [
        3 * (dense + routed) + (1 + 2 * joint_backward) * (before[0][rank] + before[1][rank])
        for rank, (dense, routed) in enumerate(work)
    ]
    rank = max(range(ranks), key=busy.__getitem__)
    (dense, routed), dense_before, routed_before = work[rank], before[0][rank], before[1][rank]
    # the first rank embeds all micro-batches; others wait for the first one's embedding only
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
        # where any number of layers may recompute, the fastest is that none does
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
        # a pass through all layers bounds every pipeline, however it is cut
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
        # the families of a cell share one tuple, so identity saves hashing it
        if self._waited[0] is not pipelines or self._waited[1] != m:
            pp, known = self.cell.pp, self.known.waits
            key = pp, m, pipelines
            if key not in known:
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
        # the same bound serves the cell with and without sp
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
