"""Costs shared by the layouts of one model, recipe and device, each counted once; also those of a teacher.

A teacher costs frozen weights, forward passes, and the logits of both models at the student's loss. Under a pipeline
its passes precede the student's, and hidden states wait for those. Its gathers under ZeRO-3 are counted in bytes and
not in time.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from meshwright.planner.cost import activations, weight_product
from meshwright.planner.cost.exchanges import Links
from meshwright.planner.cost.micro_batch import LocalShape, Logits, MicroBatchCost, local_shape
from meshwright.planner.cost.recorded import recorded
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.stack import MESHWRIGHT, Stack, eager, graphed, serial
from meshwright.planner.cost.stage_costs import BlockCosts, Costs, CostsByPolicy, StageKind, ranks_of, split_by_cost
from meshwright.planner.cost.states import ElementCounts, counts, layer_kinds, number_of_kinds
from meshwright.planner.cost.weight_product import with_rounded_weights
from meshwright.planner.memory.engine_peak import GatherUnits, MomentBytes, fullest_moments, gather_units, moments
from meshwright.planner.memory.rank_memory import RankMemory, first_backward
from meshwright.planner.time.collectives import Sharing, StageContents, sharing
from meshwright.planner.time.timeline import UNKNOWN, Edges, StepTime, busy_s, least_s, pipeline_s
from meshwright.spec.layout.cluster import Device
from meshwright.spec.layout.layout import Layout, layers_of_stages, own_stages
from meshwright.spec.layout.schedule import stages_of_ranks
from meshwright.spec.memory.held import CHUNK_BYTES, WIDTHS, adds_gradients, cache_bytes
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.recipe.recipe import CROSS_ENTROPY, NO_SCHEME, Recipe
from meshwright.spec.rules.legal import teacher_layout
from meshwright.spec.rules.passes import can_be_compiled, shares_codes

KEPT = 1000
"""Most layouts, apart from their data parallelism, whose stages stay cached."""
BUFFERS = 5
"""fp32 tensors of a chunk of a teacher's logits (kernels/loss/linear_divergence.py)."""
RankKind = tuple[int, int, bool, bool, tuple[int, ...]]
"""(dense layers, routed layers, has the embedding, has the head, its layers if they have attention of two kinds)."""


class PassTerms(NamedTuple):
    """Terms of a pass that do not depend on how data parallelism is split."""

    micro_batch: int
    taught: MicroBatchCost | None
    """Cost of a teacher on the last stage."""


