"""What a rank keeps of parameters, gradients and optimizer states: counted from shape, layout and precision alone.

Two moments of a step are counted. "step" is between two micro-batches (under a pipeline: before the first stage's
gradients are reduced), "update" is when the optimizer runs, after all reductions:

    zero   step: parameters      gradients   update: parameters, gradients   always: masters, moments
    0      whole                 whole       whole                           whole
    1      whole + own shard     whole       1 / n                           1 / n
    2      whole + own shard     1 / n       1 / n                           1 / n
    3      1 / n                 1 / n       1 / n                           1 / n

n ranks share a parameter: dp_shard x cp, and for experts those of them that hold the same ones. fully_shard keeps a
rank's shard beside the whole copy ("shards"), which of 16-bit weights is their fp32 masters (`shards_are_masters`). It
gives all ranks equally many rows: the last ones are padding. Experts fewer than n are cut inside instead
(`boxes.sharded_dim`). Under a pipeline ZeRO 2 and 3 are as ZeRO 1 within the step
(docs/parallel.md).

Frozen matrices that are codes and scales (spec/lora.py) count as parameters. Ranks share them under ZeRO-3 without a
pipeline (frozen_code_rules.shares_codes), else they are whole.

Gradients of 16-bit weights are 4 bytes wide where anything is added to them, and 2 where nothing is
(docs/decisions/0005-gradient-precision.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.spec.boxes import Box, boxes_of, shard
from meshwright.spec.code_cuts import bytes_of_codes
from meshwright.spec.frozen_code_rules import shares_codes
from meshwright.spec.inventory import Parameter, parameters, tp_holders, tp_parts
from meshwright.spec.layout import Layout
from meshwright.spec.optimizer_states import FP32_STATES, StateStorage
from meshwright.spec.places import expert_place, expert_replicas, layers_of_stages, own_stages, place_of, ranks_along
from meshwright.spec.schedule import stage_rank
from meshwright.spec.shape import ModelShape

Phase = Literal["step", "update"]
PHASES: tuple[Phase, ...] = ("step", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementWidths:
    """Bytes of an element of each kind."""

    parameter: int
    gradient: int
    master: int
    shard: int = 0
    """Of a shard; 0 = a parameter's."""


WIDTHS = {
    "fp32": ElementWidths(parameter=4, gradient=4, master=0),
    "bf16": ElementWidths(parameter=2, gradient=2, master=4),
    "fp16": ElementWidths(parameter=2, gradient=2, master=4),
}
"""By recipe.precision. With moments in fp32 4 + 4 + 8 or 2 + 2 + 4 + 4 + 4, 16 bytes a parameter either way; a gradient
that is a sum is `gradient_bytes` wide. Moments: spec/optimizer_states.py."""
COUNTER_BYTES = 4
TOKEN_BYTES = 16
"""A token and its target, int64."""
LATE = ("pp", "tp")
"""Axes along which gradients are summed after data parallelism, in this order."""


def master_bytes(precision: str, storage: StateStorage) -> int:
    """Bytes of an element of a master weight."""
    return WIDTHS[precision].master if storage.masters else 0


def shards_are_masters(precision: str, layout: Layout, storage: StateStorage, reduce_dtype: str = "fp32") -> bool:
    """Whether the shards of 16-bit weights are their fp32 masters, which are rounded as they are gathered."""
    return layout.zero > 0 and reduce_dtype == "fp32" and master_bytes(precision, storage) > 0


def adds_gradients(layout: Layout, micro_batches: int) -> bool:
    """Whether any gradient is a sum over several micro-batches, or over ranks that read other tokens with the same
    parameters. Experts may lie on fewer ranks than the tp group that they borrow: those hold the same ones."""
    return micro_batches > 1 or layout.dp * layout.cp > 1 or 1 < layout.ep < layout.tp


