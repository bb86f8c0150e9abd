"""The peak of a pipeline rank of Meshwright's own engine: every moment of its schedule at which it may hold most, with
what head, layers, embedding, gathers and reductions need beside the states then. Held against a dry run of the engine.

What FSDP keeps (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py): a gather of a forward pass leaves its buffer
until the next one's is there; a reduction copies a unit's gradients into one, which lives until the next reduction.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.memory.gather_units import GatherUnit, GatherUnits
from meshwright.planner.memory.instants import Instant, What, moments_of
from meshwright.spec.layout import Layout
from meshwright.spec.schedule_kinds import KINDS

Kinds = dict[str, float]
WORDS = {
    "loss": "head and loss", "pass": "backward pass", "inputs": "backward pass", "sums": "last backward pass",
    "split": "split backward pass",
    "embedding": "gradient of the embedding", "end": "gradient of the embedding", "weights": "gradients of weights",
    "reduce": "sum of gradients",
}  # fmt: skip
ROUNDS = 3
"""Micro-batches in flight do not grow beyond so many rounds of the pipeline (all but AFAB)."""


class Place(NamedTuple):
    """Bytes at a place inside a pass."""

    gradients: float
    logits: float
    temporaries: float
    buffers: float = 0.0
    gone: float = 0.0
    """Of parameters that were whole and are not any more."""


class Sizes(NamedTuple):
    """Bytes of the kinds of memory that a moment decides; the others are as between passes."""

    gradients: float
    logits: float
    temporaries: float
    buffers: float
    parameters: float
    activations: float


def enough(name: str, ranks: int, micro_batches: int, virtual: int) -> int:
    """Micro-batches after which nothing new comes: whole rounds of the width that the step has."""
    width = micro_batches // max(1, micro_batches // ranks)
    if KINDS[name].holds_all or micro_batches <= (ROUNDS + 1) * width:
        return micro_batches
    return ROUNDS * width + (micro_batches % ranks if virtual == 1 else 0)


def moments(layout: Layout, micro_batches: int, rank: int) -> tuple[Instant, ...]:
    """Of a pipeline rank, or of a step without a pipeline."""
    if layout.pp > 1:
        few = enough(layout.schedule, layout.pp, micro_batches, layout.vp)
        return moments_of(layout.schedule, layout.pp, few, layout.vp, rank)
    if layout.cuda_graphs == "on":  # gradients are there from the first micro-batch on
        micro_batches = max(2, micro_batches)
    found = [Instant("loss", 0, (1,), (0,), (graded,), (0,)) for graded in range(min(micro_batches, 2))]
    passes = [((int(micro_batches > 2),), False)] if micro_batches > 1 else []  # one between is above the first
    if micro_batches < 3 or layout.zero < 2:  # and above the last, but where all gradients are summed in that
        passes.append(((int(micro_batches > 1),), True))
    for graded, final in passes:
        found.append(Instant("sums" if final else "pass", 0, (1,), (0,), graded, (0,)))
        found.append(Instant("end" if final else "embedding", 0, (0,), (0,), graded, (0,)))
    return tuple(found)


class Standing(NamedTuple):
    """What all stages of a rank hold at a moment, that no other moment of its kind holds more of."""

    what: What
    place: int
    again: bool
    """Whether the stage under way has gradients of earlier micro-batches."""
    waits: bool
    """Whether gradients of its weights wait to be made."""
    share: float
    """Of the rank's gradients that are there, and not reduced yet."""
    reduced: float
    """Of those that are reduced."""
    own: float
    """Of those of the stage under way, whether there or not."""
    kept_bytes: float
    logits_bytes: float


