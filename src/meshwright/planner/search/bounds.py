"""The least time that layouts of a kind can take, so that a search can leave them aside unseen; the least memory is in
memory_bounds.py.

It is below what is counted exactly (tests): the work of a rank, what its schedule lets no rank avoid, and what data
parallelism cannot hide behind it. Only the costs of a cell's blocks are asked for; schedules are not made.
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
from meshwright.spec.compiled_blocks import keeps_no_norms
from meshwright.spec.layout import Recompute
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import stages_of_ranks
from meshwright.spec.schedule_kinds import SPLIT


@cache
def longest_wait(layers: StageLayers, name: str, ranks: int, virtual: int, m: int) -> Wait:
    """Of the rank that does and waits most, as far as layers tell, of a pipeline with these stages. A rank waits for
    the forward passes of the stages in front of its first one; their backward passes follow its own, unless gradients
    of weights are left to be done beside them."""
    stages, behind = stages_of_ranks(name, ranks, virtual), int(name not in SPLIT)
    does = [[m * sum([layers[stage][kind] for stage in own]) for kind in (0, 1)] for own in stages]
    ahead = [[*accumulate((stage[kind] for stage in layers), initial=0)] for kind in (0, 1)]
    busy = [3 * (d + r) + (1 + 2 * behind) * (ahead[0][rank] + ahead[1][rank]) for rank, (d, r) in enumerate(does)]
    rank = max(range(ranks), key=busy.__getitem__)
    (dense, routed), dense_ahead, routed_ahead = does[rank], ahead[0][rank], ahead[1][rank]
    embedding = (m, m) if rank == 0 else (1, behind)
    return (
        dense + dense_ahead, dense + behind * dense_ahead, routed + routed_ahead, routed + behind * routed_ahead,
        *embedding, m * (len(layers) - 1 in stages[rank]), (1 + behind) * rank,
    )  # fmt: skip


def _shortest(kinds: Sequence[MicroBatchCost]) -> tuple[float, float]:
    """Forward and backward pass of a layer of any of these kinds."""
    if len(kinds) == 1:
        return kinds[0].forward_s, kinds[0].backward_s
    return min((one.forward_s for one in kinds), default=0.0), min((one.backward_s for one in kinds), default=0.0)


class CellBounds(MemoryBounds):
    """Least memory and time of one cell's layouts."""

    def __init__(self, of: Estimator, plan: Plan, cell: Cell, splits: Sequence[Split], known: CellTerms) -> None:
        super().__init__(of, plan, cell, splits, known)
        self._unhidden: dict[tuple[int, tuple[tuple[str, int], ...]], list[Unhidden]] = {}
        self._ahead: dict[int, float] = {}
        self._sends: dict[int, float] = {}
        self._waited: tuple[tuple[tuple[str, int], ...], int, list[Wait]] = (), 0, []
        """Pipelines and micro-batches of the family that was asked for last, and `waits` of them."""
        self.turns = max(1.0, of.speeds.ranks_per_core)

    def family_s(self, family: RegionFamily) -> float:
        """No layout of the family takes less: work that is spread evenly, or what one rank of its best pipeline does
        and waits for."""
        m, stack = self.m(family.micro_batch, self.batch), self.of.stack
        passes = self._pass_s(family)
        passes_s = m * passes.whole_s / self.cell.pp
        if self.cell.pp > 1:
            each_s = *passes.each_s, self._send_s(family.micro_batch)
            waits_s = [sum(map(mul, one, each_s)) for one in self.waits(family.pipelines, m)]
            passes_s = max(passes_s, min(waits_s) / self.turns)
        return passes_s + m * stack.micro_batch_s + stack.step_s

    def region_s(self, region: Region) -> float:
        """No layout of the region takes less: its passes."""
        return self.of.least_s(region.layout(base=self.base))

    def whole_family_s(self, family: RegionFamily) -> float:
        """No layout of the family takes less: also, one micro-batch passes all layers forward and back, behind a
        teacher's; and what data parallelism and the optimizer add."""
        passes_s, ahead_s = self.family_s(family), self._ahead_s(family.micro_batch)
        if self.cell.pp == 1:  # a teacher's passes hide what the model's do
            return min(self._splits_s(family.micro_batch, family.pipelines, passes_s + ahead_s))
        passes_s = max(passes_s, self._pass_s(family).through_s / self.turns)
        return min(self._splits_s(family.micro_batch, family.pipelines, passes_s)) + ahead_s

    def splits_s(self, region: Region) -> list[float]:
        """The same of a region, by its own passes, for each of `splits`."""
        ahead_s = self._ahead_s(region.micro_batch) if self.cell.pp > 1 else 0.0  # else among the region's passes
        pipelines = ((region.schedule, region.vp),)
        return [s + ahead_s for s in self._splits_s(region.micro_batch, pipelines, self.region_s(region))]

    def _ahead_s(self, micro_batch: int) -> float:
        if micro_batch not in self._ahead:
            layout = Region(self.cell, micro_batch, "1f1b", 1, "none").layout(base=self.base)
            self._ahead[micro_batch] = self.of.least_teacher_s(layout, self.m(micro_batch, self.batch))
        return self._ahead[micro_batch]

    def _pass_s(self, family: RegionFamily) -> BlockPasses:
        """Of a micro-batch."""
        # of layers none of which need recompute, the least is that of none
        key = family.micro_batch, "none" if self.base.recompute_layers else family.recompute
        known = self._blocks.passes
        if key in known:
            return known[key]
        costs, shape, windowed = self.costs(*key), self.of.shape, self.of.windowed_layers
        plain = self.dense - windowed
        parts = (
            (costs.embedding, 1), (costs.dense, plain), (costs.windowed, windowed),
            (costs.routed, shape.routed_layers), (costs.head, 1),
        )  # fmt: skip
        through_s = weights_s = 0.0
        for part, times in parts:
            through_s += times * (part.forward_s + part.input_s)
            weights_s += times * part.weight_s
        dense = [part for part, times in ((costs.dense, plain), (costs.windowed, windowed)) if times]
        head_s = costs.head.forward_s + costs.head.backward_s
        each = *_shortest(dense), *_shortest([costs.routed]), *_shortest([costs.embedding]), head_s
        known[key] = BlockPasses(through_s + weights_s, through_s, each)
        return known[key]

    def waits(self, pipelines: tuple[tuple[str, int], ...], m: int) -> list[Wait]:
        """Of those of these pipelines that can be the fastest."""
        if self._waited[0] is not pipelines or self._waited[1] != m:
            pp, known = self.cell.pp, self.known.waits
            key = pp, m, pipelines
            if key not in known:
                each = {longest_wait(self.stage_layers(vp), name, pp, vp, m) for name, vp in pipelines}
                known[key] = [
                    one for one in each if not any(other != one and all(map(le, other, one)) for other in each)
                ]
            self._waited = pipelines, m, known[key]
        return self._waited[2]

    def _send_s(self, micro_batch: int) -> float:
        """Of what stages pass on."""
        if micro_batch not in self._sends:
            self.costs(micro_batch, "none")
            tp, _, cp, _, pp, dp = self.cell
            sent_bytes = self._blocks.between[micro_batch]
            self._sends[micro_batch] = self.of.links.send_seconds(sent_bytes, tp * cp * dp, pp)
        return self._sends[micro_batch]

    def _splits_s(self, micro_batch: int, pipelines: tuple[tuple[str, int], ...], passes_s: float) -> list[float]:
        """No layout takes less whose passes take so long, with each split of data parallelism."""
        m = self.m(micro_batch, self.batch)
        if (m, pipelines) not in self._unhidden:
            held = self.least_layers(pipelines, self.m(micro_batch, self.largest))[-1].held
            self._unhidden[m, pipelines] = self._sharing(held, m)
        return [added.step_s(passes_s, m, self.turns) for added in self._unhidden[m, pipelines]]

    def _sharing(self, held: tuple[int, int], m: int) -> list[Unhidden]:
        """Of each split the least that data parallelism and the optimizer add to a step of `m` micro-batches where a
        rank holds so many layers. Sequence parallelism does not change it: it shares out activations alone."""
        key, known = (self.cell._replace(sp=False), tuple(self.splits), held, m), self.known.sharing
        if key not in known:
            any_layout = Region(self.cell, 1, "1f1b", 1, "none").layout
            layouts = [any_layout(*split, base=self.base) for split in self.splits]
            known[key] = [self.of.unhidden(one, m, *self.of.least_sharing(one, held, m)) for one in layouts]
        return known[key]


