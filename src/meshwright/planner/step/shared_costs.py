"""What the layouts of one model, recipe and cluster are put together from, each piece counted once."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from meshwright.planner.cost.links import Links
from meshwright.planner.cost.local_shape import LocalShape, local_shape
from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.cost.rounded_weights import with_rounded_weights
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.stack import MESHWRIGHT, Stack, eager, graphed
from meshwright.planner.cost.stage_costs import Costs, CostsByPolicy, StageKind, costs, split_by_cost
from meshwright.planner.cost.states import ElementCounts, States, counts, layer_kinds
from meshwright.planner.memory.gather_units import GatherUnits, gather_units
from meshwright.planner.step.error_ranges import likely_share
from meshwright.planner.step.execution import uncompiled_because
from meshwright.planner.step.memo import Memo
from meshwright.planner.step.prediction import usable_bytes
from meshwright.planner.time.timeline import UNKNOWN, Edges
from meshwright.spec.cluster import Cluster
from meshwright.spec.compiled_blocks import can_be_compiled
from meshwright.spec.frozen_code_rules import shares_codes
from meshwright.spec.head_chunk import CHUNK_BYTES
from meshwright.spec.held import WIDTHS, adds_gradients
from meshwright.spec.layout import Layout
from meshwright.spec.places import layers_of_stages
from meshwright.spec.plan import Plan
from meshwright.spec.recipe import Recipe
from meshwright.spec.schedule import stages_of_ranks
from meshwright.spec.schedule_kinds import SPLIT_ALWAYS
from meshwright.spec.shape import ModelShape

KEPT = 1000
"""Layouts, but for their data parallelism, whose stages are kept."""


@dataclass(frozen=True, kw_only=True)
class SharedCosts:
    """What layouts of one model, recipe and cluster share, counted once."""

    shape: ModelShape
    recipe: Recipe
    cluster: Cluster
    stack: Stack = MESHWRIGHT
    speeds: Speeds
    links: Links
    document_tokens: float = 0.0
    """Tokens of the document that a token is in, on average, so that long ones weigh more; 0 = one fills its row."""
    run_steps: int = 0
    """Of the run; 0 = as the recipe of a plan says."""
    teacher: "SharedCosts | None" = None
    """Of a teacher that stands beside the model."""

    @cached_property
    def _known(self) -> Memo:
        return Memo()

    def on_nodes(self, nodes: int) -> Self:
        """The same on so many nodes. What was counted for one number of nodes is known for all: it depends on the
        degrees of a layout and on where its ranks lie, and ranks of a group lie as far apart on any number."""
        found = replace(self, cluster=replace(self.cluster, nodes=nodes))
        found.__dict__["_known"] = self._known
        return found

    @property
    def _gpu(self) -> bool:
        """Whether the device is one: a described accelerator, or a machine measured as one whose host only launches."""
        return self.cluster.device.is_gpu and self.speeds.host is None

    @cached_property
    def largest_share(self) -> float:
        """Of a device's room, what a plan may take to be recommended."""
        return likely_share(self.stack, routed=self.shape.moe is not None, nodes=self.cluster.nodes)

    def _limits(self, plan: Plan) -> tuple[float, float]:
        """(bytes that a program can have of a device, the share of them with which a plan is likely to fit)."""
        return usable_bytes(plan), self.largest_share

    @cached_property
    def may_sum_products(self) -> bool:
        """Whether sums of any layout may take products that are gradients."""
        recipe = self.recipe
        wider = recipe.precision != "fp32" and recipe.reduce_dtype == "fp32"
        return self.stack.sums_products and self._gpu and wider and recipe.products != "fp8-all"

    def sums_products(self, layout: Layout, m: int) -> bool:
        """Whether sums take products that are gradients of dense weights (kernels/gradient_sums.py), in steps of `m`
        micro-batches. Not where each micro-batch's gradients are reduced by themselves, where replicas lay a step's
        only ones into buckets (parallel/replicas.py), or where compiled blocks make them in their backward passes."""
        if not self.may_sum_products or layout.kernels == "reference":
            return False
        if layout.pp == 1 and (layout.zero >= 2 or (m == 1 and not layout.zero and layout.cuda_graphs != "on")):
            return False
        late = layout.pp > 1 and layout.schedule in SPLIT_ALWAYS
        if layout.compile != "off" and not late and self._can_compile:
            return False
        return m > 1 or adds_gradients(layout, m)

    @cached_property
    def _can_compile(self) -> bool:
        return can_be_compiled(self.shape, self.recipe.fake_quantize)

    @property
    def chooses(self) -> bool:
        """Whether plans may leave open how their passes are run."""
        return self._gpu and self.stack.is_meshwright

    def looked_at(self, plan: Plan) -> Plan:
        """As a search looks at it: uncompiled where nothing is compiled, else compiled where that is left open, which
        holds less."""
        never = self.chooses and uncompiled_because(plan)
        return replace(plan, layout=replace(plan.layout, compile="off")) if never else plan

    def _stack(self, layout: Layout) -> Stack:
        """As a layout's code is launched."""
        key = layout.compile, layout.kernels, layout.cuda_graphs
        if key not in self._known.stacks:
            self._known.stacks[key] = self._launched(layout)
        return self._known.stacks[key]

    def _launched(self, layout: Layout) -> Stack:
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
        alone = layout.tp == layout.cp == layout.ep == layout.pp == 1  # compiled blocks are counted as they are lowered
        code = alone, layout.compile, layout.kernels, layout.cuda_graphs, layout.context, layout.context_split
        return *degrees, *pieces, *splits, *code, layout.micro_batch_of(self.recipe.global_batch)

    def parts(self, layout: Layout) -> tuple[LocalShape, Costs]:
        """Costs of the blocks for one micro-batch."""
        of, found = self.blocks(layout)
        return of, found[layout.recompute]

    def policies(self, layout: Layout) -> CostsByPolicy:
        """The same under each recompute policy."""
        return self.blocks(layout)[1]

    def blocks(self, layout: Layout) -> tuple[LocalShape, CostsByPolicy]:
        """What a micro-batch is on a rank, and costs of its blocks by recompute policy."""
        key = self._key(layout)
        if key not in self._known.parts:
            width = 4 if self.recipe.precision == "fp32" else 2
            recipe, stack = self.recipe, self._stack(layout)
            documents = recipe.document_mask
            of = local_shape(
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
                of,
                costs(of, layout, self.speeds, self.links, self._known.blocks, self._known.halves),
            )
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

    def stages(self, layout: Layout) -> list[MicroBatchCost]:
        """Cost of each pipeline stage; those of the layouts asked for last are kept."""
        key = self._stages_key(layout)
        if key not in self._known.stages:
            found = self.policies(layout)
            kinds, places = self._stage_kinds(layout)
            each = []
            for first, *rest in kinds:
                cost = found[layout.recompute].stage(first)
                cost = cost.followed_by(found["none"].stage(rest[0])) if rest else cost
                if layout.offload != "off":
                    cost = self._offloaded(layout, cost, (first, *rest))
                kinds_by_policy = ((layout.recompute, first), *(("none", one) for one in rest))
                policies = [(policy, one.layers - one.routed, one.routed) for policy, one in kinds_by_policy]
                each.append(with_rounded_weights(cost, self.parts(layout)[0], policies))
            stages = [each[place] for place in places]
            if self.teacher is not None:
                stages[-1] = stages[-1].plus(self._taught(layout))
            if len(self._known.stages) >= KEPT:
                self._known.stages.clear()
                self._known.standing.clear()
            self._known.stages[key] = stages
        return self._known.stages[key]

    def _taught(self, layout: Layout) -> MicroBatchCost:
        """What a teacher adds to the last stage."""
        raise NotImplementedError

    def _stage_kinds(self, layout: Layout) -> tuple[list[tuple[StageKind, ...]], list[int]]:
        """Kinds of pipeline stages, and which of them each stage is. One of which only the first layers recompute is
        two: those, and the others."""
        key = layout.pp, layout.vp, layout.stages, layout.recompute_layers
        if key not in self._known.stage_kinds:
            split = self.split(layout)
            kinds: dict[tuple[StageKind, ...], int] = {}
            places = []
            for s, layers in enumerate(split):
                cut = min(layout.recompute_layers or len(layers), len(layers))
                first, last = s == 0, s == len(split) - 1
                kind: tuple[StageKind, ...] = (self._stage_kind(layers[:cut], first, last and cut == len(layers)),)
                if cut < len(layers):
                    kind += (self._stage_kind(layers[cut:], False, last),)
                places.append(kinds.setdefault(kind, len(kinds)))
            self._known.stage_kinds[key] = list(kinds), places
        return self._known.stage_kinds[key]

    def _offloaded(self, layout: Layout, cost: MicroBatchCost, parts: tuple[StageKind, ...]) -> MicroBatchCost:
        """A stage, whose last block keeps its own; what a pipeline has received is the stage's, and stays."""
        of, _ = self.parts(layout)
        layers = self.policies(layout)["none" if len(parts) > 1 else layout.recompute]
        last = layers.routed if parts[-1].routed else layers.windowed if parts[-1].windowed else layers.dense
        received = 0.0 if parts[0].first else of.between_bytes
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
        """Dense layers of these that have a window, where others have none."""
        if not self.shape.mixed_windows:
            return 0
        return sum(bool(self.shape.window_of(layer)) and not self.shape.is_moe_layer(layer) for layer in layers)

    @cached_property
    def windowed_layers(self) -> int:
        """Those of the shape."""
        return self.windowed(range(self.shape.layers))

    def _ranks(self, layout: Layout) -> list[tuple[int, int, bool, bool, tuple[int, ...]]]:
        """(dense layers, routed ones, has the embedding, has the head; its layers, where they have attention of two
        kinds) of each pipeline rank."""
        key = layout.schedule, layout.pp, layout.vp, layout.stages
        if key not in self._known.kinds:
            split, shape = self.split(layout), self.shape
            mixed = bool(shape.unbuilt and shape.unbuilt.linear)
            routed = [sum(map(shape.is_moe_layer, layers)) if shape.moe else 0 for layers in split]
            self._known.kinds[key] = [
                (sum(len(split[s]) - routed[s] for s in own), sum(routed[s] for s in own), 0 in own,
                 len(split) - 1 in own, tuple(n for s in own for n in split[s]) if mixed else ())
                for own in stages_of_ranks(layout.schedule, layout.pp, layout.vp)
            ]  # fmt: skip
        return self._known.kinds[key]

    def layers_alike(self, dense: int, routed: int) -> list[tuple[int, ...]]:
        """Layers of which so many are dense and so many routed, each of these alike; for each kind of them. All layers
        of a shape are what they are."""
        if dense + routed == self.shape.layers:
            return [tuple(range(dense + routed))]
        kinds = {kind: layer for layer, kind in enumerate(layer_kinds(self.shape))}
        alike: tuple[list[int], list[int]] = ([], [])
        for layer in kinds.values():
            alike[self.shape.is_moe_layer(layer)].append(layer)
        return [(a,) * dense + (b,) * routed for a in alike[False] or [0] for b in alike[True] or [0]]

    @cached_property
    def _by_kind(self) -> tuple[list[int], list[int]]:
        """Dense layers, and routed ones."""
        kinds: tuple[list[int], list[int]] = ([], [])
        for layer in range(self.shape.layers):
            kinds[self.shape.is_moe_layer(layer)].append(layer)
        return kinds

    def held(self, layout: Layout, rank: int) -> ElementCounts:
        """Elements that a pipeline rank holds."""
        kind = self._ranks(layout)[rank]
        key = *_sharers(layout), kind
        if key not in self._known.counts:
            dense, routed, first, last, own = kind
            kinds = self._by_kind
            layers = own or sorted(kinds[False][:dense] + kinds[True][len(kinds[True]) - routed :])
            self._known.counts[key] = counts(
                self.shape, layout, layers, first=first, last=last, storage=self.recipe.storage
            )
        return self._known.counts[key]

    def counted(self, layout: Layout, layers: tuple[int, ...], *, ends: bool) -> ElementCounts:
        """The same of a rank with these layers, with or without embedding and head."""
        key = *_sharers(layout), layers, ends
        if key not in self._known.counts:
            self._known.counts[key] = counts(
                self.shape, layout, layers, first=ends, last=ends, storage=self.recipe.storage
            )
        return self._known.counts[key]

    def stage_shares(self, layout: Layout, own: tuple[int, ...]) -> tuple[float, ...]:
        """Of the parameters of a pipeline rank with these stages, each stage's."""
        if len(own) == 1:
            return (1.0,)
        split, plain = self.split(layout), replace(layout, zero=0)
        found = []
        for stage in own:
            first, last = stage == 0, stage == len(split) - 1
            routed = sum(map(self.shape.is_moe_layer, split[stage])) if self.shape.moe else 0
            linear = sum(bool(self.shape.linear_of(layer)) for layer in split[stage])
            key = "stage", layout.tp, layout.ep, len(split[stage]), routed, linear, first, last
            if key not in self._known.counts:
                self._known.counts[key] = counts(self.shape, plain, split[stage], first=first, last=last)
            found.append(self._known.counts[key].whole)
        return tuple(size / sum(found) for size in found)

    def _edges(self, layout: Layout) -> Edges:
        """Of the embedding's unit and of what stays whole, without a pipeline."""
        if layout.pp > 1 or layout.dp * layout.cp == 1:
            return UNKNOWN
        coded = shares_codes(layout)
        key = layout.tp, layout.ep, coded
        if key not in self._known.shares:
            plain, tied = replace(layout, zero=0), self.shape.tied
            width = WIDTHS[self.recipe.precision].parameter
            whole, first, last = (
                one.whole * width + one.codes * coded
                for one in (
                    counts(self.shape, plain, layers, first=first, last=last)
                    for layers, first, last in (
                        (range(self.shape.layers), True, True), ((), True, tied), ((), tied, True),
                    )
                )
            )  # fmt: skip
            apart = self.stack.ends_apart
            ends = last if tied else first + last
            self._known.shares[key] = Edges(first / whole, last / whole) if apart else Edges(0.0, ends / whole)
        return self._known.shares[key]

    def units(self, layout: Layout, state: States) -> GatherUnits:
        """What is gathered, made and reduced together."""
        key = *_sharers(layout), layout.dp * layout.cp > 1, state.parameter_bytes, state.gradient_bytes
        if key not in self._known.units:
            self._known.units[key] = gather_units(self.shape, layout, state)
        return self._known.units[key]


def _sharers(layout: Layout) -> tuple[int, int, int, bool]:
    """What the elements on a rank depend on beside its layers."""
    return layout.tp, layout.ep, layout.dp_shard * layout.cp if layout.zero else 1, shares_codes(layout)
