"""Peak of a pipeline rank of Meshwright's engine, over every moment of its schedule at which it may hold most.

Each moment adds what head, layers, embedding, gathers and reductions need to the states. Tests compare it with a dry
run.

FSDP's buffers (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py): a forward gather keeps its buffer until the
next one is complete. A reduction copies a unit's gradients into one, which lives until the next reduction.

fully_shard gathers and reduces units together (parallel/axes/data.py): the embedding, a block, in it experts that are
spread over ranks, and the norm with the head.

Each moment says what the schedule has in flight, and what the current pass needs in addition.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from operator import le, mul, sub
from typing import Literal, NamedTuple

from meshwright.planner.cost.micro_batch import MicroBatchCost
from meshwright.planner.cost.states import ElementCounts, counts, expert_counts, largest_cut_stack
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule import KINDS, last_of, schedule
from meshwright.spec.model.shape import ModelShape

What = Literal["loss", "pass", "sums", "inputs", "split", "embedding", "end", "weights", "reduce"]


class Instant(NamedTuple):
    """Moment in a rank's schedule. Tuples are indexed by the rank's stages, ascending.

    loss       head and loss are computed
    pass       a backward pass begins
    sums       a stage's last backward pass begins, in which its gradients are reduced
    inputs     a backward pass that defers weight gradients begins
    split      such a pass reaches its last layer
    embedding  a pass ends with the gradient of the embedding
    end        a stage's last pass does
    weights    deferred weight gradients are computed
    reduce     with them all gradients of a stage exist, and are reduced next
    """

    what: What
    stage: int
    """Index of the stage among the rank's."""
    alive: tuple[int, ...]
    """Micro-batches between their forward and their backward pass."""
    queued: tuple[int, ...]
    """Micro-batches between their backward pass and its deferred weight gradients."""
    graded: tuple[int, ...]
    """1 = gradients of earlier micro-batches exist, deferred ones included."""
    reduced: tuple[int, ...]
    """1 = all gradients are complete and reduced, and only ZeRO's share is left."""


@cache
def schedule_moments(name: str, ranks: int, micro_batches: int, virtual: int, rank: int) -> tuple[Instant, ...]:
    """Return the instants of a pipeline rank in a step that can be its fullest."""
    kinds: dict[tuple[What, int], set[Instant]] = {}
    for instant in _walk(name, ranks, micro_batches, virtual, rank):
        kinds.setdefault((instant.what, instant.stage), set()).add(instant)
    return tuple(sorted(instant for instants in kinds.values() for instant in _highest(instants)))


def _highest(instants: Collection[Instant]) -> Iterator[Instant]:
    """Yield the instants of one kind that no other exceeds. Reduced gradients are fewer with ZeRO, else as many."""
    # Reductions free memory, so they count with the opposite sign.
    flat = {i: (*i.alive, *i.queued, *i.graded, *(-done for done in i.reduced)) for i in instants}
    for instant, numbers in flat.items():
        if not any(other is not instant and all(map(le, numbers, others)) for other, others in flat.items()):
            yield instant


def _walk(name: str, ranks: int, micro_batches: int, virtual: int, rank: int) -> Iterator[Instant]:
    actions = schedule(name, ranks, micro_batches, virtual)[rank]
    stages = {stage: index for index, stage in enumerate(sorted({action.stage for action in actions}))}
    alive, queued, graded, reduced = ([0] * len(stages) for _ in range(4))
    last = last_of(actions, ("W", "BW"))

    def now(what: What) -> Instant:
        return Instant(what, stage, tuple(alive), tuple(queued), tuple(graded), tuple(reduced))

    for action in actions:
        stage = stages[action.stage]
        if action.kind == "F":
            alive[stage] += 1
            if action.stage == ranks * virtual - 1:
                yield now("loss")
        elif action.kind == "W":
            # Before the count falls: inputs are held until their gradient is computed.
            yield now("weights")
            queued[stage] -= 1
            graded[stage] = 1
            if action == last[action.stage]:
                yield now("reduce")
        else:
            final = action == last[action.stage]
            yield now("inputs" if action.kind == "B" else "sums" if final else "pass")
            # Only after the pass: at its worst place its own activations still count.
            alive[stage] -= 1
            if action.kind == "B":
                queued[stage] += 1
                yield now("split")
            # Only the first stage goes on into the embedding, whose gradient is made last.
            if action.stage == 0:
                yield now("end" if final else "embedding")
            if action.kind == "BW":
                graded[stage] = 1
        if action == last[action.stage]:
            # A stage reduces once, after its last weight gradient.
            reduced[stage] = 1


