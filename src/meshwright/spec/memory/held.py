"""Memory of a rank: parameters, gradients and optimizer states, counted by shape, layout and precision; buffer sizes.

Two moments of a step are counted. "step" is between two micro-batches (under a pipeline: before the first stage's
gradients are reduced). "update" is when the optimizer runs, after all reductions:

    zero   step: parameters      gradients   update: parameters, gradients   always: masters, moments
    0      whole                 whole       whole                           whole
    1      whole + own shard     whole       1 / n                           1 / n
    2      whole + own shard     1 / n       1 / n                           1 / n
    3      1 / n                 1 / n       1 / n                           1 / n

n ranks share a parameter: dp_shard x cp, and for experts those of them that hold the same ones. fully_shard keeps a
rank's shard in addition to the whole copy ("shards"). For 16-bit weights this shard is their fp32 masters
(`shards_are_masters`). All ranks get equally many rows, the last ones padded. Experts fewer than n are cut inside
instead (`boxes.sharded_dim`). Under a pipeline ZeRO 2 and 3 act as ZeRO 1 within the step (docs/parallel.md).

Frozen matrices that are codes and scales (spec/model/shape.py) count as parameters. Ranks shard them under ZeRO-3
without a pipeline (`shares_codes`). Otherwise they are whole.

Gradients of 16-bit weights are 4 bytes wide when anything is added to them, and 2 otherwise
(docs/decisions/0005-gradient-precision.md).

Code declares the purpose of what it allocates: `@takes("buffers")` where tensors move between ranks, `@takes("logits")`
for the loss. It applies to all allocations while the function runs, in its own thread. The innermost decorator counts.

Sizes of buffers stand here because the engine allocates them and the planner counts them.
"""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

from meshwright.spec.layout.layout import (
    Layout,
    expert_place,
    expert_replicas,
    layers_of_stages,
    own_stages,
    place_of,
    ranks_along,
)
from meshwright.spec.layout.schedule import stage_rank
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.rules.passes import shares_codes
from meshwright.spec.weights.boxes import FP32_STATES, Box, StateStorage, boxes_of, bytes_of_codes, shard
from meshwright.spec.weights.inventory import Parameter, parameters, tp_holders, tp_parts

