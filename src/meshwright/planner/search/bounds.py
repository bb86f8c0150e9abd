"""The least time that layouts of a kind can take, so that a search can leave them aside unseen; the least memory is in
memory_bounds.py.

It is below what is counted exactly (tests): the work of a rank, what its schedule lets no rank avoid, and what data
parallelism cannot hide behind it. Only the costs of a cell's blocks are asked for; schedules are not made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.planner.search.memory_bounds import CellTerms, LeastMemory, Split
from meshwright.planner.search.regions import (
    Cell,
    Fixed,
    Region,
    RegionFamily,
    cells,
    keep,
    micro_batches,
    offered_splits,
    pipelines,
)
from meshwright.planner.step.predict import Estimator
from meshwright.planner.time.collectives import Sharing
from meshwright.planner.time.timeline import Unhidden
from meshwright.spec.compiled_blocks import keeps_no_norms
from meshwright.spec.layout import Layout, Recompute
from meshwright.spec.plan import Plan


class Least(LeastMemory):
    """Least memory and time of one cell's layouts."""

    def __init__(self, of: Estimator, plan: Plan, cell: Cell, splits: Sequence[Split], known: CellTerms) -> None:
        super().__init__(of, plan, cell, splits, known)
        self._unhidden: dict[int, list[Unhidden]] = {}
        self._ahead: dict[int, float] = {}
        self._passes: dict[tuple[int, str], tuple[float, float]] = {}
        self.turns = max(1.0, of.speeds.ranks_per_core)

    def family_s(self, family: RegionFamily) -> float:
        """No layout of the family takes less: work that is spread evenly, without a bubble."""
        m = self.m(family.micro_batch, self.batch)
        return m * (self._pass_s(family)[0] / self.cell.pp + self.of.stack.micro_batch_s) + self.of.stack.step_s

    def region_s(self, region: Region) -> float:
        """No layout of the region takes less: its passes."""
        return self.of.least_s(region.layout(base=self.base))

    def whole_family_s(self, family: RegionFamily) -> float:
        """No layout of the family takes less: also, one micro-batch passes all layers forward and back, behind a
        teacher's; and what data parallelism and the optimizer add."""
        through_s, ahead_s = self._pass_s(family)[1], self._ahead_s(family.micro_batch)
        if self.cell.pp == 1:  # a teacher's passes hide what the model's do
            return self._shared_s(family, self.family_s(family) + ahead_s)
        return self._shared_s(family, max(self.family_s(family), through_s / self.turns)) + ahead_s

    def whole_region_s(self, family: RegionFamily, region: Region) -> float:
        """The same of a region of the family, by its own passes."""
        ahead_s = self._ahead_s(family.micro_batch) if self.cell.pp > 1 else 0.0  # else among the region's passes
        return self._shared_s(family, self.region_s(region)) + ahead_s

    def _ahead_s(self, micro_batch: int) -> float:
        if micro_batch not in self._ahead:
            layout = Region(self.cell, micro_batch, "1f1b", 1, "none").layout(base=self.base)
            self._ahead[micro_batch] = self.of.least_teacher_s(layout, self.m(micro_batch, self.batch))
        return self._ahead[micro_batch]

    def _pass_s(self, family: RegionFamily) -> tuple[float, float]:
        """Of a micro-batch through all layers: (forward and back, the same but for gradients of weights, which can
        come later)."""
        # of layers none of which need recompute, the least is that of none
        key = family.micro_batch, "none" if self.base.recompute_layers else family.recompute
        if key in self._passes:
            return self._passes[key]
        costs, shape = self.costs(*key), self.of.shape
        windowed = self.of.windowed(range(shape.layers))
        parts = (
            (costs.embedding, 1), (costs.dense, self.dense - windowed), (costs.windowed, windowed),
            (costs.routed, shape.routed_layers), (costs.head, 1),
        )  # fmt: skip
        through_s = weights_s = 0.0
        for part, times in parts:
            through_s += times * (part.forward_s + part.input_s)
            weights_s += times * part.weight_s
        self._passes[key] = through_s + weights_s, through_s
        return self._passes[key]

    def _shared_s(self, family: RegionFamily, passes_s: float) -> float:
        """No layout of the family takes less whose passes take so long, however it shares states and gradients."""
        m = self.m(family.micro_batch, self.batch)
        if m not in self._unhidden:
            held = self.lowest(family.pipelines, self.m(family.micro_batch, self.largest))[-1].held
            shared = self._sharing(held, m > 1)
            self._unhidden[m] = [self.of.unhidden(layout, m, *seconds) for layout, seconds in shared]
        return min([added.step_s(passes_s, m, self.turns) for added in self._unhidden[m]])

    def _sharing(self, held: tuple[int, int], sums: bool) -> list[tuple[Layout, tuple[Sharing, float]]]:
        """Of each split the least that data parallelism and the optimizer take. `sums`: of several micro-batches.
        Sequence parallelism does not change it: it shares out activations alone."""
        key = (
            self.cell._replace(sp=False),
            tuple(self.splits),
            held,
            sums,
        )
        if key not in self.known.sharing:
            any_layout = Region(self.cell, 1, "1f1b", 1, "none").layout
            layouts = [any_layout(*split, base=self.base) for split in self.splits]
            self.known.sharing[key] = [
                (layout, self.of.least_sharing(layout, held, 2 if sums else 1)) for layout in layouts
            ]
        return self.known.sharing[key]


def offered_policies(of: Estimator, plan: Plan, cell: Cell, fixed: Fixed) -> tuple[Recompute, ...]:
    """Of recomputation; `norms` is no other than `none` where the compiler makes norms again by itself."""
    layout, kind = replace(plan.layout, ep=cell.ep), "cuda" if plan.cluster.device.is_gpu else "cpu"
    same = of.stack.own and keeps_no_norms(layout, plan.model, kind, plan.recipe.fake_quantize)
    asked = "norms" in fixed.get("recompute", ())
    return keep(fixed, "recompute", tuple(one for one in layout.policies if asked or not same or one != "norms"))


def families(of: Estimator, plan: Plan, fixed: Fixed) -> Iterator[tuple[Least, RegionFamily]]:
    """All that are legal, each with the bounds of its cell."""
    known = CellTerms()
    for cell in cells(plan, plan.cluster.devices, fixed):
        sharings = offered_splits(plan, cell, fixed)
        if not sharings:
            continue
        least = Least(of, plan, cell, sharings, known)
        for micro in micro_batches(plan, cell, fixed):
            schedules = pipelines(plan, cell, micro, fixed)
            if not schedules:
                continue
            for recompute in offered_policies(of, plan, cell, fixed):
                yield least, RegionFamily(cell, micro, recompute, schedules)