class GatherUnit(NamedTuple):
    """Bytes of a unit: parameters, gradients as summed and as computed."""

    parameters: float = 0.0
    gradients: float = 0.0
    made: float = 0.0
    share: float = 0.0
    """Bytes of gradients left after the reduction."""


NO_UNIT = GatherUnit()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherUnits:
    """Units of a model: the embedding, a block, norm with head. A tied matrix is in both ends."""

    first: GatherUnit
    block: GatherUnit
    last: GatherUnit
    summed: bool
    """True if other ranks have gradients to be summed with these."""
    tied: bool
    """Both ends are one unit."""
    dense: GatherUnit
    """A block without experts that are a separate unit."""
    experts: GatherUnit = NO_UNIT
    """A block's experts on this rank, if other ranks have other ones."""
    stack: float = 0.0
    """Bytes of the largest stack of experts as its gradient is computed, if ZeRO cuts inside experts.

    Stacks are then copied as they are gathered, and one by one before they are reduced.
    """
    alone: bool = False
    """No other rank has these experts, so nothing of them is gathered."""


def widest_layer(shape: ModelShape) -> int:
    """Return the last layer, or the last of linear attention if that has more parameters."""
    ends = {bool(shape.linear_of(layer)): layer for layer in range(shape.layers)}.values()
    return max(ends, key=lambda layer: counts(shape, Layout(), (layer,), first=False, last=False).whole)


def gather_units(shape: ModelShape, layout: Layout, width: float, gradient: float) -> GatherUnits:
    """Return the units of a shape. `width` and `gradient`: bytes of an element."""
    tied, layer = shape.tied, widest_layer(shape)

    def unit(elements: ElementCounts) -> GatherUnit:
        learned = elements.learned_gathered
        parameters = elements.gathered * width + elements.codes_gathered
        return GatherUnit(parameters, learned * gradient, learned * width, elements.updated * gradient)

    # Experts spread over ranks are sharded over fewer ranks than the rest of their block.
    apart = layout.ep > 1 and shape.is_moe_layer(layer)
    block = unit(counts(shape, layout, (layer,), first=False, last=False))
    last = unit(counts(shape, layout, (), first=tied, last=True))
    if width == 4:  # the loss has the head's gradient in fp32, so no rounded copy is made
        last = last._replace(made=0.0)
    experts = unit(expert_counts(shape, layout, layer)) if apart else NO_UNIT
    return GatherUnits(
        first=unit(counts(shape, layout, (), first=True, last=tied)),
        block=block,
        last=last,
        summed=layout.sums_gradients,
        tied=tied,
        dense=GatherUnit(*map(sub, block, experts)),
        experts=experts,
        stack=largest_cut_stack(shape, layout, layer) * width if apart else 0.0,
        alone=apart and layout.zero_ranks[1] == 1,
    )


Kinds = dict[str, float]
WORDS = {
    "loss": "head and loss", "pass": "backward pass", "inputs": "backward pass", "sums": "last backward pass",
    "split": "split backward pass",
    "embedding": "gradient of the embedding", "end": "gradient of the embedding", "weights": "gradients of weights",
    "reduce": "sum of gradients",
}  # fmt: skip
ROUNDS = 3
"""Rounds of the pipeline after which micro-batches in flight no longer grow (all but AFAB)."""


class PassBytes(NamedTuple):
    """Bytes at a moment inside a pass."""

    gradients: float
    logits: float
    temporaries: float
    buffers: float = 0.0
    freed: float = 0.0
    """Bytes of parameters that were whole and have been freed."""


class Sizes(NamedTuple):
    """Bytes of the kinds of memory that a moment decides. The others are as between passes."""

    gradients: float
    logits: float
    temporaries: float
    buffers: float
    parameters: float
    activations: float


def enough(name: str, ranks: int, micro_batches: int, virtual: int) -> int:
    """Return the micro-batches after which the schedule repeats: whole rounds of the step's width."""
    width = micro_batches // max(1, micro_batches // ranks)
    if KINDS[name].holds_all or micro_batches <= (ROUNDS + 1) * width:
        return micro_batches
    return ROUNDS * width + (micro_batches % ranks if virtual == 1 else 0)


