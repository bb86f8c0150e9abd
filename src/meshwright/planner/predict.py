"""Plan -> Prediction: memory, traffic and time of one layout, by counting."""

from dataclasses import dataclass
from functools import cached_property

from meshwright.planner.block import Local, local
from meshwright.planner.links import Links, links_of
from meshwright.planner.memory import RankMemory, rank_memory
from meshwright.planner.speeds import Speeds, speeds_of
from meshwright.planner.stack import MESHWRIGHT, Stack
from meshwright.planner.stages import Cost, Costs, costs, split_by_cost, ranks_of
from meshwright.planner.states import Counts, States, counts, states
from meshwright.planner.timeline import StepTime, data_parallel_seconds, shared_links, step_time, update_seconds
from meshwright.planner.traffic import Sent, traffic
from meshwright.spec.cluster import Cluster
from meshwright.spec.flop import token_flop
from meshwright.spec.layout import Layout
from meshwright.spec.places import own_stages
from meshwright.spec.plan import Plan
from meshwright.spec.recipe import Recipe
from meshwright.spec.schedule import stage_layers
from meshwright.spec.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan would cost. Seconds of a step, bytes at the peak of each pipeline rank."""

    plan: Plan
    stack: Stack
    time: StepTime
    memory: tuple[RankMemory, ...]
    """Of each pipeline rank."""
    peak_flop_per_s: float
    """Of a device, the datasheet's."""

    @property
    def worst(self) -> RankMemory:
        """The pipeline rank with the highest peak."""
        return max(self.memory, key=lambda one: one.total_bytes)

    @property
    def peak_bytes(self) -> float:
        """Its peak."""
        return self.worst.total_bytes

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.time.total_s

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.plan.recipe.global_batch * self.plan.recipe.sequence

    @property
    def tokens_per_s_per_device(self) -> float:
        """The figure to compare with others."""
        return self.tokens_per_step / self.step_s / self.plan.layout.world

    def mfu(self, *, causal: bool) -> float:
        """Model FLOP utilization of the datasheet's peak."""
        flop = token_flop(self.plan.model, self.plan.recipe.sequence, causal=causal).training
        return flop * self.tokens_per_s_per_device / self.peak_flop_per_s

    @property
    def hfu(self) -> float:
        """As mfu (causal), with what recomputation repeats."""
        flop = token_flop(self.plan.model, self.plan.recipe.sequence, causal=True)
        return flop.hardware(self.plan.layout.recompute) * self.tokens_per_s_per_device / self.peak_flop_per_s

    def traffic(self, pp_rank: int = 0) -> tuple[Sent, ...]:
        """What a rank of a pipeline rank sends in a step, by axis and collective."""
        return traffic(self.plan, pp_rank, self.stack)

    @property
    def bubble_fraction(self) -> float:
        """(pipeline - work of the busiest rank) / that work."""
        busy = self.time.compute_s + self.time.exchange_s
        return self.time.bubble_s / busy if busy else 0.0


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
    def _costs(self) -> dict[tuple[object, ...], tuple[Local, Costs]]:
        return {}

    def parts(self, layout: Layout) -> tuple[Local, Costs]:
        """Costs of the blocks for one micro-batch."""
        batch = layout.micro_batch_of(self.recipe.global_batch)
        inside = min(layout.tp * layout.cp, self.links.per_node), layout.dp_shard if layout.ep > 1 else 0
        key = (layout.tp, layout.sp, layout.cp, layout.ep, layout.context, batch, layout.recompute, inside)
        if key not in self._costs:
            width = 4 if self.recipe.precision == "fp32" else 2
            of = local(self.shape, self.stack, layout, self.recipe.sequence, batch, width, self.recipe.dropout)
            self._costs[key] = of, costs(of, layout, self.speeds, self.links)
        return self._costs[key]

    def stages(self, layout: Layout) -> list[Cost]:
        """Cost of each pipeline stage."""
        _, found = self.parts(layout)
        number = layout.pp * layout.vp
        split = self.split(layout)
        return [found.stage(self.shape, split[s], first=s == 0, last=s == number - 1) for s in range(number)]

    def split(self, layout: Layout) -> list[range]:
        """Layers of each stage."""
        stages = layout.pp * layout.vp
        return split_by_cost(self.shape, stages) if self.stack.split == "cost" else stage_layers(self.shape.layers, stages)

    def held(self, layout: Layout, rank: int) -> Counts:
        """Elements that a pipeline rank holds."""
        split, own = self.split(layout), own_stages(layout, rank)
        number = len(split)
        first, last = 0 in own, number - 1 in own
        layers = [layer for stage in own for layer in split[stage]]
        if self.shape.moe and self.shape.moe.first_dense > 0:
            dense = sum(layer < self.shape.moe.first_dense for layer in layers)
            span = range(self.shape.moe.first_dense - dense, self.shape.moe.first_dense - dense + len(layers))
        else:
            span = range(len(layers))
        return counts(self.shape, layout, span, first=first, last=last)

    def predict(self, plan: Plan) -> Prediction:
        """Memory and time of a legal plan of this shape, recipe and cluster."""
        layout, recipe = plan.layout, self.recipe
        m = layout.micro_batches(recipe.global_batch)
        of, found = self.parts(layout)
        stages = self.stages(layout)
        memory, reduce_s, gather_s, update_s = [], 0.0, 0.0, 0.0
        for rank in range(layout.pp):
            count = self.held(layout, rank)
            state = states(self.stack, layout, recipe.precision, count)
            memory.append(self._memory(layout, m, stages, state, rank, of, count))
            reduced, gathered = data_parallel_seconds(layout, self.stack, self.links, count, state)
            reduce_s, gather_s = max(reduce_s, reduced), max(gather_s, gathered)
            update_s = max(update_s, update_seconds(self.speeds, count, recipe.precision == "fp32"))
        send_s = self._send_s(layout, of)
        time = step_time(layout, self.stack, m, self._with_sends(layout, stages, send_s), send_s, reduce_s, gather_s,
                         update_s, shared_links(layout, self.links))  # fmt: skip
        peak = self.cluster.device.bf16_flop_per_s or self.speeds.peak_flop_per_s
        return Prediction(plan=plan, stack=self.stack, time=time, memory=tuple(memory), peak_flop_per_s=peak)

    def _send_s(self, layout: Layout, of: Local) -> float:
        if layout.pp == 1:
            return 0.0
        return self.links.send_seconds(of.between_bytes, ranks_of(layout, "pp")[1])

    def _with_sends(self, layout: Layout, stages: list[Cost], send_s: float) -> list[Cost]:
        """What of the transfers no computation hides stands in both neighbours' time."""
        shown = send_s * (1 - self.stack.hides_sends) + (self.stack.send_s if layout.pp > 1 else 0.0)
        if not shown:
            return stages
        return [c.plus(Cost(forward_s=shown, input_s=shown, exchange_s=2 * shown)) for c in stages]

    def _memory(
        self, layout: Layout, m: int, stages: list[Cost], state: States, rank: int, of: Local, count: Counts
    ) -> RankMemory:
        layer = counts(self.shape, layout, range(1), first=False, last=False) if layout.zero == 3 else None
        return rank_memory(
            layout, self.stack, m, stages, state, rank,
            unit_bytes=layer.gathered * state.parameter_bytes if layer else 0.0,
            unit_gradient_bytes=layer.gathered * state.gradient_bytes if layer else 0.0,
            border_bytes=of.between_bytes,
            update_bytes=count.own * self.stack.update_bytes,
        )  # fmt: skip


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