@dataclass(frozen=True, kw_only=True)
class SharedCosts:
    """Costs that layouts of one model, recipe and device share.

    Rules marked `recorded` are memoised by the fields of the layout that they read. The number of nodes is unknown
    here, so the same answers serve any: ranks of a group are equally far apart.
    """

    shape: ModelShape
    recipe: Recipe
    device: Device
    stack: Stack = MESHWRIGHT
    speeds: Speeds
    links: Links
    document_tokens: float = 0.0
    """Mean length of the document of a token, so that long ones weigh more. 0 = documents fill their rows."""
    teacher: "SharedCosts | None" = None
    """Costs of a teacher that runs along with the model."""

    @property
    def gpu(self) -> bool:
        """True for a described accelerator, or a machine measured as one whose host only launches."""
        return self.device.is_gpu and self.speeds.host is None

    @cached_property
    def may_sum_products(self) -> bool:
        """True if gradient products of some layout may add to sums in place."""
        recipe = self.recipe
        wider = recipe.precision != "fp32" and recipe.reduce_dtype == "fp32"
        return self.stack.sums_products and self.gpu and wider and recipe.products != "fp8-all"

    def sums_products(self, layout: Layout, m: int) -> bool:
        """Return True if gradient products of dense weights add to sums (kernels/linear/weight_gradients.py).

        `m` counts micro-batches of a step. They do not if each micro-batch's gradients are reduced separately, if
        replicas put a step's only gradients into buckets (parallel/axes/data.py), or if compiled blocks compute
        them in their backward passes.
        """
        if not self.may_sum_products or layout.kernels == "reference":
            return False
        # Reduced at once, or a step's only gradients: there is no sum to add to.
        if layout.pp == 1 and (layout.zero >= 2 or (m == 1 and not layout.zero and layout.cuda_graphs != "on")):
            return False
        if layout.compile != "off" and not layout.splits_every_backward and self._can_compile:
            return False
        return m > 1 or adds_gradients(layout, m)

    @cached_property
    def _can_compile(self) -> bool:
        return can_be_compiled(self.shape, self.recipe.fake_quantize)

    @recorded
    def launched_stack(self, layout: Layout) -> Stack:
        """Return the stack as a layout's code is launched."""
        compiles = layout.compile != "off" and self._can_compile
        # Triton kernels fuse what eager code stores, so their layouts count as compiled code does.
        fused = self.gpu and self.device.runs_triton and layout.kernels not in ("eager", "reference")
        stack = self.stack if compiles or fused else eager(self.stack)
        if stack.is_meshwright and not self.device.is_gpu:
            stack = replace(stack, head_chunk_bytes=CHUNK_BYTES["cpu"], rounds_in_place=False)
        elif stack.is_meshwright and not self.device.runs_triton:
            stack = replace(stack, loss_in_place=False, rounds_in_place=False)
        elif stack.is_meshwright and layout.kernels in ("eager", "reference"):
            stack = replace(stack, loss_in_place=False)
        stack = serial(stack) if stack.is_meshwright and layout.overlap == "off" else stack
        return graphed(stack) if layout.cuda_graphs == "on" and self.gpu else stack

    def pass_terms(self, layout: Layout) -> PassTerms:
        """Return the terms that rules about passes take in addition to the layout."""
        taught = None if self.teacher is None else self.teacher.beside_student(layout)
        return PassTerms(layout.micro_batch_of(self.recipe.global_batch), taught)

    def parts(self, layout: Layout) -> tuple[LocalShape, Costs]:
        """Return the local shape and the costs of the blocks for one micro-batch."""
        local, by_policy = self.blocks(layout)
        return local, by_policy[layout.recompute]

    def policies(self, layout: Layout) -> CostsByPolicy:
        """Return the costs of the blocks under each recompute policy."""
        return self.blocks(layout)[1]

    def blocks(self, layout: Layout) -> tuple[LocalShape, CostsByPolicy]:
        """Return the local shape of a micro-batch, and the costs of its blocks by recompute policy."""
        return self._blocks(layout, layout.micro_batch_of(self.recipe.global_batch))

    @cached_property
    def _block_costs(self) -> BlockCosts:
        return BlockCosts(self.speeds, self.links)

    @recorded
    def _blocks(self, layout: Layout, micro_batch: int) -> tuple[LocalShape, CostsByPolicy]:
        recipe, width = self.recipe, 4 if self.recipe.precision == "fp32" else 2
        local = local_shape(
            self.shape, self.launched_stack(layout), layout, recipe.sequence, micro_batch, width,
            dropout=recipe.dropout, documents=recipe.document_mask, gpu=self.gpu, products=recipe.products,
            compares=recipe.traits.pairs, fake_quantize=recipe.fake_quantize, document_tokens=self.document_tokens,
        )  # fmt: skip
        return local, self._block_costs.by_policy(local)

    @recorded
    def split(self, layout: Layout) -> list[range]:
        """Return the layers of each stage."""
        if self.stack.split == "cost" and not layout.stages:
            return split_by_cost(self.shape, layout.pp * layout.vp)
        return layers_of_stages(self.shape.layers, layout)

    def _count_stages(self, layout: Layout, terms: PassTerms) -> list[MicroBatchCost]:
        """Return the cost of each pipeline stage."""
        local, by_policy = self._blocks(layout, terms.micro_batch)
        kinds, kind_numbers = self._stage_kinds(layout)
        kind_costs = []
        for first, *rest in kinds:
            cost = by_policy[layout.recompute].stage(first)
            # The layers that do not recompute come last in the stage.
            cost = cost.followed_by(by_policy["none"].stage(rest[0])) if rest else cost
            if layout.offload != "off":
                # The stage's last block stays on the device, and so does a pipeline's received input.
                end, layers = (first, *rest)[-1], by_policy["none" if rest else layout.recompute]
                last = layers.routed if end.routed else layers.windowed if end.windowed else layers.dense
                received = 0.0 if first.first else local.between_bytes
                cost = cost.offloaded(last, received, self.device.host_bytes_per_s)
            kinds_by_policy = ((layout.recompute, first), *(("none", kind) for kind in rest))
            policies = [(policy, kind.layers - kind.routed, kind.routed) for policy, kind in kinds_by_policy]
            kind_costs.append(with_rounded_weights(cost, local, policies))
        stages = [kind_costs[number] for number in kind_numbers]
        if terms.taught is not None:
            # The loss needs both logits, so the teacher's head runs on the last stage.
            stages[-1] = stages[-1].plus(terms.taught)
        return stages

    stages = recorded(_count_stages, most=KEPT)

    def send_s(self, layout: Layout) -> float:
        """Return the seconds of what a stage sends to the next for one micro-batch."""
        if layout.pp == 1:
            return 0.0
        local, _ = self.blocks(layout)
        return self.links.send_seconds(local.between_bytes, ranks_of(layout, "pp")[1], layout.pp)

    def with_sends(self, layout: Layout, stages: list[MicroBatchCost], send_s: float) -> list[MicroBatchCost]:
        """Return the stages with the transfers that no computation hides, which cost both neighbours time."""
        shown = send_s * (1 - self.stack.hides_sends) + (self.stack.send_s if layout.pp > 1 else 0.0)
        if not shown:
            return stages
        return [c.plus(MicroBatchCost(forward_s=shown, input_s=shown, exchange_s=2 * shown)) for c in stages]

    def passes_s(self, layout: Layout, m: int, terms: PassTerms, send_s: float, *, exact: bool) -> float:
        """Return the seconds of all passes of a step of `m` micro-batches."""
        # Without a pipeline the closed form is exact.
        rule = self._played_s if exact and layout.pp > 1 else self._least_s
        return rule(layout, m, terms, send_s)

    @recorded
    def _played_s(self, layout: Layout, m: int, terms: PassTerms, send_s: float) -> float:
        return pipeline_s(layout, m, self.with_sends(layout, self.stages(layout, terms), send_s), send_s)

    @recorded
    def _least_s(self, layout: Layout, m: int, terms: PassTerms, send_s: float) -> float:
        shown = self.with_sends(layout, self.stages(layout, terms), send_s)
        return least_s(layout.schedule, layout.pp, layout.vp, m, shown, send_s)

    def _count_busy(self, layout: Layout, terms: PassTerms, send_s: float) -> tuple[float, ...]:
        """Return the seconds of each pipeline rank for one micro-batch."""
        return busy_s(layout, self.with_sends(layout, self.stages(layout, terms), send_s))

    busy_s = recorded(_count_busy, most=1)
    """The search asks for all splits of a pipeline in turn, so one cached pipeline is enough."""

    def _count_moments(
        self, layout: Layout, m: int, terms: PassTerms, rank: int, exact: bool
    ) -> tuple[MomentBytes, ...]:
        """Return the fullest moments of a rank's schedule."""
        rank_stages, stages = own_stages(layout, rank), self.stages(layout, terms)
        instants = moments(layout, m, rank) if exact or layout.pp == 1 else (first_backward(layout, m, rank),)
        shares = self.stage_shares(layout, rank_stages)
        return fullest_moments(instants, [stages[stage] for stage in rank_stages], shares)

    moments = recorded(_count_moments, most=KEPT)

    def beside_student(self, layout: Layout) -> MicroBatchCost:
        """Return the cost of one micro-batch of this model as a teacher, on its student's last stage.

        It is the forward pass, if it runs there, and the largest transient memory.
        """
        return self._taught(teacher_layout(layout, self.shape))

    @recorded
    def _taught(self, layout: Layout) -> MicroBatchCost:
        local, _ = self.blocks(layout)
        restored = max(weight_product.restored_bytes(local, group) for group in ("attention", "mlp", "expert"))
        logits = max(activations.divergence_chunk(local, BUFFERS), restored) + self._gathered_bytes(layout)
        forward_s = 0.0 if layout.pp > 1 else self.stages(layout, self.pass_terms(layout))[0].forward_s
        return MicroBatchCost(forward_s=forward_s, logits=Logits(0.0, 0.0, logits))

    def _gathered_bytes(self, layout: Layout) -> float:
        """Return the bytes that ZeRO-3 gathers of a teacher: norm and head, and without a pipeline a block.

        FSDP keeps the block until the next gather.
        """
        if not layout.zero:
            return 0.0
        shape, width = self.shape, WIDTHS[self.recipe.precision].parameter
        last = counts(shape, layout, (), first=shape.tied, last=True).gathered * width
        block = counts(shape, layout, (shape.layers - 1,), first=False, last=False)
        return float(last + (block.gathered * width + block.codes_gathered if layout.pp == 1 else 0))

    @recorded
    def _stage_kinds(self, layout: Layout) -> tuple[list[tuple[StageKind, ...]], list[int]]:
        """Return the kinds of pipeline stages, and the kind of each stage.

        A stage of which only the first layers recompute consists of two kinds: those, and the others.
        """
        split = self.split(layout)
        # Most stages are alike: each kind is counted once.
        kinds: dict[tuple[StageKind, ...], int] = {}
        kind_numbers = []
        for s, layers in enumerate(split):
            cut = min(layout.recompute_layers or len(layers), len(layers))
            first, last = s == 0, s == len(split) - 1
            kind: tuple[StageKind, ...] = (self._stage_kind(layers[:cut], first, last and cut == len(layers)),)
            if cut < len(layers):
                kind += (self._stage_kind(layers[cut:], False, last),)
            kind_numbers.append(kinds.setdefault(kind, len(kinds)))
        return list(kinds), kind_numbers

    def _stage_kind(self, layers: range, first: bool, last: bool) -> StageKind:
        routed = sum(map(self.shape.is_moe_layer, layers)) if self.shape.moe else 0
        windowed = self.windowed(layers)
        return StageKind(len(layers) - routed - windowed, windowed, routed, first, last)

    def windowed(self, layers: range) -> int:
        """Return how many of these dense layers have a window, if others have none."""
        if not self.shape.mixed_windows:
            return 0
        return sum(bool(self.shape.window_of(layer)) and not self.shape.is_moe_layer(layer) for layer in layers)

    @cached_property
    def windowed_layers(self) -> int:
        """Dense layers of the shape that have a window."""
        return self.windowed(range(self.shape.layers))

    @recorded
    def ranks(self, layout: Layout) -> list[RankKind]:
        """Return the kind of each pipeline rank."""
        split, shape = self.split(layout), self.shape
        # Two kinds of attention hold different parameters, so equal numbers of layers do not make equal ranks.
        mixed = bool(shape.unbuilt and shape.unbuilt.linear)
        routed = [sum(map(shape.is_moe_layer, layers)) if shape.moe else 0 for layers in split]
        return [
            (sum(len(split[s]) - routed[s] for s in stages), sum(routed[s] for s in stages), 0 in stages,
             len(split) - 1 in stages, tuple(n for s in stages for n in split[s]) if mixed else ())
            for stages in stages_of_ranks(layout.schedule, layout.pp, layout.vp)
        ]  # fmt: skip

    def layers_alike(self, dense: int, routed: int) -> list[tuple[int, ...]]:
        """Return layers of which so many are dense and so many routed, all alike, for each kind of layer.

        A layer stands for all of its kind. All layers of the shape keep their order.
        """
        kinds = layer_kinds(self.shape)
        if dense + routed == self.shape.layers:
            return [tuple(map(kinds.index, kinds))]
        alike: tuple[list[int], list[int]] = ([], [])
        for layer in map(kinds.index, dict.fromkeys(kinds)):
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
        return self._held(layout, self.ranks(layout)[rank])

    @recorded
    def _held(self, layout: Layout, kind: RankKind) -> ElementCounts:
        dense, routed, first, last, mixed_layers = kind
        kinds = self._by_kind
        # Layers of a kind hold equally much, so ranks with equal numbers share one count.
        layers = mixed_layers or sorted(kinds[False][:dense] + kinds[True][len(kinds[True]) - routed :])
        return counts(self.shape, layout, layers, first=first, last=last, storage=self.recipe.storage)

    @recorded
    def counted(self, layout: Layout, layers: tuple[int, ...], ends: bool) -> ElementCounts:
        """Return the elements of a rank with these layers, with or without embedding and head."""
        return counts(self.shape, layout, layers, first=ends, last=ends, storage=self.recipe.storage)

    @recorded
    def contents(self, layout: Layout, rank: int) -> StageContents:
        """Return what a pipeline rank holds, each layer as the first of its kind."""
        layers, first, last = StageContents.from_stages(own_stages(layout, rank), self.split(layout))
        kinds = layer_kinds(self.shape)
        return StageContents(tuple(kinds.index(kinds[n]) for n in layers), first, last)

    @recorded
    def sharing(self, layout: Layout, held: StageContents, parameter_bytes: float, summed_bytes: float) -> Sharing:
        """Return the seconds of data parallelism of a rank that holds these layers."""
        flat = self.stack.sharding == "flat"
        return sharing(self.shape, layout, held, self.links, parameter_bytes, summed_bytes, flat)

    def stage_shares(self, layout: Layout, stages: tuple[int, ...]) -> tuple[float, ...]:
        """Return each stage's share of the parameters of a pipeline rank."""
        if len(stages) == 1:
            return (1.0,)
        split = self.split(layout)
        kinds = [(number_of_kinds(self.shape, split[s]), s == 0, s == len(split) - 1) for s in stages]
        sizes = [self._stage_elements(layout, *kind) for kind in kinds]
        return tuple(size / sum(sizes) for size in sizes)

    @recorded
    def _stage_elements(self, layout: Layout, kinds: tuple[tuple[str, int], ...], first: bool, last: bool) -> int:
        """Return the elements of a stage with so many layers of each kind, before ZeRO cuts them."""
        names = layer_kinds(self.shape)
        layers = [names.index(kind) for kind, times in kinds for _ in range(times)]
        return counts(self.shape, Layout(tp=layout.tp, ep=layout.ep), layers, first=first, last=last).whole

    @recorded
    def edges(self, layout: Layout) -> Edges:
        """Return the shares of the embedding's unit and of what stays whole, without a pipeline."""
        if layout.pp > 1 or not layout.sums_gradients:
            return UNKNOWN
        tied, plain, coded = self.shape.tied, Layout(tp=layout.tp, ep=layout.ep), shares_codes(layout)
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
        # A tied matrix is in both counts: it is one unit.
        ends = last if tied else first + last
        return Edges(first / whole, last / whole) if self.stack.ends_apart else Edges(0.0, ends / whole)

    @recorded
    def units(self, layout: Layout, parameter_bytes: float, gradient_bytes: float) -> GatherUnits:
        """Return the units that are gathered and reduced together, for these bytes per element."""
        return gather_units(self.shape, layout, parameter_bytes, gradient_bytes)