def gradient_bytes(precision: str, layout: Layout, *, micro_batches: int = 1, reduce_dtype: str = "fp32") -> int:
    """Bytes of an element of a gradient, for steps of at most so many micro-batches on a rank."""
    wide = reduce_dtype == "fp32" and adds_gradients(layout, micro_batches)
    return 4 if wide else WIDTHS[precision].gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """One parameter on one rank. `box`: what tensor and expert parallelism leave; `ranks` share that under ZeRO."""

    parameter: Parameter
    box: Box
    ranks: int = 1
    index: int = 0

    @property
    def code_bytes(self) -> int:
        """Of its codes and scales, where it is held as such."""
        return bytes_of_codes(self.parameter.scheme, self.box, self.ranks)

    @property
    def own_box(self) -> Box:
        """What is this rank's to update."""
        return shard(self.box, self.ranks, self.index)

    @property
    def own(self) -> int:
        """Elements of it."""
        return self.own_box.numel

    @property
    def padded(self) -> int:
        """Elements of a shard, the same on every rank: that of the first, who has no less than the others."""
        return shard(self.box, self.ranks, 0).numel


def held(shape: ModelShape, layout: Layout, rank: int) -> list[HeldParameter]:
    """Every parameter that a rank holds any part of, once: a tied head's matrix also where the last stage is."""
    return held_of(parameters_of(shape, layout, rank), shape, layout, rank)


def held_of(some: Sequence[Parameter], shape: ModelShape, layout: Layout, rank: int) -> list[HeldParameter]:
    """Of some of its parameters."""
    found = boxes_of(some, shape, layout, rank)
    place = place_of(layout, rank)
    sharers = (layout.dp_shard * layout.cp, place["dp_shard"] * layout.cp + place["cp"])
    _, at, same = expert_place(layout, rank)
    expert_sharers = (same, at) if layout.ep > 1 else sharers
    result = []
    for parameter in some:
        ranks, index = expert_sharers if parameter.group == "expert" else sharers
        shared = shares_codes(layout) if parameter.scheme else layout.zero > 0
        ranks, index = (ranks, index) if shared else (1, 0)
        result.append(HeldParameter(parameter=parameter, box=found[parameter.name], ranks=ranks, index=index))
    return result


