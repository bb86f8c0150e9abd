"""Costs shared by the layouts of one model, recipe and cluster, each counted once."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from meshwright.planner.cost.links import Links
from meshwright.planner.cost.local_shape import LocalShape, local_shape
from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.cost.rounded_weights import with_rounded_weights
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.stack import MESHWRIGHT, Stack, eager, graphed
from meshwright.planner.cost.stage_costs import (
    Costs,
    CostsByPolicy,
    FirstHalves,
    Policies,
    StageKind,
    costs,
    split_by_cost,
)
from meshwright.planner.cost.states import ElementCounts, States, counts, layer_kinds
from meshwright.planner.memory.engine_peak import MomentBytes
from meshwright.planner.memory.gather_units import GatherUnits, gather_units
from meshwright.planner.step.error_ranges import likely_share
from meshwright.planner.step.execution import uncompiled_because
from meshwright.planner.step.prediction import usable_bytes
from meshwright.planner.time.collectives import Sharing, StageContents
from meshwright.planner.time.timeline import UNKNOWN, Edges
from meshwright.spec.layout.cluster import Cluster
from meshwright.spec.layout.layout import Layout, layers_of_stages
from meshwright.spec.layout.schedule import SPLIT_ALWAYS, stages_of_ranks
from meshwright.spec.memory.buffers import CHUNK_BYTES
from meshwright.spec.memory.held import WIDTHS, adds_gradients
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.rules.compilation import can_be_compiled
from meshwright.spec.rules.quantized_weights import shares_codes

KEPT = 1000
"""Most layouts, apart from their data parallelism, whose stages stay cached."""


@dataclass(slots=True)
class Memo:
    """Cache of an estimator. Layouts share most of what it counts.

    A key contains everything that its entry depends on. A test changes each field of a layout and compares entries of
    equal keys.
    """

    stacks: dict[tuple[object, ...], Stack] = field(default_factory=dict)
    parts: dict[tuple[object, ...], tuple[LocalShape, CostsByPolicy]] = field(default_factory=dict)
    blocks: dict[tuple[object, ...], Policies] = field(default_factory=dict)
    halves: FirstHalves = field(default_factory=FirstHalves)
    counts: dict[tuple[object, ...], ElementCounts] = field(default_factory=dict)
    units: dict[tuple[object, ...], GatherUnits] = field(default_factory=dict)
    contents: dict[tuple[object, ...], tuple[StageContents, tuple[tuple[str, int], ...]]] = field(default_factory=dict)
    """Layers of a pipeline rank, and how many of them are of each kind."""
    sums: dict[tuple[object, ...], Sharing] = field(default_factory=dict)
    shares: dict[tuple[object, ...], Edges] = field(default_factory=dict)
    stages: dict[tuple[object, ...], list[MicroBatchCost]] = field(default_factory=dict)
    moments: dict[tuple[object, ...], tuple[MomentBytes, ...]] = field(default_factory=dict)
    kinds: dict[tuple[object, ...], list[tuple[int, int, bool, bool, tuple[int, ...]]]] = field(default_factory=dict)
    played: dict[tuple[object, ...], float] = field(default_factory=dict)
    splits: dict[tuple[object, ...], list[range]] = field(default_factory=dict)
    stage_kinds: dict[tuple[object, ...], tuple[list[tuple[StageKind, ...]], list[int]]] = field(default_factory=dict)
    least: dict[tuple[object, ...], float] = field(default_factory=dict)
    busy: tuple[tuple[object, ...], tuple[float, ...]] = ((), ())
    """Seconds per rank of the most recent layout."""


@dataclass(frozen=True, kw_only=True)
class SharedCosts:
    """Costs that layouts of one model, recipe and cluster share."""

    shape: ModelShape
    recipe: Recipe
    cluster: Cluster
    stack: Stack = MESHWRIGHT
    speeds: Speeds
    links: Links
    document_tokens: float = 0.0
    """Mean length of the document of a token, so that long ones weigh more. 0 = documents fill their rows."""
    run_steps: int = 0
    """Steps of the run. 0 = as a plan's recipe says."""
    teacher: "SharedCosts | None" = None
    """Costs of a teacher beside the model."""

    @cached_property
    def _known(self) -> Memo:
        return Memo()

    def on_nodes(self, nodes: int) -> Self:
        """Return the same costs on another number of nodes, with the same cache.

        Entries depend on a layout's degrees and on where its ranks lie, and ranks of a group are equally far apart on
        any number of nodes.
        """
        estimator = replace(self, cluster=replace(self.cluster, nodes=nodes))
        estimator.__dict__["_known"] = self._known
        return estimator

    @property
    def _gpu(self) -> bool:
        """True for a described accelerator, or a machine measured as one whose host only launches."""
        return self.cluster.device.is_gpu and self.speeds.host is None

    @cached_property
    def largest_share(self) -> float:
        """Share of the usable memory up to which a plan is recommended."""
        return likely_share(self.stack, routed=self.shape.moe is not None, nodes=self.cluster.nodes)

    def _limits(self, plan: Plan) -> tuple[float, float]:
        """Return (usable bytes of a device, share of them up to which a plan is likely to fit)."""
        return usable_bytes(plan), self.largest_share

    @cached_property
    def may_sum_products(self) -> bool:
        """True if gradient products of some layout may add to sums in place."""
        recipe = self.recipe
        wider = recipe.precision != "fp32" and recipe.reduce_dtype == "fp32"
        return self.stack.sums_products and self._gpu and wider and recipe.products != "fp8-all"

    def sums_products(self, layout: Layout, m: int) -> bool:
        """Return True if gradient products of dense weights add to sums (kernels/linear/gradient_sums.py).

        `m` counts micro-batches of a step. They do not if each micro-batch's gradients are reduced separately, if
        replicas put a step's only gradients into buckets (parallel/axes/data.py), or if compiled blocks compute
        them in their backward passes.
        """
        if not self.may_sum_products or layout.kernels == "reference":
            return False
        # reduced at once, or a step's only gradients: there is no sum to add to
        if layout.pp == 1 and (layout.zero >= 2 or (m == 1 and not layout.zero and layout.cuda_graphs != "on")):
            return False
        # deferred weight gradients are computed outside of compiled code
        late = layout.pp > 1 and layout.schedule in SPLIT_ALWAYS
        if layout.compile != "off" and not late and self._can_compile:
            return False
        return m > 1 or adds_gradients(layout, m)

    @cached_property
    def _can_compile(self) -> bool:
        return can_be_compiled(self.shape, self.recipe.fake_quantize)

    @property
    def chooses_execution(self) -> bool:
        """True if plans may leave open how their passes run."""
        return self._gpu and self.stack.is_meshwright

    def search_plan(self, plan: Plan) -> Plan:
        """Return the plan as the search counts it.

        It is uncompiled if nothing can be compiled. Otherwise open layouts count as compiled, which takes less memory.
        """
        never = self.chooses_execution and uncompiled_because(plan)
        return replace(plan, layout=replace(plan.layout, compile="off")) if never else plan

    def _launched_stack(self, layout: Layout) -> Stack:
        """Return the stack as a layout's code is launched."""
        key = layout.compile, layout.kernels, layout.cuda_graphs
        if key not in self._known.stacks:
            self._known.stacks[key] = self._build_stack(layout)
        return self._known.stacks[key]

    def _build_stack(self, layout: Layout) -> Stack:
        compiles = layout.compile != "off" and can_be_compiled(self.shape, self.recipe.fake_quantize)
        fused = self._gpu and self.cluster.device.runs_triton and layout.kernels not in ("eager", "reference")
        stack = self.stack if compiles or fused else eager(self.stack)
        if stack.is_meshwright and not self.cluster.device.is_gpu:
            stack = replace(stack, head_chunk_bytes=CHUNK_BYTES["cpu"], rounds_in_place=False)
        elif stack.is_meshwright and not self.cluster.device.runs_triton:
            stack = replace(stack, loss_in_place=False, rounds_in_place=False)
        elif stack.is_meshwright and layout.kernels in ("eager", "reference"):
            stack = replace(stack, loss_in_place=False)
        return graphed(stack) if layout.cuda_graphs == "on" and self._gpu else stack

    def _key(self, layout: Layout) -> tuple[object, ...]:
        splits = layout.pp > 1 and layout.schedule in SPLIT_ALWAYS, layout.ep > 1 and layout.splits_backward
        degrees, pieces = (layout.tp, layout.sp, layout.cp, layout.ep), (layout.tp_chunks, layout.ep_chunks)
        alone = layout.tp == layout.cp == layout.ep == layout.pp == 1  # compiled blocks are counted as lowered
        code = alone, layout.compile, layout.kernels, layout.cuda_graphs, layout.context, layout.context_split
        return *degrees, *pieces, *splits, *code, layout.micro_batch_of(self.recipe.global_batch)

    def parts(self, layout: Layout) -> tuple[LocalShape, Costs]:
        """Return the local shape and the costs of the blocks for one micro-batch."""
        local, by_policy = self.blocks(layout)
        return local, by_policy[layout.recompute]

    def policies(self, layout: Layout) -> CostsByPolicy:
        """Return the costs of the blocks under each recompute policy."""
        return self.blocks(layout)[1]

    def blocks(self, layout: Layout) -> tuple[LocalShape, CostsByPolicy]:
        """Return the local shape of a micro-batch, and the costs of its blocks by recompute policy."""
        key = self._key(layout)
        if key not in self._known.parts:
            width = 4 if self.recipe.precision == "fp32" else 2
            recipe, stack = self.recipe, self._launched_stack(layout)
            documents = recipe.document_mask
            local = local_shape(
                self.shape,
                stack,
                layout,
                recipe.sequence,
                layout.micro_batch_of(recipe.global_batch),
                width,
                recipe.dropout,
                documents,
                self._gpu,
                recipe.products,
                recipe.traits.pairs,
                recipe.fake_quantize,
                self.document_tokens,
            )
            self._known.parts[key] = (
                local,
                costs(local, layout, self.speeds, self.links, self._known.blocks, self._known.halves),
            )
        return self._known.parts[key]

    def split(self, layout: Layout) -> list[range]:
        """Return the layers of each stage."""
        key = layout.pp, layout.vp, layout.stages
        if key not in self._known.splits:
            by_cost = self.stack.split == "cost" and not layout.stages
            stages = layout.pp * layout.vp
            self._known.splits[key] = (
                split_by_cost(self.shape, stages) if by_cost else layers_of_stages(self.shape.layers, layout)
            )
        return self._known.splits[key]

    def stages(self, layout: Layout) -> list[MicroBatchCost]:
        """Return the cost of each pipeline stage. Recent layouts stay cached."""
        key = self._stages_key(layout)
        if key not in self._known.stages:
            by_policy = self.policies(layout)
            kinds, kind_numbers = self._stage_kinds(layout)
            kind_costs = []
            for first, *rest in kinds:
                cost = by_policy[layout.recompute].stage(first)
                # the layers that do not recompute come last in the stage
                cost = cost.followed_by(by_policy["none"].stage(rest[0])) if rest else cost
                if layout.offload != "off":
                    cost = self._offloaded(layout, cost, (first, *rest))
                kinds_by_policy = ((layout.recompute, first), *(("none", kind) for kind in rest))
                policies = [(policy, kind.layers - kind.routed, kind.routed) for policy, kind in kinds_by_policy]
                kind_costs.append(with_rounded_weights(cost, self.parts(layout)[0], policies))
            stages = [kind_costs[number] for number in kind_numbers]
            if self.teacher is not None:
                # the loss needs both logits, so the teacher's head runs on the last stage
                stages[-1] = stages[-1].plus(self._teacher_cost(layout))
            # a search meets too many layouts to keep all; moments belong to these stages
            if len(self._known.stages) >= KEPT:
                self._known.stages.clear()
                self._known.moments.clear()
            self._known.stages[key] = stages
        return self._known.stages[key]

    def _teacher_cost(self, layout: Layout) -> MicroBatchCost:
        """Return what a teacher adds to the last stage."""
        raise NotImplementedError

    def _stage_kinds(self, layout: Layout) -> tuple[list[tuple[StageKind, ...]], list[int]]:
        """Return the kinds of pipeline stages, and the kind of each stage.

        A stage of which only the first layers recompute consists of two kinds: those, and the others.
        """
        key = layout.pp, layout.vp, layout.stages, layout.recompute_layers
        if key not in self._known.stage_kinds:
            split = self.split(layout)
            # most stages are alike: each kind is counted once
            kinds: dict[tuple[StageKind, ...], int] = {}
            kind_numbers = []
            for s, layers in enumerate(split):
                cut = min(layout.recompute_layers or len(layers), len(layers))
                first, last = s == 0, s == len(split) - 1
                kind: tuple[StageKind, ...] = (self._stage_kind(layers[:cut], first, last and cut == len(layers)),)
                if cut < len(layers):
                    kind += (self._stage_kind(layers[cut:], False, last),)
                kind_numbers.append(kinds.setdefault(kind, len(kinds)))
            self._known.stage_kinds[key] = list(kinds), kind_numbers
        return self._known.stage_kinds[key]

    def _offloaded(self, layout: Layout, cost: MicroBatchCost, parts: tuple[StageKind, ...]) -> MicroBatchCost:
        """Return a stage with offloading.

        Its last block stays on the device, and so does a pipeline's received input.
        """
        local, _ = self.parts(layout)
        layers = self.policies(layout)["none" if len(parts) > 1 else layout.recompute]
        last = layers.routed if parts[-1].routed else layers.windowed if parts[-1].windowed else layers.dense
        received = 0.0 if parts[0].first else local.between_bytes
        return cost.offloaded(last, received, self.cluster.device.host_bytes_per_s)

    def _stage_kind(self, layers: range, first: bool, last: bool) -> StageKind:
        routed = sum(map(self.shape.is_moe_layer, layers)) if self.shape.moe else 0
        windowed = self.windowed(layers)
        return StageKind(len(layers) - routed - windowed, windowed, routed, first, last)

    def _stages_key(self, layout: Layout) -> tuple[object, ...]:
        again = layout.recompute, layout.recompute_layers, layout.offload
        gathers = layout.dp_shard if self.teacher is not None and layout.zero == 3 else 0  # teacher_costs.pass_cost
        return (*self._key(layout), *again, layout.pp, layout.vp, layout.stages, gathers)

    def windowed(self, layers: range) -> int:
        """Return how many of these dense layers have a window, if others have none."""
        if not self.shape.mixed_windows:
            return 0
        return sum(bool(self.shape.window_of(layer)) and not self.shape.is_moe_layer(layer) for layer in layers)

    @cached_property
    def windowed_layers(self) -> int:
        """Dense layers of the shape that have a window."""
        return self.windowed(range(self.shape.layers))

    def _ranks(self, layout: Layout) -> list[tuple[int, int, bool, bool, tuple[int, ...]]]:
        """Return the kind of each pipeline rank.

        (dense layers, routed layers, has the embedding, has the head, its layers if they have attention of two kinds).
        """
        key = layout.schedule, layout.pp, layout.vp, layout.stages
        if key not in self._known.kinds:
            split, shape = self.split(layout), self.shape
            # two kinds of attention hold different parameters, so equal numbers of layers do not make equal ranks
            mixed = bool(shape.unbuilt and shape.unbuilt.linear)
            routed = [sum(map(shape.is_moe_layer, layers)) if shape.moe else 0 for layers in split]
            self._known.kinds[key] = [
                (sum(len(split[s]) - routed[s] for s in stages), sum(routed[s] for s in stages), 0 in stages,
                 len(split) - 1 in stages, tuple(n for s in stages for n in split[s]) if mixed else ())
                for stages in stages_of_ranks(layout.schedule, layout.pp, layout.vp)
            ]  # fmt: skip
        return self._known.kinds[key]

    def layers_alike(self, dense: int, routed: int) -> list[tuple[int, ...]]:
        """Return layers of which so many are dense and so many routed, all alike, for each kind of layer.

        If they are all layers of the shape, they are returned as they are.
        """
        if dense + routed == self.shape.layers:
            return [tuple(range(dense + routed))]
        kinds = {kind: layer for layer, kind in enumerate(layer_kinds(self.shape))}
        alike: tuple[list[int], list[int]] = ([], [])
        for layer in kinds.values():
            alike[self.shape.is_moe_layer(layer)].append(layer)
        return [(a,) * dense + (b,) * routed for a in alike[False] or [0] for b in alike[True] or [0]]

    @cached_property
    def _by_kind(self) -> tuple[list[int], list[int]]:
        """(dense layers, routed layers)."""
        kinds: tuple[list[int], list[int]] = ([], [])
        for layer in range(self.shape.layers):
            kinds[self.shape.is_moe_layer(layer)].append(layer)
        return kinds

    def held(self, layout: Layout, rank: int) -> ElementCounts:
        """Return the elements that a pipeline rank holds."""
        kind = self._ranks(layout)[rank]
        key = *_sharers(layout), kind
        if key not in self._known.counts:
            dense, routed, first, last, mixed_layers = kind
            kinds = self._by_kind
            layers = mixed_layers or sorted(kinds[False][:dense] + kinds[True][len(kinds[True]) - routed :])
            self._known.counts[key] = counts(
                self.shape, layout, layers, first=first, last=last, storage=self.recipe.storage
            )
        return self._known.counts[key]

    def counted(self, layout: Layout, layers: tuple[int, ...], *, ends: bool) -> ElementCounts:
        """Return the elements of a rank with these layers, with or without embedding and head."""
        key = *_sharers(layout), layers, ends
        if key not in self._known.counts:
            self._known.counts[key] = counts(
                self.shape, layout, layers, first=ends, last=ends, storage=self.recipe.storage
            )
        return self._known.counts[key]

    def stage_shares(self, layout: Layout, stages: tuple[int, ...]) -> tuple[float, ...]:
        """Return each stage's share of the parameters of a pipeline rank."""
        if len(stages) == 1:
            return (1.0,)
        # shares do not depend on ZeRO, so all its stages share the cached counts
        split, plain = self.split(layout), replace(layout, zero=0)
        sizes = []
        for stage in stages:
            first, last = stage == 0, stage == len(split) - 1
            routed = sum(map(self.shape.is_moe_layer, split[stage])) if self.shape.moe else 0
            linear = sum(bool(self.shape.linear_of(layer)) for layer in split[stage])
            key = "stage", layout.tp, layout.ep, len(split[stage]), routed, linear, first, last
            if key not in self._known.counts:
                self._known.counts[key] = counts(self.shape, plain, split[stage], first=first, last=last)
            sizes.append(self._known.counts[key].whole)
        return tuple(size / sum(sizes) for size in sizes)

    def _edges(self, layout: Layout) -> Edges:
        """Return the shares of the embedding's unit and of what stays whole, without a pipeline."""
        if layout.pp > 1 or layout.dp * layout.cp == 1:
            return UNKNOWN
        coded = shares_codes(layout)
        key = layout.tp, layout.ep, coded
        if key not in self._known.shares:
            plain, tied = replace(layout, zero=0), self.shape.tied
            width = WIDTHS[self.recipe.precision].parameter
            whole, first, last = (
                ends_counts.whole * width + ends_counts.codes * coded
                for ends_counts in (
                    counts(self.shape, plain, layers, first=first, last=last)
                    for layers, first, last in (
                        (range(self.shape.layers), True, True), ((), True, tied), ((), tied, True),
                    )
                )
            )  # fmt: skip
            apart = self.stack.ends_apart
            # a tied matrix is in both counts: it is one unit
            ends = last if tied else first + last
            self._known.shares[key] = Edges(first / whole, last / whole) if apart else Edges(0.0, ends / whole)
        return self._known.shares[key]

    def units(self, layout: Layout, state: States) -> GatherUnits:
        """Return the units that are gathered and reduced together."""
        key = *_sharers(layout), layout.dp * layout.cp > 1, state.parameter_bytes, state.gradient_bytes
        if key not in self._known.units:
            self._known.units[key] = gather_units(self.shape, layout, state)
        return self._known.units[key]


def _sharers(layout: Layout) -> tuple[int, int, int, bool]:
    """Return what the elements on a rank depend on beside its layers."""
    return layout.tp, layout.ep, layout.dp_shard * layout.cp if layout.zero else 1, shares_codes(layout)