STATES = ("parameters", "shards", "gradients", "masters", "moments", "counters")
"""Memory that a rank keeps from step to step. Counters are the optimizer's step numbers, one per tensor."""
KINDS = (*STATES, "activations", "logits", "buffers", "temporaries", "tokens", "staging")
"""Memory of tensors, by purpose."""
PLANNED = (*KINDS, "reserve")
"""The same, and the memory that the planner reserves for everything but tensors."""
P = ParamSpec("P")
R = TypeVar("R")
Purpose = Literal["", "buffers", "logits", "temporaries", "host"]
"""Kinds of memory (`KINDS`) that only their allocator can tell."""
_purpose: ContextVar[Purpose] = ContextVar("purpose", default="")
Phase = Literal["step", "update"]
PHASES: tuple[Phase, ...] = ("step", "update")
COUNTER_BYTES = 4
TOKEN_BYTES = 16
"""A token and its target, int64."""
LATE = ("pp", "tp")
"""Axes along which gradients are summed after data parallelism, in this order."""
BUCKET_BYTES = 8 * 2**20
"""Gradients that one all-reduce sums (parallel/axes/data.py): size at which a bucket is full, so blocks of small
models share one. Besides its bytes, an all-reduce of Gloo costs half a millisecond of processor time for two processes
on two cores (docs/decisions/0042)."""
CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Bytes of fp32 logits that a loss computes at a time, by kind of device."""
ADDED_AT_ONCE = 2**19
"""Elements of a 16-bit product that a CPU adds to fp32 sums at a time: 1 MiB, and 2 MiB widened."""
ROW_BYTES = 16
"""Alignment of rows that the fast matrix products of a GPU require: they read operands 16 bytes at a time (TMA,
`ldmatrix`, vector loads). Otherwise cuBLAS falls back to kernels of an older generation: on an H200 in bf16
`cutlass_75_tensorop_s1688gemm`. GPT-2's head of 50,257 rows took 64 of 117 ms of a step. A step with 50,304 rows is
1.78 times as fast (64 x 1,024 tokens, torch 2.11, 2026-11-27)."""
PADDED_TO = 128
"""Multiple to which an unaligned width is padded, in columns: the tile of the fast kernels."""
SAMPLING_BLOCK = 16
"""Positions of a block of the cache with which a student samples during training (distillation_on_policy)."""
SPARE_BLOCKS = 2
"""Blocks that belong to no answer: one of zeros, and one that is never read."""
MOST_SAMPLED = 64
"""Answers that are sampled at once. Others wait."""
MOST_CACHE_BYTES = 2**30
"""Largest cache."""


def purpose() -> Purpose:
    """Return the purpose that the innermost running function declared. Empty = none."""
    return _purpose.get()


def takes(kind: Purpose) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: memory allocated by the function has this purpose."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            # a context variable has a value of its own in each thread, unlike a global
            before = _purpose.set(kind)
            try:
                return function(*args, **kwargs)
            finally:
                _purpose.reset(before)

        return inside

    return decorated


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementWidths:
    """Bytes per element of each kind."""

    parameter: int
    gradient: int
    master: int
    shard: int = 0
    """Bytes per element of a shard. 0 = as a parameter."""


WIDTHS = {
    "fp32": ElementWidths(parameter=4, gradient=4, master=0),
    "bf16": ElementWidths(parameter=2, gradient=2, master=4),
    "fp16": ElementWidths(parameter=2, gradient=2, master=4),
}
"""Widths by recipe.precision. With fp32 moments a parameter takes 16 bytes either way: 4 + 4 + 8 or 2 + 2 + 4 + 4 + 4.
A gradient that is a sum is `gradient_bytes` wide. Moments: spec/weights/boxes.py."""


def master_bytes(precision: str, storage: StateStorage) -> int:
    """Return the number of bytes per element of a master weight."""
    return WIDTHS[precision].master if storage.masters else 0


def shards_are_masters(precision: str, layout: Layout, storage: StateStorage, reduce_dtype: str = "fp32") -> bool:
    """Return whether the shards of 16-bit weights are their fp32 masters, rounded when they are gathered."""
    return layout.zero > 0 and reduce_dtype == "fp32" and master_bytes(precision, storage) > 0


def adds_gradients(layout: Layout, micro_batches: int) -> bool:
    """Return whether any gradient is a sum over micro-batches, or over ranks that read other tokens.

    Experts may be spread over fewer ranks than the tp group that they borrow. The remaining ranks hold the same ones.
    """
    return micro_batches > 1 or layout.dp * layout.cp > 1 or 1 < layout.ep < layout.tp


def gradient_bytes(precision: str, layout: Layout, *, micro_batches: int = 1, reduce_dtype: str = "fp32") -> int:
    """Return the number of bytes per element of a gradient, for steps of at most `micro_batches` on a rank."""
    wide = reduce_dtype == "fp32" and adds_gradients(layout, micro_batches)
    return 4 if wide else WIDTHS[precision].gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """One parameter on one rank: the box that tensor and expert parallelism leave, which `ranks` share under ZeRO."""

    parameter: Parameter
    box: Box
    ranks: int = 1
    index: int = 0

    @property
    def code_bytes(self) -> int:
        """Bytes of its codes and scales, if it is quantized."""
        return bytes_of_codes(self.parameter.scheme, self.box, self.ranks)

    @property
    def owned_box(self) -> Box:
        """Part that this rank updates."""
        return shard(self.box, self.ranks, self.index)

    @property
    def owned(self) -> int:
        """Elements that this rank updates."""
        return self.owned_box.numel

    @property
    def padded(self) -> int:
        """Elements of a shard with its padding, equal on all ranks: those of the first rank."""
        return shard(self.box, self.ranks, 0).numel


def list_held(shape: ModelShape, layout: Layout, rank: int) -> list[HeldParameter]:
    """List every parameter that a rank holds any part of. A tied head's matrix is also on the last stage."""
    return list_held_of(parameters_of(shape, layout, rank), shape, layout, rank)


def list_held_of(selected: Sequence[Parameter], shape: ModelShape, layout: Layout, rank: int) -> list[HeldParameter]:
    """List the selected parameters as a rank holds them."""
    held_boxes = boxes_of(selected, shape, layout, rank)
    coordinates = place_of(layout, rank)
    sharers = (layout.dp_shard * layout.cp, coordinates["dp_shard"] * layout.cp + coordinates["cp"])
    _, expert_index, copies = expert_place(layout, rank)
    expert_sharers = (copies, expert_index) if layout.ep > 1 else sharers
    held_parameters = []
    for parameter in selected:
        ranks, index = expert_sharers if parameter.group == "expert" else sharers
        # Codes are sharded by a rule of their own.
        shared = shares_codes(layout) if parameter.scheme else layout.zero > 0
        ranks, index = (ranks, index) if shared else (1, 0)
        held_parameters.append(
            HeldParameter(parameter=parameter, box=held_boxes[parameter.name], ranks=ranks, index=index)
        )
    return held_parameters


