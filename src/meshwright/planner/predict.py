"""Plan -> Prediction: memory, traffic and time of one layout, by counting."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.planner.known import Known
from meshwright.planner.links import Links, links_of
from meshwright.planner.local import SPLIT, Local, local
from meshwright.planner.memory import (
    RankMemory,
    Unit,
    Whole,
    first_backward,
    rank_memory,
    whole_apart,
    whole_together,
)
from meshwright.planner.peaks import Standing, Units, moments, standing
from meshwright.planner.peaks import Unit as Peak
from meshwright.planner.prediction import Prediction
from meshwright.planner.speeds import Speeds, speeds_of
from meshwright.planner.stack import MESHWRIGHT, Stack, eager
from meshwright.planner.stages import Cost, Costs, costs, ranks_of, split_by_cost
from meshwright.planner.states import Counts, States, counts, states
from meshwright.planner.timeline import (
    UNKNOWN,
    Edges,
    StepTime,
    least_s,
    owned,
    pipeline_s,
    shared_links,
    step_time,
    update_seconds,
)
from meshwright.planner.traffic import Held, Sharing, sharing
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.places import layers_of_stages, own_stages
from meshwright.spec.plan import Plan
from meshwright.spec.recipe import Recipe
from meshwright.spec.schedule import V_PLACED
from meshwright.spec.shape import ModelShape

KEPT = 1000
"""Layouts, but for their data parallelism, whose stages are kept."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Predicts layouts of one model, recipe and cluster; what layouts share is counted once."""

    shape: ModelShape
    recipe: Recipe
    cluster: Cluster
    stack: Stack = MESHWRIGHT
    speeds: Speeds
    links: Links

    @cached_property
    def _known(self) -> Known:
        return Known()

    def _key(self, layout: Layout) -> tuple[int, bool, int, int, str, bool, bool, int]:
        batch, splits = layout.micro_batch_of(self.recipe.global_batch), layout.pp > 1 and layout.schedule in SPLIT
        return layout.tp, layout.sp, layout.cp, layout.ep, layout.context, splits, layout.compile == "off", batch

    def parts(self, layout: Layout) -> tuple[Local, Costs]:
        """Costs of the blocks for one micro-batch."""
        of, found = self._parts(layout)
        return of, found[layout.recompute]

    def policies(self, layout: Layout) -> dict[str, Costs]:
        """The same under each recompute policy."""
        return self._parts(layout)[1]

    def _parts(self, layout: Layout) -> tuple[Local, dict[str, Costs]]:
        key = self._key(layout)
        if key not in self._known.parts:
            width = 4 if self.recipe.precision == "fp32" else 2
            recipe, stack = self.recipe, eager(self.stack) if layout.compile == "off" else self.stack
            documents = recipe.document_mask
            of = local(self.shape, stack, layout, recipe.sequence, key[-1], width, recipe.dropout, documents)
            self._known.parts[key] = of, costs(of, layout, self.speeds, self.links, self._known.blocks)
        return self._known.parts[key]

    def split(self, layout: Layout) -> list[range]:
        """Layers of each stage."""
        key = layout.pp, layout.vp, layout.stages
        if key not in self._known.splits:
            by_cost = self.stack.split == "cost" and not layout.stages
            stages = layout.pp * layout.vp
            self._known.splits[key] = (
                split_by_cost(self.shape, stages) if by_cost else layers_of_stages(self.shape.layers, layout)
            )
        return self._known.splits[key]

    def stages(self, layout: Layout) -> list[Cost]:
        """Cost of each pipeline stage; those of the layouts asked for last are kept."""
        key = self._stages_key(layout)
        if key not in self._known.stages:
            _, found = self.parts(layout)
            split = self.split(layout)
            made: dict[tuple[int, int, int, bool, bool], Cost] = {}
            stages = []
            for s, layers in enumerate(split):
                routed = sum(map(self.shape.is_moe_layer, layers)) if self.shape.moe else 0
                windowed = self._windowed(layers)
                kind = len(layers), routed, windowed, s == 0, s == len(split) - 1
                if kind not in made:
                    made[kind] = found.stage(
                        len(layers) - routed, routed, windowed=windowed, first=kind[3], last=kind[4]
                    )
                stages.append(made[kind])
            if len(self._known.stages) >= KEPT:
                self._known.stages.clear()
                self._known.standing.clear()
            self._known.stages[key] = stages
        return self._known.stages[key]

    def _stages_key(self, layout: Layout) -> tuple[object, ...]:
        return (*self._key(layout), layout.recompute, layout.pp, layout.vp, layout.stages)

    def _windowed(self, layers: range) -> int:
        """Dense layers of these that have a window, where the first has none."""
        if not (self.shape.window and self.shape.window_from_layer):
            return 0
        return sum(bool(self.shape.window_of(layer)) and not self.shape.is_moe_layer(layer) for layer in layers)

    def _ranks(self, layout: Layout) -> list[tuple[int, int, bool, bool]]:
        """(dense layers, routed ones, has the embedding, has the head) of each pipeline rank."""
        key = layout.schedule, layout.pp, layout.vp, layout.stages
        if key not in self._known.kinds:
            split, shape = self.split(layout), self.shape
            routed = [sum(map(shape.is_moe_layer, layers)) if shape.moe else 0 for layers in split]
            self._known.kinds[key] = [
                (sum(len(split[s]) - routed[s] for s in own), sum(routed[s] for s in own), 0 in own,
                 len(split) - 1 in own)
                for own in owned(layout.schedule, layout.pp, layout.vp)
            ]  # fmt: skip
        return self._known.kinds[key]

    def held(self, layout: Layout, rank: int) -> Counts:
        """Elements that a pipeline rank holds."""
        kind = self._ranks(layout)[rank]
        key = layout.tp, layout.ep, layout.dp_shard * layout.cp if layout.zero else 1, kind
        if key not in self._known.counts:
            dense, routed, first, last = kind
            layers = [*range(dense), *range(self.shape.layers - routed, self.shape.layers)]
            self._known.counts[key] = counts(self.shape, layout, layers, first=first, last=last)
        return self._known.counts[key]

    def _layers(self, layout: Layout, rank: int) -> Held:
        """What a pipeline rank has."""
        split, own = self.split(layout), owned(layout.schedule, layout.pp, layout.vp)[rank]
        layers = tuple(layer for stage in own for layer in split[stage])
        return Held(layers, 0 in own, len(split) - 1 in own)

    def _sharing(self, layout: Layout, state: States, rank: int) -> Sharing:
        """Seconds of data parallelism of a pipeline rank."""
        held = self._layers(layout, rank)
        degrees = layout.tp, layout.cp, layout.ep, layout.dp_replicate, layout.dp_shard, layout.zero
        summed = self.stack.gradient_exchange_bytes or state.gradient_bytes
        routed = sum(map(self.shape.is_moe_layer, held.layers)) if self.shape.moe else 0
        key = *degrees, len(held.layers), routed, held.first, held.last, summed
        if key not in self._known.sums:
            self._known.sums[key] = sharing(
                self.shape, layout, held, self.links, state.parameter_bytes, summed, self.stack.sharding == "flat"
            )
        return self._known.sums[key]

    def predict(self, plan: Plan) -> Prediction:
        """Memory and time of a legal plan of this shape, recipe and cluster."""
        time, memory = self.measure(plan.layout)
        peak = max(self.cluster.device.bf16_flop_per_s or self.speeds.peak_flop_per_s, self.speeds.reached_flop_per_s)
        return Prediction(plan=plan, stack=self.stack, time=time, memory=memory, peak_flop_per_s=peak)

    def measure(self, layout: Layout, *, exact: bool = True) -> tuple[StepTime, tuple[RankMemory, ...]]:
        """Time of a step and memory of every pipeline rank; not `exact`: of a few ranks, without playing the schedule:
        neither is more than what is exact."""
        ranks = range(layout.pp) if exact else self.telling(layout)
        return self.time(layout, exact=exact), self.memory(layout, ranks, exact=exact)

    def time(self, layout: Layout, *, exact: bool = True) -> StepTime:
        """Of a step."""
        recipe, stages = self.recipe, self.stages(layout)
        m = layout.micro_batches(recipe.global_batch)
        of, _ = self.parts(layout)
        shared_s, update_s = Sharing(), 0.0
        ranks = self._ranks(layout)
        for rank in {kind: rank for rank, kind in enumerate(ranks)}.values():
            count = self.held(layout, rank)
            state = states(self.stack, layout, recipe.precision, count, m, recipe.reduce_dtype)
            shared_s = shared_s.worst(self._sharing(layout, state, rank))
            update_s = max(update_s, update_seconds(self.speeds, count, recipe.precision == "fp32"))
        send_s = self._send_s(layout, of)
        shown = self._with_sends(layout, stages, send_s)
        passes_s = self._passes_s(layout, m, shown, send_s, exact)
        shared = shared_links(layout, self.links)
        edges = self._edges(layout)
        return step_time(layout, self.stack, m, shown, send_s, shared_s, update_s, shared, passes_s, edges,
                         self.speeds.ranks_per_core)  # fmt: skip

    def least_s(self, layout: Layout) -> float:
        """No layout with the same passes takes less, however it shares them among data-parallel ranks."""
        m = layout.micro_batches(self.recipe.global_batch)
        send_s = self._send_s(layout, self.parts(layout)[0])
        shown = self._with_sends(layout, self.stages(layout), send_s)
        passes_s = self._passes_s(layout, m, shown, send_s, False)
        if layout.pp > 1:
            passes_s /= max(1.0, self.speeds.ranks_per_core)
        return passes_s + self.stack.step_s + m * self.stack.micro_batch_s

    def _passes_s(self, layout: Layout, m: int, stages: list[Cost], send_s: float, exact: bool) -> float:
        """Of all passes of a step. What was played is kept, since all splits of dp play the same."""
        key = (*self._stages_key(layout), layout.schedule, m, send_s)
        if not exact or layout.pp == 1:
            times = [(cost.forward_s, cost.input_s, cost.weight_s) for cost in stages]
            return least_s(layout.schedule, layout.pp, layout.vp, m, times, send_s)
        if key not in self._known.played:
            self._known.played[key] = pipeline_s(layout, m, stages, send_s)
        return self._known.played[key]

    def memory(self, layout: Layout, ranks: Iterable[int], *, exact: bool = True) -> tuple[RankMemory, ...]:
        """Of some pipeline ranks, in the largest steps of the recipe."""
        if self.recipe.batch_ramp:
            return self._largest.memory(layout, ranks, exact=exact)
        recipe, stages = self.recipe, self.stages(layout)
        m = layout.micro_batches(recipe.global_batch)
        of, _ = self.parts(layout)
        found = []
        for rank in ranks:
            count = self.held(layout, rank)
            state = states(self.stack, layout, recipe.precision, count, m, recipe.reduce_dtype)
            found.append(self._memory(layout, m, stages, state, rank, of, count, exact))
        return tuple(found)

    @cached_property
    def _largest(self) -> "Estimator":
        recipe = self.recipe
        batch = max(recipe.global_batch, *(stage.global_batch for stage in recipe.batch_ramp))
        return replace(self, recipe=replace(recipe, global_batch=batch, batch_ramp=()))

    def telling(self, layout: Layout) -> list[int]:
        """The ranks among which the highest peak is to be expected: both ends, and the first with the most layers, of
        which routed ones count more."""
        kinds = [(routed, dense + routed) for dense, routed, *_ in self._ranks(layout)]
        return sorted({0, kinds.index(max(kinds)), layout.pp - 1})

    def fullest(self, layout: Layout) -> list[int]:
        """The ranks that no other is above: of those with equal layers the first, which has most in flight, unless the
        stages lie in a V."""
        if layout.schedule in V_PLACED:
            return list(range(layout.pp))
        kinds = self._ranks(layout)
        return [rank for rank, kind in enumerate(kinds) if kind not in kinds[:rank]]

    def _send_s(self, layout: Layout, of: Local) -> float:
        if layout.pp == 1:
            return 0.0
        return self.links.send_seconds(of.between_bytes, ranks_of(layout, "pp")[1], layout.pp)

    def _with_sends(self, layout: Layout, stages: list[Cost], send_s: float) -> list[Cost]:
        """What of the transfers no computation hides stands in both neighbours' time."""
        shown = send_s * (1 - self.stack.hides_sends) + (self.stack.send_s if layout.pp > 1 else 0.0)
        if not shown:
            return stages
        return [c.plus(Cost(forward_s=shown, input_s=shown, exchange_s=2 * shown)) for c in stages]

    def _memory(
        self,
        layout: Layout,
        m: int,
        stages: list[Cost],
        state: States,
        rank: int,
        of: Local,
        count: Counts,
        exact: bool,
    ) -> RankMemory:
        return rank_memory(
            layout, self.stack, m, stages, state, rank, self._whole(layout, state),
            border_bytes=of.between_bytes,
            update_bytes=self._update_bytes(count),
            exact=exact,
            units=self._units(layout, state) if self.stack.own else None,
            found=self._standing(layout, m, stages, rank, exact) if self.stack.own else (),
        )  # fmt: skip

    def _standing(self, layout: Layout, m: int, stages: list[Cost], rank: int, exact: bool) -> tuple[Standing, ...]:
        """The moments of a rank's schedule, the same for all splits of data parallelism but those that reduce each
        micro-batch at once."""
        key = (*self._stages_key(layout), layout.schedule, layout.zero >= 2, m, rank, exact)
        if key not in self._known.standing:
            exact = exact or layout.pp == 1
            found = moments(layout, m, rank) if exact else (first_backward(layout, m, rank),)
            self._known.standing[key] = standing(found, [stages[stage] for stage in own_stages(layout, rank)])
        return self._known.standing[key]

    def _update_bytes(self, count: Counts) -> float:
        """Temporaries of the optimizer step."""
        widened = min(count.own * 4.0, self.stack.update_bucket_bytes) if self.recipe.precision != "fp32" else 0.0
        return count.own * self.stack.update_bytes + widened

    def _whole(self, layout: Layout, state: States) -> Whole:
        """What data parallelism gathers, and reduces from."""
        apart, sharers = self.stack.ends_apart, layout.dp * layout.cp
        if sharers == 1 or (layout.zero < 3 and not apart) or (layout.pp > 1 and apart):
            return Whole()
        tied = self.shape.tied
        block = self._unit(layout, state, (self.shape.layers - 1,))
        if not apart:
            return whole_together(block, self._unit(layout, state, (), first=True, last=True))
        return whole_apart(layout.zero, block, self._unit(layout, state, (), first=tied, last=True), tied)

    def _units(self, layout: Layout, state: States) -> Units:
        """Of this package's engine: what is gathered, made and reduced together."""
        tied, summed = self.shape.tied, layout.dp * layout.cp > 1
        layers = self.shape.layers
        made = state.parameter_bytes / state.gradient_bytes

        def unit(layers: tuple[int, ...], *, first: bool = False, last: bool = False) -> Peak:
            found = self._unit(layout, state, layers, first=first, last=last)
            return Peak(found.parameters, found.gradients, found.gradients * made)

        return Units(
            first=unit((), first=True, last=tied),
            block=unit((layers - 1,)),
            last=unit((), first=tied, last=True),
            summed=summed,
        )

    def _edges(self, layout: Layout) -> Edges:
        """Of the embedding's unit and of what stays whole, without a pipeline."""
        if layout.pp > 1 or layout.dp * layout.cp == 1:
            return UNKNOWN
        key = layout.tp, layout.ep
        if key not in self._known.shares:
            plain, tied = replace(layout, zero=0), self.shape.tied
            whole, first, last = (
                counts(self.shape, plain, layers, first=first, last=last).whole
                for layers, first, last in ((range(self.shape.layers), True, True), ((), True, tied), ((), tied, True))
            )
            apart = self.stack.ends_apart
            ends = last if tied else first + last
            self._known.shares[key] = Edges(first / whole, last / whole) if apart else Edges(0.0, ends / whole)
        return self._known.shares[key]

    def _unit(
        self, layout: Layout, state: States, layers: tuple[int, ...], *, first: bool = False, last: bool = False
    ) -> Unit:
        key = "unit", layout.tp, layout.ep, layout.dp_shard * layout.cp if layout.zero else 1, layers, first, last
        if key not in self._known.counts:
            self._known.counts[key] = counts(self.shape, layout, layers, first=first, last=last)
        found = self._known.counts[key].gathered
        return Unit(found * state.parameter_bytes, found * state.gradient_bytes)


def estimator(
    plan: Plan, stack: Stack = MESHWRIGHT, speeds: Speeds | None = None, links: Links | None = None
) -> Estimator:
    """For a plan's model, recipe and cluster; speeds and links from the cluster's data sheet unless given."""
    return Estimator(
        shape=plan.model,
        recipe=plan.recipe,
        cluster=plan.cluster,
        stack=stack,
        speeds=speeds or speeds_of(plan.cluster.device, stack.flash),
        links=links or links_of(plan.cluster),
    )


def predict(plan: Plan, stack: Stack = MESHWRIGHT) -> Prediction:
    """What a legal plan would cost."""
    return estimator(plan, stack).predict(plan)
