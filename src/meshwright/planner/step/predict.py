"""Predictor of memory, traffic and time of one layout, by counting."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.planner.cost.exchanges import Links, links_of
from meshwright.planner.cost.speeds import Speeds, planned_speeds
from meshwright.planner.cost.stack import MESHWRIGHT, Stack, on_gpu
from meshwright.planner.cost.states import ElementCounts, States, states
from meshwright.planner.memory.engine_peak import GatherUnits
from meshwright.planner.memory.rank_memory import RankMemory, rank_memory
from meshwright.planner.step.prediction import Prediction, executions, likely_share, uncompiled_because, usable_bytes
from meshwright.planner.step.shared_costs import (
    SharedCosts,
    before_step,
    held_bytes,
    least_ahead_s,
    teachers_recipe,
    with_cache,
    with_states,
)
from meshwright.planner.time.collectives import Sharing, StageContents
from meshwright.planner.time.timeline import StepTime, Unhidden, shared_links, step_time, unhidden
from meshwright.planner.time.update_passes import MatrixCosts, layer_matrices, optimizer_seconds
from meshwright.spec.layout.cluster import Cluster
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule import V_PLACED
from meshwright.spec.memory.held import TOKEN_BYTES, written_bytes
from meshwright.spec.memory.matrix_exchange import WORK_BYTES
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.weights.boxes import WORK_BYTES as NARROW_BYTES

POSITION_BYTES = 8
"""Bytes of a position alone, int64, or with the number of its document, int32 each."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Predictor of the layouts of one model, recipe and cluster."""

    costs: SharedCosts
    cluster: Cluster
    run_steps: int = 0
    """Steps of the run. 0 = as a plan's recipe says."""
    shape: ModelShape = field(init=False)
    recipe: Recipe = field(init=False)
    stack: Stack = field(init=False)
    speeds: Speeds = field(init=False)
    links: Links = field(init=False)

    def __post_init__(self) -> None:
        """Take over what is read most from the costs."""
        for name in ("shape", "recipe", "stack", "speeds", "links"):
            # The dataclass is frozen, and a property for each would cost time in a search.
            object.__setattr__(self, name, getattr(self.costs, name))

    def on_nodes(self, nodes: int) -> "Estimator":
        """Return the same costs on another number of nodes."""
        return replace(self, cluster=replace(self.cluster, nodes=nodes))

    @cached_property
    def largest_share(self) -> float:
        """Share of the usable memory up to which a plan is recommended."""
        return likely_share(self.stack, routed=self.shape.moe is not None, nodes=self.cluster.nodes)

    @property
    def chooses_execution(self) -> bool:
        """True if plans may leave open how their passes run."""
        return self.costs.gpu and self.stack.is_meshwright

    def search_plan(self, plan: Plan) -> Plan:
        """Return the plan as the search counts it.

        It is uncompiled if nothing can be compiled. Otherwise open layouts count as compiled, which takes less memory.
        """
        never = self.chooses_execution and uncompiled_because(plan)
        return replace(plan, layout=replace(plan.layout, compile="off")) if never else plan

    def predict(self, plan: Plan) -> Prediction:
        """Return memory and time of a legal plan of this shape, recipe and cluster."""
        ways = None
        if self.chooses_execution:
            ways = executions(plan, self.measure, usable_bytes(plan), self.largest_share, self.run_steps)
        time, memory = (ways.best.time, ways.best.memory) if ways else self.measure(plan.layout)
        peak = max(self.cluster.device.half_flop_per_s or self.speeds.peak_flop_per_s, self.speeds.reached_flop_per_s)
        return Prediction(plan=plan, stack=self.stack, time=time, memory=memory, peak_flop_per_s=peak,
                          document_tokens=self.costs.document_tokens, executions=ways)  # fmt: skip

    def measure(self, layout: Layout, *, exact: bool = True) -> tuple[StepTime, tuple[RankMemory, ...]]:
        """Return the time of a step and the memory of every pipeline rank.

        Without `exact`, the schedule is not played and only the ranks likely to be fullest are counted. Neither figure
        then exceeds the exact one.
        """
        ranks = range(layout.pp) if exact else self.likely_fullest(layout)
        return self.time(layout, exact=exact), self.memory(layout, ranks, exact=exact)

    def time(self, layout: Layout, *, exact: bool = True) -> StepTime:
        """Return the time of a step."""
        costs, recipe = self.costs, self.recipe
        m, terms = layout.micro_batches(recipe.global_batch), costs.pass_terms(layout)
        shared_s, update_s, muon_s = Sharing(), 0.0, 0.0
        ranks = costs.ranks(layout)
        # Ranks of one kind cost the same, so one of each kind is counted.
        for rank in {kind: rank for rank, kind in enumerate(ranks)}.values():
            count = costs.held(layout, rank)
            state = self.states(layout, count, m)
            shared_s = shared_s.worst(self._sharing(layout, costs.contents(layout, rank), state))
            update_s = max(update_s, optimizer_seconds(self.speeds, self.stack, recipe, layout, count, state, m))
            if self.matrices is not None:
                muon_s = max(muon_s, self.matrices.seconds(layout, *ranks[rank][:2]))
        send_s = costs.send_s(layout)
        shown = costs.with_sends(layout, costs.stages(layout, terms), send_s)
        step = step_time(
            layout, costs.launched_stack(layout), m, shown, costs.busy_s(layout, terms, send_s), shared_s, update_s,
            muon_s, shared_links(layout, self.links), costs.passes_s(layout, m, terms, send_s, exact=exact),
            costs.edges(layout), self.speeds.ranks_per_core,
        )  # fmt: skip
        # A teacher's passes are not part of the schedule: they run in front of it.
        return step if costs.teacher is None else before_step(costs.teacher, step, layout, m)

    def _sharing(self, layout: Layout, contents: StageContents, state: States) -> Sharing:
        summed = self.stack.gradient_exchange_bytes or state.gradient_bytes
        return self.costs.sharing(layout, contents, state.parameter_bytes, summed)

    def least_sharing(self, layout: Layout, layers: tuple[int, int], m: int) -> tuple[Sharing, float]:
        """Return lower bounds of the seconds of data parallelism and of the optimizer.

        The rank holds at least `layers` (dense, routed). Without a pipeline it holds all.
        """
        # A middle rank holds neither embedding nor head, so with a pipeline the bound counts neither.
        ends = layout.pp == 1
        shared, update_s = [], []
        # The cheapest choice of equally many layers keeps this a lower bound.
        for alike in self.costs.layers_alike(*layers):
            count = self.costs.counted(layout, alike, ends)
            state = self.states(layout, count, m)
            shared.append(self._sharing(layout, StageContents(alike, ends, ends), state))
            update_s.append(optimizer_seconds(self.speeds, self.stack, self.recipe, layout, count, state, m))
        muon_s = 0.0 if self.matrices is None else self.matrices.least_s(layout, *layers)
        return Sharing(*map(min, zip(*shared, strict=True))), min(update_s) + muon_s

    def unhidden(self, layout: Layout, m: int, sharing: Sharing, update_s: float) -> Unhidden:
        """Return what these add to a step, whatever its passes are."""
        return unhidden(layout, self.costs.launched_stack(layout), m, sharing, update_s, self.costs.edges(layout))

    def least_teacher_s(self, layout: Layout, m: int) -> float:
        """Return a lower bound of a teacher's passes in a step. 0 without a teacher."""
        teacher = self.costs.teacher
        return 0.0 if teacher is None else least_ahead_s(teacher, layout, m)

    def least_s(self, layout: Layout) -> float:
        """Return a lower bound of the step time over all splits of data parallelism with the same passes."""
        costs, m = self.costs, layout.micro_batches(self.recipe.global_batch)
        passes_s = costs.passes_s(layout, m, costs.pass_terms(layout), costs.send_s(layout), exact=False)
        if layout.pp > 1:
            passes_s /= max(1.0, self.speeds.ranks_per_core)
        stack = costs.launched_stack(layout)
        return passes_s + stack.step_s + m * stack.micro_batch_s

    def memory(self, layout: Layout, ranks: Iterable[int], *, exact: bool = True) -> tuple[RankMemory, ...]:
        """Return the memory of these pipeline ranks in the largest steps of the recipe."""
        # A ramp's largest batch has the most micro-batches in flight.
        if self.recipe.batch_ramp:
            return self._largest.memory(layout, ranks, exact=exact)
        costs, recipe, teacher = self.costs, self.recipe, self.costs.teacher
        m, terms = layout.micro_batches(recipe.global_batch), costs.pass_terms(layout)
        stages = costs.stages(layout, terms)
        local, _ = costs.blocks(layout)
        summed = not self.shape.moe and costs.sums_products(layout, m)
        vocab_ranks = local.tp if self.stack.vocab_parallel else 1
        logits_bytes = local.tokens * self.shape.vocab * local.width / vocab_ranks
        memories = []
        for rank in ranks:
            count = costs.held(layout, rank)
            state = self.states(layout, count, m)
            if teacher is not None:
                for kinds in (state.step, state.update):
                    # A ZeRO-3 teacher in a pipeline keeps shards and is gathered only for its own passes.
                    kind = "shards" if layout.zero == 3 and layout.pp > 1 else "parameters"
                    kinds[kind] += held_bytes(teacher, layout, rank)
            if recipe.noise_scale_every:  # each micro-batch's gradients exist in addition to the sum of earlier ones
                state.step["gradients"] *= 2
            memory = rank_memory(
                layout, self.stack, m, stages, state, rank,
                gathered_bytes=0.0 if self.stack.is_meshwright else self._gathered(layout, state),
                border_bytes=local.between_bytes,
                update_bytes=self.update_bytes(layout, rank, count, state),
                exact=exact,
                logits_bytes=logits_bytes,
                units=self._units(layout, state) if self.stack.is_meshwright else None,
                fullest=costs.moments(layout, m, terms, rank, exact) if self.stack.is_meshwright else (),
                sums_products=summed,
            )  # fmt: skip
            if teacher is not None:
                memory = with_cache(with_states(teacher, memory, layout, rank, m), self.shape, recipe, layout)
            memories.append(
                memory if costs.gpu else replace(memory, kinds={**memory.kinds, **self._host_kinds(layout, rank)})
            )
        return tuple(memories)

    def states(self, layout: Layout, count: ElementCounts, m: int) -> States:
        """Return the states of a pipeline rank's elements, in steps of `m` micro-batches."""
        recipe = self.recipe
        return states(self.stack, layout, recipe.precision, count, m, recipe.reduce_dtype, storage=recipe.storage)

    def _host_kinds(self, layout: Layout, rank: int) -> dict[str, float]:
        """Return what a CPU's memory holds in addition to the program's tensors.

        The tokens of this and the next step, and the copy from which a thread writes checkpoints. On a GPU tokens are
        less than a thousandth.
        """
        recipe = self.recipe
        each = TOKEN_BYTES + POSITION_BYTES * (layout.cp > 1 or recipe.document_mask)
        tokens = 2 * recipe.global_batch // layout.dp * recipe.sequence // layout.cp * each
        first = rank * (layout.world // layout.pp)
        copied = layout.saves_behind("cpu") and recipe.saves_between
        staging = written_bytes(self.shape, layout, recipe.precision, first, storage=recipe.storage) if copied else 0
        return {"tokens": float(tokens), "staging": float(staging)}

    def with_recipe(self, recipe: Recipe) -> "Estimator":
        """Return an estimator of another recipe. It shares no answers, since any of them may depend on the recipe."""
        return replace(self, costs=replace(self.costs, recipe=recipe))

    @cached_property
    def _largest(self) -> "Estimator":
        return self.with_recipe(self.recipe.largest)

    def likely_fullest(self, layout: Layout) -> list[int]:
        """Return the ranks among which the highest peak is likely.

        They are both ends and the first with the most layers. Among layers, routed ones count more.
        """
        kinds = [(routed, dense + routed) for dense, routed, *_ in self.costs.ranks(layout)]
        return sorted({0, kinds.index(max(kinds)), layout.pp - 1})

    def fullest_candidates(self, layout: Layout) -> list[int]:
        """Return the ranks that no other can exceed.

        Of ranks with equal layers it is the first, which has most in flight, unless the stages lie in a V.
        """
        if layout.schedule in V_PLACED:
            return list(range(layout.pp))
        kinds = self.costs.ranks(layout)
        return [rank for rank, kind in enumerate(kinds) if kind not in kinds[:rank]]

    def update_bytes(self, layout: Layout, rank: int, count: ElementCounts, state: States) -> float:
        """Return the bytes of temporaries of the optimizer step.

        fp32 gradients are not widened. That is counted only with CUDA graphs, where this moment is often the fullest.
        """
        matrices = self.matrices.buffer_bytes(layout, *self.costs.ranks(layout)[rank][:2]) if self.matrices else 0.0
        wide = layout.cuda_graphs == "on" and state.gradient_bytes == 4 and not self.recipe.storage.narrow
        each = 0.0 if wide else self.widened_bytes
        return max(matrices, min(count.updated * each, self.stack.update_bucket_bytes))

    @cached_property
    def matrices(self) -> MatrixCosts | None:
        """Costs of Muon, if the recipe uses it."""
        if self.recipe.optimizer != "muon":
            return None
        return MatrixCosts(
            shape=self.shape, width=WORK_BYTES[self.recipe.precision], speeds=self.speeds, links=self.links,
            layers=layer_matrices(self.shape, self.recipe.precision, self.speeds),
        )  # fmt: skip

    @property
    def widened_bytes(self) -> float:
        """Bytes per element of temporaries: narrow states, or a 16-bit gradient that AdamW cannot read, in fp32."""
        if self.recipe.storage.narrow:
            return float(NARROW_BYTES)
        return 4.0 if self.recipe.precision != "fp32" and not (self.stack.is_meshwright and self.costs.gpu) else 0.0

    def _units(self, layout: Layout, state: States) -> GatherUnits:
        return self.costs.units(layout, state.parameter_bytes, state.gradient_bytes)

    def _gathered(self, layout: Layout, state: States) -> float:
        """Return the bytes that ZeRO-3 of other software holds gathered.

        The ends stay whole from the first forward to the last backward pass. In addition there are two blocks, since
        the next is gathered early, and one block's gradients with the buffer from which they are reduced.
        """
        if layout.dp * layout.cp == 1 or layout.zero < 3 or (layout.pp > 1 and self.stack.sharding != "flat"):
            return 0.0
        units = self._units(layout, state)
        ends = units.first.parameters + units.last.parameters * (not units.tied)
        return 2 * units.block.parameters + 2 * units.block.gradients + ends


def build_estimator(
    plan: Plan, stack: Stack = MESHWRIGHT, speeds: Speeds | None = None, links: Links | None = None,
    document_tokens: float = 0.0,
) -> Estimator:  # fmt: skip
    """Return the estimator of a plan's model, recipe and cluster.

    Speeds and links default to the cluster's data sheet. `document_tokens`: as in SharedCosts.
    """
    stack = on_gpu(stack) if plan.cluster.device.is_gpu and speeds is None else stack
    listed = planned_speeds(stack, plan)
    speeds, links = speeds or (listed.in_tf32() if plan.recipe.tf32 else listed), links or links_of(plan.cluster)

    teacher = None
    if plan.online_teacher is not None:
        teacher = SharedCosts(
            shape=plan.online_teacher, recipe=teachers_recipe(plan.recipe), device=plan.cluster.device, stack=stack,
            speeds=speeds, links=links, document_tokens=document_tokens,
        )  # fmt: skip
    costs = SharedCosts(
        shape=plan.model, recipe=plan.recipe, device=plan.cluster.device, stack=stack, speeds=speeds, links=links,
        document_tokens=document_tokens, teacher=teacher,
    )  # fmt: skip
    return Estimator(costs=costs, cluster=plan.cluster)


def predict(plan: Plan, stack: Stack = MESHWRIGHT, document_tokens: float = 0.0) -> Prediction:
    """Predict the cost of a legal plan."""
    return build_estimator(plan, stack, document_tokens=document_tokens).predict(plan)