def parameters_of(shape: ModelShape, layout: Layout, rank: int) -> list[Parameter]:
    """List the parameters of a rank's stages. The last stage also has a tied head's matrix."""
    stages, ranges = own_stages(layout, place_of(layout, rank)["pp"]), layers_of_stages(shape.layers, layout)
    layers = {layer for stage in stages for layer in ranges[stage]}
    # Parameters outside the layers belong to the ends of the pipeline.
    first, last = 0 in stages, len(ranges) - 1 in stages
    outside = {"embedding"} if first else set()
    outside |= {"norm", "head"} if last else set()
    return [
        parameter
        for parameter in parameters(shape)
        if (parameter.layer in layers if parameter.layer >= 0 else parameter.group in outside)
        or (parameter.name == "embed.weight" and shape.tied and last)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Parameters of which `ranks`, which differ along one axis, hold the very same elements."""

    axis: str
    """pp (both ends of a tied model), tp, or a group of data-parallel ranks (data, replicate, expert_data)."""
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    partial: bool
    """Each rank's gradient is only a part: the whole gradient is the sum over `ranks`."""

    @property
    def late(self) -> bool:
        """The sum over `ranks` remains to be taken after data parallelism."""
        return self.partial and self.axis in LATE


def list_common(shape: ModelShape, layout: Layout, rank: int) -> tuple[Common, ...]:
    """Return the parameters that a rank holds in common with others, each sum of gradients once per axis."""
    # Grouped by ranks, so that each sum is one call for many parameters.
    groups: dict[tuple[str, tuple[int, ...], bool], list[str]] = {}
    ends, coordinates = _tied_ends(shape, layout, rank), place_of(layout, rank)
    for parameter in parameters_of(shape, layout, rank):
        if parameter.scheme:  # no parameter of the engine
            continue
        # Holders of the same part are neighbours in rank, since tp is the innermost axis.
        n, parts = tp_holders(parameter, shape, layout), tp_parts(parameter, shape, layout)
        first = rank - coordinates["tp"] % n
        for axis, ranks, partial in (
            ("pp", ends if parameter.name == "embed.weight" else (), True),
            ("tp", tuple(range(first, first + n)), parts > 1),
            (*_replicas(parameter, layout, rank), True),
        ):
            if len(ranks) > 1:
                groups.setdefault((axis, ranks, partial), []).append(parameter.name)
    in_order = sorted(groups.items(), key=lambda group: (*LATE, group[0][0]).index(group[0][0]))
    return tuple(
        Common(axis=axis, ranks=ranks, names=tuple(names), partial=partial)
        for (axis, ranks, partial), names in in_order
    )


def _replicas(parameter: Parameter, layout: Layout, rank: int) -> tuple[str, tuple[int, ...]]:
    """Return (axis, data-parallel ranks that hold the same elements), with ZeRO's cut included."""
    if layout.zero:
        return "replicate", ranks_along(layout, ("dp_replicate",), rank)
    if layout.ep > 1 and parameter.group == "expert":
        return "expert_data", expert_replicas(layout, rank)
    return "data", ranks_along(layout, ("dp_replicate", "dp_shard", "cp"), rank)


def _tied_ends(shape: ModelShape, layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the first and last rank of this pipeline when both hold a tied matrix and this rank is one of them."""
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
    """Return the bytes of one rank by phase ("step" and "update") and kind (purpose.STATES), without empty kinds."""
    gradient = gradient_bytes(precision, layout, micro_batches=micro_batches, reduce_dtype=reduce_dtype)
    width = replace(WIDTHS[precision], gradient=gradient, master=master_bytes(precision, storage))
    if shards_are_masters(precision, layout, storage, reduce_dtype):
        width = replace(width, master=0, shard=width.master)  # counted once, as shards
    held_parameters = list_held(shape, layout, rank)
    moments = sum(moment_bytes(held_parameter, storage) for held_parameter in held_parameters)
    return {
        phase: {kind: size for kind, size in _sizes(held_parameters, layout, phase, width, moments).items() if size}
        for phase in PHASES
    }


def moment_bytes(held_parameter: HeldParameter, storage: StateStorage) -> int:
    """Return the number of bytes of the moments of this rank's part. 0 for a frozen parameter."""
    if not held_parameter.parameter.trained:
        return 0
    return storage.format_of(held_parameter.parameter).nbytes(held_parameter.owned_box.sizes)


def written_bytes(
    shape: ModelShape, layout: Layout, precision: str, rank: int = 0, *, storage: StateStorage = FP32_STATES
) -> int:
    """Return the number of bytes of weights and optimizer states that a rank writes to a checkpoint.

    Identical pieces are written by one rank, and all ranks write equally much. torch decides which rank writes a
    tensor, so the real number may differ by a tensor.
    """
    bytes_each = WIDTHS[precision].parameter + master_bytes(precision, storage)
    ranks, total = layout.world // layout.pp, 0.0
    for held_parameter in list_held(shape, layout, rank):
        if not held_parameter.parameter.trained:
            continue
        # Ranks of a stage that hold the same elements, ZeRO included: they share the writing.
        copies = ranks * held_parameter.box.numel / held_parameter.parameter.numel / held_parameter.ranks
        total += (held_parameter.owned * bytes_each + moment_bytes(held_parameter, storage)) / max(1.0, copies)
    return round(total)


def _sizes(
    parts: list[HeldParameter], layout: Layout, phase: Phase, width: ElementWidths, moments: int
) -> dict[str, int]:
    """Return the bytes of each kind.

    Weight gradients of a pipeline may follow the backward pass. Nothing is reduced and no parameter resharded before
    the last gradient of the stage.
    """
    # Codes stay as they are in both moments. The rest depends on what ZeRO has gathered.
    codes = sum(part.code_bytes for part in parts)
    parts = [part for part in parts if not part.parameter.scheme]
    zero, late, inside = layout.zero, layout.pp > 1, phase == "step"
    whole = inside and zero > 0 and (zero < 3 or late)
    whole_gradients = zero == 0 or (inside and (zero == 1 or late))
    trained = [part for part in parts if part.parameter.trained]
    padded, learns = sum(part.padded for part in parts), sum(part.padded for part in trained)
    shards = learns * (width.shard or width.parameter) + (padded - learns) * width.parameter
    gathered = sum(part.padded * part.ranks for part in parts)
    return {
        "parameters": (gathered * width.parameter if whole else shards) + codes,
        "shards": shards if whole else 0,
        "gradients": (sum(part.box.numel for part in trained) if whole_gradients else learns) * width.gradient,
        "masters": sum(part.owned for part in trained) * width.master,
        "moments": moments,
        "counters": len(trained) * COUNTER_BYTES,
    }


def bucket_counts(sizes: Iterable[float]) -> list[int]:
    """Return the number of units in each bucket, given the bytes of each unit in backward order."""
    counts, room = list[int](), 0.0
    for size in sizes:
        if room > 0:
            counts[-1] += 1
        else:
            counts.append(1)
            room = BUCKET_BYTES
        # room may fall below zero: the unit that fills a bucket still belongs to it
        room -= size
    return counts


def is_aligned(columns: float, itemsize: float) -> bool:
    """Return whether all rows of a contiguous matrix with `columns` numbers each begin at multiples of ROW_BYTES."""
    return columns * itemsize % ROW_BYTES == 0


def padded_columns(columns: int, itemsize: float) -> int:
    """Return the width in memory of rows with `columns` numbers of `itemsize` bytes."""
    return columns if is_aligned(columns, itemsize) else -(-columns // PADDED_TO) * PADDED_TO


def at_once(recipe: Recipe, layout: Layout) -> int:
    """Return the number of answers that a rank samples at once: the rows of its share of a step."""
    return min(MOST_SAMPLED, max(1, recipe.largest.global_batch // layout.dp))


def position_bytes(shape: ModelShape, width: int) -> int:
    """Return the number of bytes of keys and values of a position in all layers, `width` bytes each."""
    if shape.mla is None:
        numbers = 2 * shape.kv_heads * shape.head_dim
    elif shape.lora is None:  # the latent vector itself is cached
        numbers = shape.mla.kv_rank + shape.mla.rope_dim
    else:
        numbers = shape.kv_heads * (shape.head_dim + shape.mla.v_dim)
    return shape.layers * numbers * width


def cache_bytes(shape: ModelShape, recipe: Recipe, layout: Layout, width: int) -> int:
    """Return the number of bytes of the cache of a rank that samples."""
    block_bytes = SAMPLING_BLOCK * position_bytes(shape, width)
    # each answer may become as long as the sequence, though few do
    wanted = at_once(recipe, layout) * -(-min(recipe.sequence, shape.max_positions) // SAMPLING_BLOCK)
    # without a single block no answer could be sampled at all
    return (max(1, min(wanted, MOST_CACHE_BYTES // block_bytes)) + SPARE_BLOCKS) * block_bytes