def moments(layout: Layout, micro_batches: int, rank: int) -> tuple[Instant, ...]:
    """Return the moments of a pipeline rank, or of a step without a pipeline."""
    if layout.pp > 1:
        # Beyond some micro-batches the schedule only repeats moments that were seen.
        few = enough(layout.schedule, layout.pp, micro_batches, layout.vp)
        return schedule_moments(layout.schedule, layout.pp, few, layout.vp, rank)
    if layout.cuda_graphs == "on":  # gradients exist from the first micro-batch
        micro_batches = max(2, micro_batches)
    instants = [Instant("loss", 0, (1,), (0,), (graded,), (0,)) for graded in range(min(micro_batches, 2))]
    passes = [((int(micro_batches > 2),), False)] if micro_batches > 1 else []  # one in between exceeds the first
    if micro_batches < 3 or not layout.reduces_at_once:  # and the last, unless all gradients are summed in that
        passes.append(((int(micro_batches > 1),), True))
    # The first pass finds no gradients, a later one adds to them, the last may reduce them.
    for graded, final in passes:
        instants.append(Instant("sums" if final else "pass", 0, (1,), (0,), graded, (0,)))
        instants.append(Instant("end" if final else "embedding", 0, (0,), (0,), graded, (0,)))
    return tuple(instants)


class MomentBytes(NamedTuple):
    """Bytes that all stages of a rank hold at a moment, not exceeded by another moment of its kind."""

    what: What
    stage: int
    graded: bool
    """True if the current stage has gradients of earlier micro-batches."""
    waits: bool
    """True if weight gradients of the current stage are deferred."""
    share: float
    """Share of the rank's gradients that exist and are not reduced yet."""
    reduced: float
    """Share of the rank's gradients that are reduced."""
    stage_share: float
    """Share of the rank's gradients that belong to the current stage, whether they exist or not."""
    kept_bytes: float
    logits_bytes: float


def fullest_moments(
    instants: tuple[Instant, ...], costs: list[MicroBatchCost], shares: tuple[float, ...]
) -> tuple[MomentBytes, ...]:
    """Return the fullest of these instants. `shares`: each stage's part of the rank's parameters.

    If all stages need the same inside a pass, it does not matter which stage before the last is under way.
    """
    alike = len({(cost.mlp_bytes, cost.attention_bytes, cost.weights, cost.split_bytes) for cost in costs}) == 1
    kept_bytes_each, queued = [cost.kept_bytes for cost in costs], [cost.queued_bytes for cost in costs]
    defers, end = any(queued), len(costs) - 1
    # Logits grow with what is alive on the last stage, and are part of the head's sizes.
    logits = costs[-1].logits.kept_bytes  # only a model's last stage has any
    kinds: dict[tuple[object, ...], list[MomentBytes]] = {}
    for what, stage, alive, waiting, graded, done in instants:
        kept_bytes = sum(map(mul, alive, kept_bytes_each)) + (sum(map(mul, waiting, queued)) if defers else 0.0)
        reduced = sum(map(mul, done, shares))
        share, stage_graded, waits = sum(map(mul, graded, shares)) - reduced, bool(graded[stage]), bool(waiting[stage])
        moment = MomentBytes(
            what, stage, stage_graded, waits, share, reduced, shares[stage], kept_bytes, alive[-1] * logits
        )
        # Of moments that differ only in sums, those that are smaller in all of them cannot be the peak.
        where = stage == end if alike and what != "reduce" else stage
        kinds.setdefault((what, where, stage_graded, waits, reduced, shares[stage]), []).append(moment)
    return tuple(moment for candidates in kinds.values() for moment in _pareto_front(candidates))