AFTER_PASSES = ("optimizer step", "evaluation")
"""Moments (rank_memory) at which no hidden states wait any more."""


def teachers_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the teacher's forward passes."""
    plain = replace(recipe, products="same", fake_quantize=NO_SCHEME, dropout=0.0)
    return replace(plain, objective=CROSS_ENTROPY, noise_scale_every=0, batch_ramp=())


def _stages(teacher: SharedCosts, forward_layout: Layout) -> list[MicroBatchCost]:
    return teacher.stages(forward_layout, teacher.pass_terms(forward_layout))


def _width(teacher: SharedCosts) -> int:
    return WIDTHS[teacher.recipe.precision].parameter


def held_bytes(teacher: SharedCosts, layout: Layout, rank: int) -> float:
    """Return the bytes of the weights of a pipeline rank."""
    forward_layout = teacher_layout(layout, teacher.shape)
    count = teacher.held(forward_layout, rank)
    return float((count.shard if forward_layout.zero else count.whole) * _width(teacher) + count.codes)


def before_step(teacher: SharedCosts, time: StepTime, layout: Layout, micro_batches: int) -> StepTime:
    """Return the time of a pipeline's step with the teacher's passes in front.

    One micro-batch goes through all stages, the others through the slowest rank.
    """
    if layout.pp == 1:
        return time
    forward_layout = teacher_layout(layout, teacher.shape)
    # The first micro-batch fills the pipeline; each later one adds the slowest rank's time.
    forward = [stage.forward_s for stage in _stages(teacher, forward_layout)]
    busiest = max(
        sum(forward[stage] for stage in own_stages(forward_layout, rank)) for rank in range(forward_layout.pp)
    )
    return replace(
        time, compute_s=time.compute_s + micro_batches * busiest, bubble_s=time.bubble_s + sum(forward) - busiest
    )


