"""Predictor of memory, traffic and time of one layout, by counting."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.planner.cost.block_time import ranks_of
from meshwright.planner.cost.engine_speeds import planned_speeds
from meshwright.planner.cost.links import Links, links_of
from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.stack import MESHWRIGHT, Stack, on_gpu
from meshwright.planner.cost.states import ElementCounts, States, number_of_kinds, states
from meshwright.planner.memory.engine_peak import MomentBytes, fullest_moments, moments
from meshwright.planner.memory.rank_memory import RankMemory, first_backward, rank_memory
from meshwright.planner.step.execution import executions
from meshwright.planner.step.prediction import Prediction
from meshwright.planner.step.shared_costs import SharedCosts
from meshwright.planner.step.teacher_costs import (
    before_step,
    held_bytes,
    least_ahead_s,
    pass_cost,
    teachers_recipe,
    with_cache,
    with_states,
)
from meshwright.planner.time.collectives import Sharing, StageContents, sharing
from meshwright.planner.time.matrix_costs import MatrixCosts, layer_matrices
from meshwright.planner.time.timeline import (
    StepTime,
    Unhidden,
    busy_s,
    least_s,
    pipeline_s,
    shared_links,
    step_time,
    unhidden,
)
from meshwright.planner.time.update_passes import optimizer_seconds
from meshwright.spec.layout.layout import Layout, own_stages
from meshwright.spec.layout.schedule import V_PLACED
from meshwright.spec.memory.held import TOKEN_BYTES, written_bytes
from meshwright.spec.memory.matrix_exchange import WORK_BYTES
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.rules.quantized_weights import shares_codes
from meshwright.spec.weights.boxes import WORK_BYTES as NARROW_BYTES

Kinds = tuple[tuple[str, int], ...]
"""Layers of each kind: states.number_of_kinds."""
POSITION_BYTES = 8
"""Bytes of a position alone, int64, or with the number of its document, int32 each."""


@dataclass(frozen=True, kw_only=True)
class Estimator(SharedCosts):
    """Predictor of the layouts of one model, recipe and cluster."""

    def _sharing(self, layout: Layout, state: States, rank: int) -> Sharing:
        """Return the seconds of data parallelism of a pipeline rank."""
        return self._sharing_of(layout, state, *self._contents(layout, rank))

    def _sharing_of(self, layout: Layout, state: States, held: StageContents, kinds: Kinds) -> Sharing:
        """Return the same of a rank that holds these layers, counted by kind."""
        degrees = layout.tp, layout.cp, layout.ep, layout.dp_replicate, layout.dp_shard, layout.zero
        summed = self.stack.gradient_exchange_bytes or state.gradient_bytes
        key = *degrees, shares_codes(layout), kinds, held.first, held.last, summed
        if key not in self._known.sums:
            self._known.sums[key] = sharing(
                self.shape, layout, held, self.links, state.parameter_bytes, summed, self.stack.sharding == "flat"
            )
        return self._known.sums[key]

    def _contents(self, layout: Layout, rank: int) -> tuple[StageContents, Kinds]:
        """Return what a pipeline rank holds, and how many of its layers are of each kind."""
        stages = own_stages(layout, rank)
        key = layout.pp, layout.vp, layout.stages, stages
        if key not in self._known.contents:
            contents = StageContents.from_stages(stages, self.split(layout))
            self._known.contents[key] = contents, number_of_kinds(self.shape, contents.layers)
        return self._known.contents[key]

    def predict(self, plan: Plan) -> Prediction:
        """Return memory and time of a legal plan of this shape, recipe and cluster."""
        ways = executions(plan, self.measure, *self._limits(plan), self.run_steps) if self.chooses_execution else None
        time, memory = (ways.best.time, ways.best.memory) if ways else self.measure(plan.layout)
        peak = max(self.cluster.device.half_flop_per_s or self.speeds.peak_flop_per_s, self.speeds.reached_flop_per_s)
        return Prediction(plan=plan, stack=self.stack, time=time, memory=memory, peak_flop_per_s=peak,
                          document_tokens=self.document_tokens, executions=ways)  # fmt: skip

    def measure(self, layout: Layout, *, exact: bool = True) -> tuple[StepTime, tuple[RankMemory, ...]]:
        """Return the time of a step and the memory of every pipeline rank.

        Without `exact`, the schedule is not played and only the ranks likely to be fullest are counted. Neither figure
        then exceeds the exact one.
        """
        ranks = range(layout.pp) if exact else self.likely_fullest(layout)
        return self.time(layout, exact=exact), self.memory(layout, ranks, exact=exact)

    def time(self, layout: Layout, *, exact: bool = True) -> StepTime:
        """Return the time of a step."""
        recipe, stages = self.recipe, self.stages(layout)
        m = layout.micro_batches(recipe.global_batch)
        shared_s, update_s, muon_s, of_update = Sharing(), 0.0, 0.0, (self.speeds, self.stack, recipe)
        ranks = self._ranks(layout)
        # ranks of one kind cost the same, so one of each kind is counted
        for rank in {kind: rank for rank, kind in enumerate(ranks)}.values():
            count = self.held(layout, rank)
            state = self.states(layout, count, m)
            shared_s = shared_s.worst(self._sharing(layout, state, rank))
            update_s = max(update_s, optimizer_seconds(*of_update, layout, count, state, m))
            if self.matrices is not None:
                muon_s = max(muon_s, self.matrices.seconds(layout, *ranks[rank][:2]))
        send_s = self.send_s(layout)
        shown = self._with_sends(layout, stages, send_s)
        # the key leaves out the split of dp, which changes no pass
        key = (*self._stages_key(layout), layout.schedule, m, send_s)
        passes_s = self._passes_s(layout, m, shown, send_s, exact, key)
        # the search asks for all splits of a pipeline in turn, so one cached pipeline is enough
        if self._known.busy[0] != key:
            self._known.busy = key, busy_s(layout, shown)
        shared = shared_links(layout, self.links)
        edges = self._edges(layout)
        stack = self._launched_stack(layout)
        step = step_time(layout, stack, m, shown, self._known.busy[1], shared_s, update_s, muon_s, shared,
                        passes_s, edges, self.speeds.ranks_per_core)  # fmt: skip
        # a teacher's passes are not part of the schedule: they run in front of it
        return step if self.teacher is None else before_step(self.teacher, step, layout, m)

    def least_sharing(self, layout: Layout, layers: tuple[int, int], m: int) -> tuple[Sharing, float]:
        """Return lower bounds of the seconds of data parallelism and of the optimizer.

        The rank holds at least `layers` (dense, routed). Without a pipeline it holds all.
        """
        # a middle rank holds neither embedding nor head, so with a pipeline the bound counts neither
        ends = layout.pp == 1
        shared, update_s = [], []
        # the cheapest choice of equally many layers keeps this a lower bound
        for alike in self.layers_alike(*layers):
            count = self.counted(layout, alike, ends=ends)
            contents, kinds = StageContents(alike, ends, ends), number_of_kinds(self.shape, alike)
            state = self.states(layout, count, m)
            shared.append(self._sharing_of(layout, state, contents, kinds))
            update_s.append(optimizer_seconds(self.speeds, self.stack, self.recipe, layout, count, state, m))
        muon_s = 0.0 if self.matrices is None else self.matrices.least_s(layout, *layers)
        return Sharing(*map(min, zip(*shared, strict=True))), min(update_s) + muon_s

    def unhidden(self, layout: Layout, m: int, sharing: Sharing, update_s: float) -> Unhidden:
        """Return what these add to a step, whatever its passes are."""
        return unhidden(layout, self._launched_stack(layout), m, sharing, update_s, self._edges(layout))

    def least_teacher_s(self, layout: Layout, m: int) -> float:
        """Return a lower bound of a teacher's passes in a step. 0 without a teacher."""
        return 0.0 if self.teacher is None else least_ahead_s(self.teacher, layout, m)

    def least_s(self, layout: Layout) -> float:
        """Return a lower bound of the step time over all splits of data parallelism with the same passes."""
        m = layout.micro_batches(self.recipe.global_batch)
        send_s = self.send_s(layout)
        shown = self._with_sends(layout, self.stages(layout), send_s)
        key = (*self._stages_key(layout), layout.schedule, m, send_s)
        passes_s = self._passes_s(layout, m, shown, send_s, False, key)
        if layout.pp > 1:
            passes_s /= max(1.0, self.speeds.ranks_per_core)
        stack = self._launched_stack(layout)
        return passes_s + stack.step_s + m * stack.micro_batch_s

    def _passes_s(
        self, layout: Layout, m: int, stages: list[MicroBatchCost], send_s: float, exact: bool, key: tuple[object, ...]
    ) -> float:
        """Return the seconds of all passes of a step.

        Played schedules are cached, since all splits of dp play the same.
        """
        # without a pipeline the closed form is exact
        if not exact or layout.pp == 1:
            if key not in self._known.least:
                self._known.least[key] = least_s(layout.schedule, layout.pp, layout.vp, m, stages, send_s)
            return self._known.least[key]
        if key not in self._known.played:
            self._known.played[key] = pipeline_s(layout, m, stages, send_s)
        return self._known.played[key]

    def memory(self, layout: Layout, ranks: Iterable[int], *, exact: bool = True) -> tuple[RankMemory, ...]:
        """Return the memory of these pipeline ranks in the largest steps of the recipe."""
        # a ramp's largest batch has the most micro-batches in flight
        if self.recipe.batch_ramp:
            return self._largest.memory(layout, ranks, exact=exact)
        recipe, stages = self.recipe, self.stages(layout)
        m = layout.micro_batches(recipe.global_batch)
        local, _ = self.parts(layout)
        summed = not self.shape.moe and self.sums_products(layout, m)
        vocab_ranks = local.tp if self.stack.vocab_parallel else 1
        logits_bytes = local.tokens * self.shape.vocab * local.width / vocab_ranks
        memories = []
        for rank in ranks:
            count = self.held(layout, rank)
            state = self.states(layout, count, m)
            if self.teacher is not None:
                for kinds in (state.step, state.update):
                    # a ZeRO-3 teacher in a pipeline keeps shards and is gathered only for its own passes
                    kind = "shards" if layout.zero == 3 and layout.pp > 1 else "parameters"
                    kinds[kind] += held_bytes(self.teacher, layout, rank)
            if recipe.noise_scale_every:  # each micro-batch's gradients exist beside the sum of earlier ones
                state.step["gradients"] *= 2
            memory = rank_memory(
                layout, self.stack, m, stages, state, rank,
                gathered_bytes=0.0 if self.stack.is_meshwright else self._gathered(layout, state),
                border_bytes=local.between_bytes,
                update_bytes=self.update_bytes(layout, rank, count, state),
                exact=exact,
                logits_bytes=logits_bytes,
                units=self.units(layout, state) if self.stack.is_meshwright else None,
                fullest=self._moments(layout, m, stages, rank, exact) if self.stack.is_meshwright else (),
                sums_products=summed,
            )  # fmt: skip
            if self.teacher is not None:
                memory = with_cache(with_states(self.teacher, memory, layout, rank, m), self.shape, recipe, layout)
            memories.append(
                memory if self._gpu else replace(memory, kinds={**memory.kinds, **self._host_kinds(layout, rank)})
            )
        return tuple(memories)

    def states(self, layout: Layout, count: ElementCounts, m: int) -> States:
        """Return the states of a pipeline rank's elements, in steps of `m` micro-batches."""
        recipe = self.recipe
        return states(self.stack, layout, recipe.precision, count, m, recipe.reduce_dtype, storage=recipe.storage)

    def _teacher_cost(self, layout: Layout) -> MicroBatchCost:
        assert self.teacher is not None, "asked where there is one"
        return pass_cost(self.teacher, layout)

    def _host_kinds(self, layout: Layout, rank: int) -> dict[str, float]:
        """Return what a CPU's memory holds beside the program's tensors.

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

    @cached_property
    def _largest(self) -> "Estimator":
        return replace(self, recipe=self.recipe.largest)

    def likely_fullest(self, layout: Layout) -> list[int]:
        """Return the ranks among which the highest peak is likely.

        They are both ends and the first with the most layers. Among layers, routed ones count more.
        """
        kinds = [(routed, dense + routed) for dense, routed, *_ in self._ranks(layout)]
        return sorted({0, kinds.index(max(kinds)), layout.pp - 1})

    def fullest_candidates(self, layout: Layout) -> list[int]:
        """Return the ranks that no other can exceed.

        Of ranks with equal layers it is the first, which has most in flight, unless the stages lie in a V.
        """
        if layout.schedule in V_PLACED:
            return list(range(layout.pp))
        kinds = self._ranks(layout)
        return [rank for rank, kind in enumerate(kinds) if kind not in kinds[:rank]]

    def send_s(self, layout: Layout) -> float:
        """Return the seconds of what a stage sends to the next for one micro-batch."""
        if layout.pp == 1:
            return 0.0
        local, _ = self.parts(layout)
        return self.links.send_seconds(local.between_bytes, ranks_of(layout, "pp")[1], layout.pp)

    def _with_sends(self, layout: Layout, stages: list[MicroBatchCost], send_s: float) -> list[MicroBatchCost]:
        """Return the stages with the transfers that no computation hides, which cost both neighbours time."""
        shown = send_s * (1 - self.stack.hides_sends) + (self.stack.send_s if layout.pp > 1 else 0.0)
        if not shown:
            return stages
        return [c.plus(MicroBatchCost(forward_s=shown, input_s=shown, exchange_s=2 * shown)) for c in stages]

    def _moments(
        self, layout: Layout, m: int, stages: list[MicroBatchCost], rank: int, exact: bool
    ) -> tuple[MomentBytes, ...]:
        """Return the fullest moments of a rank's schedule.

        They are equal for all splits of data parallelism, except those that reduce each micro-batch at once.
        """
        # from ZeRO-2 on gradients of each micro-batch are reduced at once, which frees them earlier
        key = (*self._stages_key(layout), layout.schedule, layout.zero >= 2, m, rank, exact)
        if key not in self._known.moments:
            exact, rank_stages = exact or layout.pp == 1, own_stages(layout, rank)
            instants = moments(layout, m, rank) if exact else (first_backward(layout, m, rank),)
            shares = self.stage_shares(layout, rank_stages)
            self._known.moments[key] = fullest_moments(instants, [stages[stage] for stage in rank_stages], shares)
        return self._known.moments[key]

    def update_bytes(self, layout: Layout, rank: int, count: ElementCounts, state: States) -> float:
        """Return the bytes of temporaries of the optimizer step.

        fp32 gradients are not widened. That is counted only with CUDA graphs, where this moment is often the fullest.
        """
        matrices = self.matrices.buffer_bytes(layout, *self._ranks(layout)[rank][:2]) if self.matrices else 0.0
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
        return 4.0 if self.recipe.precision != "fp32" and not (self.stack.is_meshwright and self._gpu) else 0.0

    def _gathered(self, layout: Layout, state: States) -> float:
        """Return the bytes that ZeRO-3 of other software holds gathered.

        The ends stay whole from the first forward to the last backward pass. Beside them are two blocks, since the next
        is gathered early, and one block's gradients with the buffer from which they are reduced.
        """
        if layout.dp * layout.cp == 1 or layout.zero < 3 or (layout.pp > 1 and self.stack.sharding != "flat"):
            return 0.0
        units = self.units(layout, state)
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

    def build(shape: ModelShape, recipe: Recipe, teacher: Estimator | None = None) -> Estimator:
        return Estimator(
            shape=shape, recipe=recipe, cluster=plan.cluster, stack=stack, speeds=speeds, links=links, teacher=teacher,
            document_tokens=document_tokens,
        )  # fmt: skip

    beside = None if plan.online_teacher is None else build(plan.online_teacher, teachers_recipe(plan.recipe))
    return build(plan.model, plan.recipe, beside)


def predict(plan: Plan, stack: Stack = MESHWRIGHT, document_tokens: float = 0.0) -> Prediction:
    """Predict the cost of a legal plan."""
    return build_estimator(plan, stack, document_tokens=document_tokens).predict(plan)