def standing(
    found: tuple[Instant, ...], costs: list[MicroBatchCost], shares: tuple[float, ...]
) -> tuple[Standing, ...]:
    """Of these moments the fullest. Where the layers of all stages need the same inside a pass, it does not matter
    which of the stages before the last is under way. `shares`: of the rank's parameters, each stage's."""
    alike = len({(cost.mlp_bytes, cost.attention_bytes, cost.weights, cost.split_bytes) for cost in costs}) == 1
    kept, queued = [cost.kept_bytes for cost in costs], [cost.queued_bytes for cost in costs]
    leaves, end, logits = any(queued), len(costs) - 1, costs[-1].logits.kept_bytes  # only a model's last stage has any
    kinds: dict[tuple[object, ...], list[Standing]] = {}
    for what, place, alive, waiting, graded, done in found:
        kept_bytes = sum(map(mul, alive, kept)) + (sum(map(mul, waiting, queued)) if leaves else 0.0)
        reduced = sum(map(mul, done, shares))
        share, again, waits = sum(map(mul, graded, shares)) - reduced, bool(graded[place]), bool(waiting[place])
        one = Standing(what, place, again, waits, share, reduced, shares[place], kept_bytes, alive[-1] * logits)
        kind = what, place == end if alike and what != "reduce" else place, again, waits, reduced, shares[place]
        kinds.setdefault(kind, []).append(one)
    return tuple(one for some in kinds.values() for one in _front(some))