def least_ahead_s(teacher: SharedCosts, layout: Layout, micro_batches: int) -> float:
    """Return the least seconds that a teacher's passes add to a step, wherever its layers lie.

    Of a pipeline those of `before_step`.
    """
    forward_s = sum(stage.forward_s for stage in _stages(teacher, teacher_layout(layout, teacher.shape)))
    return forward_s * (1 + (micro_batches - 1) / layout.pp)


def with_cache(memory: RankMemory, shape: ModelShape, recipe: Recipe, layout: Layout) -> RankMemory:
    """Return the memory of a rank whose student generates samples.

    If that is more, it is the cache of keys and values on top of the states, without gradients. Transient memory of a
    sampling step is ignored: some rows of one layer.
    """
    if not recipe.distillation_on_policy:
        return memory
    cache = cache_bytes(shape, recipe, layout, WIDTHS[recipe.precision].parameter)
    none = dict.fromkeys(("gradients", "logits", "temporaries", "activations"), 0.0)
    sampling = {**memory.kinds, **none, "buffers": float(cache)}
    return replace(memory, kinds=sampling, when="sampling") if sum(sampling.values()) > memory.total_bytes else memory


def with_states(teacher: SharedCosts, memory: RankMemory, layout: Layout, rank: int, micro_batches: int) -> RankMemory:
    """Return a pipeline rank's memory with a teacher.

    On the last stage hidden states of all micro-batches wait at the teacher's head. If the teacher's passes hold more,
    they count instead: its stage, gathered, and no gradients.
    """
    if layout.pp == 1:
        return memory
    forward_layout = teacher_layout(layout, teacher.shape)
    local, _ = teacher.parts(forward_layout)
    stages = own_stages(forward_layout, rank)
    waits = (
        micro_batches * local.tokens * teacher.shape.hidden * local.width
        if stages[-1] == forward_layout.pp * forward_layout.vp - 1
        else 0.0
    )
    # At the optimizer step no hidden states wait any more.
    if memory.when not in AFTER_PASSES:
        memory = replace(memory, kinds={**memory.kinds, "activations": memory.kinds["activations"] + waits})
    before = {
        **memory.kinds,
        "gradients": 0.0,
        "logits": 0.0,
        "temporaries": 0.0,
        "activations": waits + local.hidden_bytes,
    }
    if forward_layout.zero:  # the whole stage, and what two blocks were gathered into
        block = counts(teacher.shape, forward_layout, (teacher.shape.layers - 1,), first=False, last=False).gathered
        held = teacher.held(forward_layout, rank)
        before["parameters"] = float(held.gathered * _width(teacher) + held.codes)
        before["buffers"] = float(2 * block * _width(teacher))
    # The teacher's passes run before the student's: the two peaks never coincide.
    if sum(before.values()) > memory.total_bytes:
        return replace(memory, kinds=before, when="teacher's forward passes")
    return memory