def _pareto_front(moments: list[MomentBytes]) -> Iterator[MomentBytes]:
    """Yield the moments that no other exceeds both in kept bytes and in gradients."""
    # In descending order of bytes, a moment matters only if more gradients exist than in all fuller ones.
    most = -1.0
    for moment in sorted(moments, key=lambda m: (m.kept_bytes + m.logits_bytes, m.share), reverse=True):
        if moment.share > most:
            most = moment.share
            yield moment


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRank:
    """Pipeline rank: costs of its stages for one micro-batch, states inside a step, gather and reduce units.

    `last`: its last stage is the model's.
    """

    layout: Layout
    costs: list[MicroBatchCost]
    state: Kinds
    units: GatherUnits
    last: bool
    first: bool
    """Its first stage is the model's."""
    computed_gradient_bytes: float
    """Bytes per element of a gradient as computed."""
    kept_gradient_bytes: float
    """Bytes per element of a gradient as kept."""
    sums_products: bool = False
    """Gradients of all layer weights are products that add in place, without a temporary."""

    @property
    def reduces_each(self) -> bool:
        """True if each micro-batch's gradients are reduced at once."""
        return self.layout.pp == 1 and self.layout.zero >= 2

    @property
    def gathers_per_pass(self) -> bool:
        """True if parameters are gathered for each pass."""
        return self.layout.pp == 1 and self.layout.zero == 3

    def peak(self, moments: tuple[MomentBytes, ...]) -> tuple[str, Kinds]:
        """Return (when, bytes by kind) at the worst of these moments."""
        pairs = ((moment.what, sizes) for moment in moments for sizes in self.sizes_at(moment))
        what, worst = max(pairs, key=lambda pair: sum(pair[1]))
        return WORDS[what], {**self.state, **worst._asdict()}

    @property
    def frees_parameters(self) -> bool:
        """True if whole parameters are freed after a stage's last backward pass."""
        return self.units.summed and bool(self.layout.zero) and not self.gathers_per_pass

    def sizes_at(self, moment: MomentBytes) -> Iterator[Sizes]:
        """Yield the sizes at the worst places of the current pass, which replace the state's."""
        whole, units = self.state["gradients"], self.units
        begins_at_head = self.last and moment.stage == len(self.costs) - 1
        # No weight of the stage has a gradient when the first gradients of its inputs are computed.
        is_early = moment.waits and not moment.graded
        reduced, frees = whole * moment.reduced, self.frees_parameters
        gradients = whole * moment.share + (self._shared(reduced) if frees else reduced)
        gradients += units.last.gradients if begins_at_head and is_early else 0.0
        parameters = self.state["parameters"] * (1 - moment.reduced * frees)
        # Graphs are captured without reductions, which follow the pass.
        reduces = units.summed and moment.what in ("sums", "end") and self.layout.cuda_graphs != "on"
        if moment.what in ("pass", "inputs", "sums"):
            yield from self._pass_sizes(moment, gradients, parameters, begins_at_head, reduces)
        elif at := self._bytes_at(moment, gradients, is_early, reduces):
            yield Sizes(
                at.gradients, at.logits, at.temporaries, at.buffers, parameters - at.freed, moment.kept_bytes
            )  # fmt: skip

    def _bytes_at(self, moment: MomentBytes, gradients: float, is_early: bool, reduces: bool) -> PassBytes | None:
        """Return the bytes at a moment with a single place. `gradients`: those that exist when it begins."""
        what, cost, logits, graded = moment.what, self.costs[moment.stage], moment.logits_bytes, moment.graded
        if what == "loss":
            return PassBytes(gradients, logits + cost.logits.transient, 0.0, self._gathered_ahead(graded))
        if what == "weights":
            adds = self.computed_gradient_bytes < self.kept_gradient_bytes and not graded
            width = 0.0 if self.sums_products else self.computed_gradient_bytes
            return PassBytes(gradients, logits, cost.weights * (width + (self.kept_gradient_bytes if adds else 0.0)))
        if what == "reduce":
            freed = self._reduction(self.first and moment.stage == 0)
            return PassBytes(gradients, logits, 0.0, *freed) if self.units.summed else None
        if what == "split":
            return PassBytes(gradients, logits, cost.split_bytes)
        added = self.units.first.gradients if is_early else self.state["gradients"] * moment.stage_share
        reduced_share = moment.stage_share if reduces and self.layout.zero else 0.0
        return self._embedding(gradients if graded else gradients + added, logits, graded, reduced_share)

    def _gathered_ahead(self, graded: bool) -> float:
        """Return the bytes of parameters that are gathered while the loss is computed."""
        units, each_pass = self.units, self.gathers_per_pass
        gathers = each_pass or (self.layout.zero and not graded)
        ahead = units.block if units.tied else units.last  # a tied matrix was gathered before the blocks
        buffers = ahead.parameters if self.layout.pp == 1 and units.summed and gathers else 0.0
        return buffers + units.last.parameters * each_pass

    def _pass_sizes(
        self, moment: MomentBytes, gradients: float, parameters: float, begins_at_head: bool, final: bool
    ) -> Iterator[Sizes]:
        """Yield the sizes in a backward pass, at the head and in layers. `final`: it reduces its gradients."""
        cost, graded, units, logits = self.costs[moment.stage], moment.graded, self.units, moment.logits_bytes
        for at in self._head(gradients, logits, cost, graded, final) if begins_at_head else ():
            freed = parameters - at.freed
            yield Sizes(at.gradients, at.logits, at.temporaries, at.buffers, freed, moment.kept_bytes)
        # The gradient of a weight stays for later, or is added in place by its product.
        leaves = self.sums_products or (moment.what == "inputs" and cost.new_bytes > 0)
        temporaries = cost.inputs_bytes if leaves else cost.transient_bytes
        at = self._layer(gradients, logits, temporaries, cost, graded, final, begins_at_head)
        inside = Sizes(at.gradients, at.logits, at.temporaries, at.buffers, parameters - at.freed, moment.kept_bytes)
        yield inside
        if final and self.layout.zero and not self.reduces_each:
            yield self._reduced_layer(inside, cost, begins_at_head)
        if self.gathers_per_pass and not graded:
            yield self._first_layers(cost, parameters)
        if self.layout.pp == 1 and not (graded or units.summed):
            # At the first layer gradients of all others exist, and their activations are freed.
            made_last = units.block.gradients + (0.0 if units.tied else units.first.gradients)
            at_first = max(0.0, self.state["gradients"] * moment.stage_share - made_last)
            yield Sizes(at_first, 0.0, temporaries, 0.0, parameters, cost.largest_kept_bytes)

    def _head(
        self, before: float, logits: float, cost: MicroBatchCost, graded: bool, final: bool
    ) -> Iterator[PassBytes]:
        """Yield the head: its matrix gradient is rounded, then kept or added to one, and perhaps reduced."""
        last, freed = self.units.last, cost.logits.kept_bytes - cost.logits.held_bytes
        gathers = last.parameters + self.units.block.parameters if self.gathers_per_pass else 0.0
        # The new gradient is held together with all logits until it is rounded.
        yield PassBytes(before, logits, last.made, gathers)
        if self.reduces_each:
            gradients = before + (0.0 if graded else last.share)
            yield PassBytes(gradients, logits - freed, last.made, gathers + last.gradients, self._freed_head(final))
            return
        gradients = before if graded else min(self.state["gradients"], before + last.gradients)
        yield PassBytes(gradients, logits - freed, last.made)
        if final and self.layout.zero and not self.units.tied:  # of tied ends it waits for the embedding's
            yield PassBytes(gradients + last.share, logits - freed, 0.0, last.gradients, self._freed_head(final))

    def _layer(
        self,
        before: float,
        logits: float,
        temporaries: float,
        cost: MicroBatchCost,
        graded: bool,
        final: bool,
        ends: bool,
    ) -> PassBytes:
        """Return the first layer of the pass. The head's gradients may still be reducing."""
        last = self.units.last if ends else GatherUnit()
        freed_logits = cost.logits.kept_bytes - cost.logits.held_bytes if ends else 0.0
        freed = self._freed_head(final and ends)
        if self.reduces_each or (final and not graded and self.frees_parameters and self.layout.pp == 1):
            gradients = before + (0.0 if graded else last.share)
            inside = self._inside(cost, max(last.gradients, self.units.dense.gradients))
            return PassBytes(gradients, logits - freed_logits, *inside, freed)
        gradients = before if graded else min(self.state["gradients"], before + last.gradients)
        return PassBytes(gradients, logits - freed_logits, temporaries, freed=freed)

    def _inside(self, cost: MicroBatchCost, reduced: float) -> tuple[float, float]:
        """Return (temporaries, buffers) at the worst place of a layer, if each micro-batch is reduced at once.

        `reduced`: gradients copied when the pass arrived here. With ZeRO-3 the previous layer is gathered meanwhile.
        Separate experts are reduced when the pass leaves them, and their copy stays until the rest is reduced.
        """
        units, block, experts = self.units, self.units.block, self.units.experts
        gathered = 2 * block.parameters if self.gathers_per_pass else 0.0
        reduced *= units.summed
        # Dense blocks are one unit: reduced whole when the pass leaves them.
        if not experts.made:
            inside = max(cost.mlp_bytes, max(cost.after_bytes, cost.attention_bytes) + block.made)
            return inside, gathered + reduced
        if self.gathers_per_pass and units.alone:
            gathered -= experts.parameters
        behind = gathered - experts.parameters * self.gathers_per_pass + experts.gradients * (1 + units.alone)
        outside = cost.outside_bytes - cost.inner_bytes
        # In the MLP, at its exit, between experts and attention, in attention.
        places = [
            (cost.mlp_bytes, gathered + reduced),
            (cost.after_bytes + experts.made, gathered + reduced),
            (outside + experts.made + units.stack, behind),
            (cost.attention_bytes + units.dense.made, behind),
        ]
        if self.gathers_per_pass and units.stack:  # stacks are copied from the buffer before it is freed
            rows = outside if outside > 0 else cost.outside_bytes  # what is not recomputed exists, kept
            places.append((rows, gathered + 2 * experts.parameters + reduced))
        return max(places, key=sum)

    def _first_layers(self, cost: MicroBatchCost, parameters: float) -> Sizes:
        """Return the model's second layer, in a step with one micro-batch.

        Gradients of all layers behind it exist, and their activations are freed.
        """
        units, whole = self.units, self.state["gradients"]
        gradients = whole - units.first.share - 2 * units.block.share
        temporaries, buffers = self._inside(cost, units.dense.gradients)
        activations = min(cost.kept_bytes, 2 * cost.largest_kept_bytes)
        return Sizes(max(0.0, gradients), 0.0, temporaries, buffers, parameters, activations)

    def _reduced_layer(self, inside: Sizes, cost: MicroBatchCost, ends: bool) -> Sizes:
        """Return the moment at which the last layer's gradients are copied for their reduction.

        Its parameters and activations are freed, and the head's gradients are reduced.
        """
        last, block = self.units.last if ends and not self.units.tied else GatherUnit(), self.units.block
        return inside._replace(
            gradients=inside.gradients - last.gradients + last.share,
            temporaries=0.0,
            buffers=block.gradients,
            parameters=inside.parameters - block.parameters,
            activations=inside.activations - cost.largest_kept_bytes,
        )

    def _reduction(self, first: bool) -> tuple[float, float]:
        """Return (bytes of the buffer, of freed parameters), unit by unit in the order of the model.

        Without ZeRO gradients accumulate where they are reduced.
        """
        units = [*([self.units.first] if first else []), self.units.block]
        if not self.layout.zero:
            return 0.0, 0.0
        unit = max(units, key=lambda unit: unit.gradients - unit.parameters)
        return unit.gradients, unit.parameters

    def _freed_head(self, final: bool) -> float:
        """Return the parameters of the head that are freed after its last backward pass."""
        return self.units.last.parameters if final and self.frees_parameters and not self.units.tied else 0.0

    def _embedding(self, gradients: float, logits: float, graded: bool, final: float) -> PassBytes:
        """Return the embedding's gradient, which is computed whole, however few of its rows are not zero.

        Then it is added or reduced. The first one of a step on one device becomes the gradient itself. If it is
        reduced, the stage's layers are already shards and their parameters freed. `final`: the stage's share of the
        rank in that case.
        """
        first, block = self.units.first, self.units.block
        freed = max(0.0, self.state["parameters"] * final - first.parameters) if self.frees_parameters else 0.0
        if self.reduces_each:
            gathers = first.parameters if self.gathers_per_pass else 0.0
            buffers = gathers + max(first.gradients, block.gradients)
            return PassBytes(self.state["gradients"], logits, first.made, buffers, freed)
        # Layers of the stage that were reduced hold shards by now; two units are still whole.
        if final:
            stage_gradients = self.state["gradients"] * final
            left = first.gradients + block.gradients + self._shared(stage_gradients)
            gradients -= max(0.0, stage_gradients - left)
        added = (
            graded
            or self.units.tied
            or self.units.summed
            or self.computed_gradient_bytes < self.kept_gradient_bytes
            or self.layout.pp > 1
        )
        return PassBytes(gradients, logits, first.made if added else 0.0, freed=freed)

    def _shared(self, gradients: float) -> float:
        """Return a rank's share of a stage's gradients."""
        return gradients / (self.layout.dp_shard * self.layout.cp)