def _front(some: list[Standing]) -> Iterator[Standing]:
    """Those below no other, in what is kept and in gradients."""
    most = -1.0
    for one in sorted(some, key=lambda one: (one.kept_bytes + one.logits_bytes, one.share), reverse=True):
        if one.share > most:
            most = one.share
            yield one


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRank:
    """A pipeline rank: costs of its stages for one micro-batch, bytes of its states inside a step, what is gathered and
    reduced together. `last`: its last stage is the model's."""

    layout: Layout
    costs: list[MicroBatchCost]
    state: Kinds
    units: GatherUnits
    last: bool
    first: bool
    """Its first stage is."""
    made: float
    """Bytes of an element of a gradient as it is made."""
    summed: float
    """As it is kept."""
    sums_products: bool = False
    """Gradients of all weights of its layers are products that are added where they are kept: none is made."""

    @property
    def apart(self) -> bool:
        """Whether each micro-batch's gradients are reduced at once."""
        return self.layout.pp == 1 and self.layout.zero >= 2

    @property
    def frees(self) -> bool:
        """Whether parameters are gathered for each pass."""
        return self.layout.pp == 1 and self.layout.zero == 3

    def peak(self, found: tuple[Standing, ...]) -> tuple[str, Kinds]:
        """(when, bytes by kind) of the worst of these moments."""
        what, best = max(((one.what, sizes) for one in found for sizes in self.at(one)), key=lambda at: sum(at[1]))
        return WORDS[what], {**self.state, **best._asdict()}

    @property
    def lets_go(self) -> bool:
        """Whether parameters that were whole are gone when a stage's last backward pass has come by."""
        return self.units.summed and bool(self.layout.zero) and not self.frees

    def at(self, moment: Standing) -> Iterator[Sizes]:
        """What is held at the worst places of the pass under way, instead of the state's gradients and parameters."""
        what, place, again, waits, share, reduced, own, kept, logits = moment
        cost, units, whole = self.costs[place], self.units, self.state["gradients"]
        ends, early = self.last and place == len(self.costs) - 1, waits and not again
        before = whole * share + self._left(whole * reduced) + (units.last.gradients if ends and early else 0.0)
        parameters = self.state["parameters"] * (1 - reduced * self.lets_go)
        final = units.summed and what == "sums" and self.layout.cuda_graphs != "on"

        def kinds(at: Place) -> Sizes:
            return Sizes(at.gradients, at.logits, at.temporaries, at.buffers, parameters - at.gone, kept)

        if what == "loss":
            gathered = self.layout.pp == 1 and units.summed and (self.frees or (self.layout.zero and not again))
            late = units.block if units.tied else units.last  # a tied matrix was gathered before blocks
            buffers = late.parameters * bool(gathered) + units.last.parameters * self.frees
            yield kinds(Place(before, logits + cost.logits.transient, 0.0, buffers))
        elif what == "weights":
            wider = self.summed if self.made < self.summed and not again else 0.0
            made = 0.0 if self.sums_products else self.made
            yield kinds(Place(before, logits, cost.weights * (made + wider)))
        elif what == "reduce":
            if units.summed:
                yield kinds(Place(before, logits, 0.0, *self._reduction(self.first and place == 0)))
        elif what == "split":
            yield kinds(Place(before, logits, cost.split_bytes))
        elif what in ("embedding", "end"):
            last = what == "end" and units.summed and self.layout.cuda_graphs != "on"
            after = before if again else before + (units.first.gradients if early else whole * own)
            yield kinds(self._embedding(after, logits, again, own if last and self.layout.zero else 0.0))
        else:
            if ends:
                yield from map(kinds, self._head(before, logits, cost, again, final))
            left = self.sums_products or (what == "inputs" and cost.new_bytes > 0)
            temporaries = cost.inputs_bytes if left else cost.transient_bytes
            inside = kinds(self._layer(before, logits, temporaries, cost, again, final, ends))
            yield inside
            if final and self.layout.zero and not self.apart:
                yield self._reduced_layer(inside, cost, ends)
            if self.frees and not again:
                yield self._first_layers(cost, parameters)
            if self.layout.pp == 1 and not (again or units.summed):
                # at the first layer gradients of all others are there, and what these kept is gone
                made_last = units.block.gradients + (0.0 if units.tied else units.first.gradients)
                gradients = max(0.0, whole * own - made_last)
                yield Sizes(gradients, 0.0, temporaries, 0.0, parameters, cost.largest_kept_bytes)

    def _head(self, before: float, logits: float, cost: MicroBatchCost, again: bool, final: bool) -> Iterator[Place]:
        """The matrix's gradient is rounded; then it is a gradient, or added to one, and perhaps reduced."""
        last, gone = self.units.last, cost.logits.kept_bytes - cost.logits.held_bytes
        gathers = last.parameters + self.units.block.parameters if self.frees else 0.0
        yield Place(before, logits, last.made, gathers)
        if self.apart:
            gradients = before + (0.0 if again else last.share)
            yield Place(gradients, logits - gone, last.made, gathers + last.gradients, self._gone(final))
            return
        gradients = before if again else min(self.state["gradients"], before + last.gradients)
        yield Place(gradients, logits - gone, last.made)
        if final and self.layout.zero and not self.units.tied:  # that of both ends waits for the embedding's
            yield Place(gradients + last.share, logits - gone, 0.0, last.gradients, self._gone(final))

    def _layer(
        self,
        before: float,
        logits: float,
        temporaries: float,
        cost: MicroBatchCost,
        again: bool,
        final: bool,
        ends: bool,
    ) -> Place:
        """The first layer of the pass. The head's gradients may still be under way."""
        last = self.units.last if ends else GatherUnit()
        gone = cost.logits.kept_bytes - cost.logits.held_bytes if ends else 0.0
        freed = self._gone(final and ends)
        if self.apart or (final and not again and self.lets_go and self.layout.pp == 1):
            gradients = before + (0.0 if again else last.share)
            inside = self._inside(cost, max(last.gradients, self.units.dense.gradients))
            return Place(gradients, logits - gone, *inside, freed)
        gradients = before if again else min(self.state["gradients"], before + last.gradients)
        return Place(gradients, logits - gone, temporaries, gone=freed)

    def _inside(self, cost: MicroBatchCost, reduced: float) -> tuple[float, float]:
        """(temporaries, buffers) at the worst place of a layer where each micro-batch's gradients are reduced at once.
        `reduced`: gradients that were copied when the pass came here. With ZeRO-3 the layer in front is gathered
        beside it. Experts apart are reduced when the pass leaves them, and their copy stays until the rest is."""
        units, block, experts = self.units, self.units.block, self.units.experts
        gathered = 2 * block.parameters if self.frees else 0.0
        reduced *= units.summed
        if not experts.made:
            inside = max(cost.mlp_bytes, max(cost.after_bytes, cost.attention_bytes) + block.made)
            return inside, gathered + reduced
        if self.frees and units.alone:
            gathered -= experts.parameters
        behind = gathered - experts.parameters * self.frees + experts.gradients * (1 + units.alone)
        outside = cost.outside_bytes - cost.inner_bytes
        places = [
            (cost.mlp_bytes, gathered + reduced),
            (cost.after_bytes + experts.made, gathered + reduced),
            (outside + experts.made + units.stack, behind),
            (cost.attention_bytes + units.dense.made, behind),
        ]
        if self.frees and units.stack:  # the layer's own from the buffer, stack by stack, before that is gone
            rows = outside if outside > 0 else cost.outside_bytes  # what is not made again is there, kept
            places.append((rows, gathered + 2 * experts.parameters + reduced))
        return max(places, key=sum)

    def _first_layers(self, cost: MicroBatchCost, parameters: float) -> Sizes:
        """The second layer of the model, in a step whose gradients are its only ones: those of all layers behind it are
        there, and what these kept is gone."""
        units, whole = self.units, self.state["gradients"]
        gradients = whole - units.first.share - 2 * units.block.share
        temporaries, buffers = self._inside(cost, units.dense.gradients)
        activations = min(cost.kept_bytes, 2 * cost.largest_kept_bytes)
        return Sizes(max(0.0, gradients), 0.0, temporaries, buffers, parameters, activations)

    def _reduced_layer(self, inside: Sizes, cost: MicroBatchCost, ends: bool) -> Sizes:
        """The last layer's gradients are copied to be reduced, when its parameters and what it kept are gone, and the
        head's have been."""
        last, block = self.units.last if ends and not self.units.tied else GatherUnit(), self.units.block
        return inside._replace(
            gradients=inside.gradients - last.gradients + last.share,
            temporaries=0.0,
            buffers=block.gradients,
            parameters=inside.parameters - block.parameters,
            activations=inside.activations - cost.largest_kept_bytes,
        )

    def _reduction(self, first: bool) -> tuple[float, float]:
        """(bytes of the buffer, of parameters that are gone): unit by unit, in the order of the model. Without ZeRO
        gradients are added up where they are reduced."""
        units = [*([self.units.first] if first else []), self.units.block]
        if not self.layout.zero:
            return 0.0, 0.0
        unit = max(units, key=lambda unit: unit.gradients - unit.parameters)
        return unit.gradients, unit.parameters

    def _gone(self, final: bool) -> float:
        """Parameters of the head, when its last backward pass has come by."""
        return self.units.last.parameters if final and self.lets_go and not self.units.tied else 0.0

    def _left(self, gradients: float) -> float:
        """Of a stage's gradients, when they are reduced."""
        return self._shared(gradients) if self.lets_go else gradients

    def _embedding(self, gradients: float, logits: float, again: bool, final: float) -> Place:
        """Made whole, however few rows of it are not zero; then added or reduced, or the first of a step on one device,
        which becomes the gradient. Where it is reduced, those of the stage's layers are shards already, and their
        parameters are gone. `final`: the stage's share of the rank where
        they are reduced."""
        first, block = self.units.first, self.units.block
        gone = max(0.0, self.state["parameters"] * final - first.parameters) if self.lets_go else 0.0
        if self.apart:
            gathers = first.parameters if self.frees else 0.0
            buffers = gathers + max(first.gradients, block.gradients)
            return Place(self.state["gradients"], logits, first.made, buffers, gone)
        if final:
            own = self.state["gradients"] * final
            left = first.gradients + block.gradients + self._shared(own)
            gradients -= max(0.0, own - left)
        added = again or self.units.tied or self.units.summed or self.made < self.summed or self.layout.pp > 1
        return Place(gradients, logits, first.made if added else 0.0, gone=gone)

    def _shared(self, gradients: float) -> float:
        """Of a stage's gradients after their reduction."""
        return gradients / (self.layout.dp_shard * self.layout.cp)