def offered_policies(of: Estimator, plan: Plan, cell: Cell, fixed: Fixed) -> tuple[Recompute, ...]:
    """Of recomputation, without those that are no other than `none`: `norms` where the compiler makes norms again by
    itself, and `selective` where no S x S weights are stored."""
    layout, kind = replace(plan.layout, cp=cell.cp, ep=cell.ep), "cuda" if plan.cluster.device.is_gpu else "cpu"
    idle = {
        "norms": of.stack.own and keeps_no_norms(layout, plan.model, kind, plan.recipe.fake_quantize),
        "selective": of.stack.drops_scores_alone and not layout.writes_scores,
    }
    asked = fixed.get("recompute", ())
    return allowed(fixed, "recompute", tuple(one for one in layout.policies if one in asked or not idle.get(one)))


def families(of: Estimator, plan: Plan, fixed: Fixed) -> Iterator[tuple[CellBounds, RegionFamily]]:
    """All that are legal, each with the bounds of its cell."""
    known = CellTerms()
    for cell in cells(plan, plan.cluster.devices, fixed):
        sharings = offered_splits(plan, cell, fixed)
        if not sharings:
            continue
        least = CellBounds(of, plan, cell, sharings, known)
        policies = offered_policies(of, plan, cell, fixed)
        for micro in micro_batches(plan, cell, fixed):
            schedules = pipelines(plan, cell, micro, fixed)
            if not schedules:
                continue
            for recompute in policies:
                yield least, RegionFamily(cell, micro, recompute, schedules)