def parameters_of(shape: ModelShape, layout: Layout, rank: int) -> list[Parameter]:
    """Of a rank's stages; the last of a pipeline has a tied head's matrix, too."""
    own, ranges = own_stages(layout, place_of(layout, rank)["pp"]), layers_of_stages(shape.layers, layout)
    layers = {layer for stage in own for layer in ranges[stage]}
    first, last = 0 in own, len(ranges) - 1 in own
    outside = {"embedding"} if first else set()
    outside |= {"norm", "head"} if last else set()
    return [
        one
        for one in parameters(shape)
        if (one.layer in layers if one.layer >= 0 else one.group in outside)
        or (one.name == "embed.weight" and shape.tied and last)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Parameters of which `ranks`, which differ along one axis, hold the very same elements."""

    axis: str
    """pp (both ends of a tied model), tp, or a group of data-parallel ranks (data, replicate, expert_data)."""
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    partial: bool
    """Whether each rank's gradient is only its part: the gradient is the sum over `ranks`."""

    @property
    def late(self) -> bool:
        """Whether that sum is left once data parallelism has taken its own."""
        return self.partial and self.axis in LATE


def common(shape: ModelShape, layout: Layout, rank: int) -> tuple[Common, ...]:
    """What a rank holds in common with others, and whose gradients must be summed: each sum once, along each axis.

    Read by the engine (the sums, the gradient norm, the comparison of replicas) and the planner (their bytes).
    """
    found: dict[tuple[str, tuple[int, ...], bool], list[str]] = {}
    ends, place = _tied_ends(shape, layout, rank), place_of(layout, rank)
    for parameter in parameters_of(shape, layout, rank):
        if parameter.scheme:  # no parameter of the engine
            continue
        n, parts = tp_holders(parameter, shape, layout), tp_parts(parameter, shape, layout)
        first = rank - place["tp"] % n
        for axis, ranks, partial in (
            ("pp", ends if parameter.name == "embed.weight" else (), True),
            ("tp", tuple(range(first, first + n)), parts > 1),
            (*_replicas(parameter, layout, rank), True),
        ):
            if len(ranks) > 1:
                found.setdefault((axis, ranks, partial), []).append(parameter.name)
    in_order = sorted(found.items(), key=lambda item: (*LATE, item[0][0]).index(item[0][0]))
    return tuple(
        Common(axis=axis, ranks=ranks, names=tuple(names), partial=partial)
        for (axis, ranks, partial), names in in_order
    )


def _replicas(parameter: Parameter, layout: Layout, rank: int) -> tuple[str, tuple[int, ...]]:
    """Data-parallel ranks that hold the same elements, ZeRO's cut included."""
    if layout.zero:
        return "replicate", ranks_along(layout, ("dp_replicate",), rank)
    if layout.ep > 1 and parameter.group == "expert":
        return "expert_data", expert_replicas(layout, rank)
    return "data", ranks_along(layout, ("dp_replicate", "dp_shard", "cp"), rank)


def _tied_ends(shape: ModelShape, layout: Layout, rank: int) -> tuple[int, ...]:
    """The first and the last rank of this rank's pipeline, where both hold a tied head's matrix and this is one."""
    if not shape.tied or layout.pp == 1:
        return ()
    places, pipeline = stage_rank(layout.schedule, layout.pp, layout.vp), ranks_along(layout, ("pp",), rank)
    ends = (pipeline[places[0]], pipeline[places[-1]])
    return ends if rank in ends and ends[0] != ends[1] else ()


def memory(
    shape: ModelShape,
    layout: Layout,
    precision: str,
    rank: int = 0,
    *,
    micro_batches: int = 1,
    reduce_dtype: str = "fp32",
    storage: StateStorage = FP32_STATES,
) -> dict[Phase, dict[str, int]]:
    """Bytes by phase ("step" and "update") and kind (ledger.STATES), for one rank. Kinds with nothing are left out.

    `micro_batches`: the most of a step on one rank, `Plan.micro_batches`; `reduce_dtype` and `storage`: the recipe's.
    """
    gradient = gradient_bytes(precision, layout, micro_batches=micro_batches, reduce_dtype=reduce_dtype)
    width = replace(WIDTHS[precision], gradient=gradient, master=master_bytes(precision, storage))
    if shards_are_masters(precision, layout, storage, reduce_dtype):
        width = replace(width, master=0, shard=width.master)
    found = held(shape, layout, rank)
    moments = sum(moment_bytes(one, storage) for one in found)
    return {
        phase: {kind: size for kind, size in _sizes(found, layout, phase, width, moments).items() if size}
        for phase in PHASES
    }


def moment_bytes(one: HeldParameter, storage: StateStorage) -> int:
    """Of the moments of what a rank updates of a parameter; none of a frozen one."""
    if not one.parameter.trained:
        return 0
    return storage.of(one.parameter).nbytes(one.own_box.sizes)


def written_bytes(
    shape: ModelShape, layout: Layout, precision: str, rank: int = 0, *, storage: StateStorage = FP32_STATES
) -> int:
    """Of trained weights and optimizer states, what a rank writes of a checkpoint: of equal pieces one rank writes
    each, and all as much. Which one that is for a tensor decides torch; a rank may write a tensor more or less."""
    bytes_each = WIDTHS[precision].parameter + master_bytes(precision, storage)
    ranks, total = layout.world // layout.pp, 0.0
    for one in held(shape, layout, rank):
        if not one.parameter.trained:
            continue
        copies = ranks * one.box.numel / one.parameter.numel / one.ranks
        total += (one.own * bytes_each + moment_bytes(one, storage)) / max(1.0, copies)
    return round(total)


def _sizes(
    found: list[HeldParameter], layout: Layout, phase: Phase, width: ElementWidths, moments: int
) -> dict[str, int]:
    """Bytes of each kind. Weight gradients of a pipeline may come after the backward pass: nothing is reduced, and no
    parameter put back into shards, before the stage's last one."""
    codes = sum(one.code_bytes for one in found)
    found = [one for one in found if not one.parameter.scheme]
    zero, late, inside = layout.zero, layout.pp > 1, phase == "step"
    whole = inside and zero > 0 and (zero < 3 or late)
    whole_gradients = zero == 0 or (inside and (zero == 1 or late))
    trained = [one for one in found if one.parameter.trained]
    padded, learns = sum(one.padded for one in found), sum(one.padded for one in trained)
    shards = learns * (width.shard or width.parameter) + (padded - learns) * width.parameter
    gathered = sum(one.padded * one.ranks for one in found)
    return {
        "parameters": (gathered * width.parameter if whole else shards) + codes,
        "shards": shards if whole else 0,
        "gradients": (sum(one.box.numel for one in trained) if whole_gradients else learns) * width.gradient,
        "masters": sum(one.own for one in trained) * width.master,
        "moments": moments,
        "counters": len(trained) * COUNTER_BYTES,
    }
