"""Parameters, gradients and optimizer states of a pipeline rank, in bytes.

Counts like spec/memory/held.py without walking every layer, since all layers of a kind are alike. Tests check that both
agree to the byte.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod

from meshwright.planner.cost.stack import Stack
from meshwright.spec.layout.layout import Layout
from meshwright.spec.memory.held import COUNTER_BYTES, WIDTHS, gradient_bytes, master_bytes, shards_are_masters
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.rules.passes import shares_codes
from meshwright.spec.weights.boxes import (
    FP32_STATES,
    MomentFormat,
    StateStorage,
    boxes,
    bytes_of_codes,
    lines_of_codes,
    sharded_dim,
    share_bytes,
)
from meshwright.spec.weights.inventory import PREDICTOR, parameters

Size = tuple[tuple[int, ...], bool, MomentFormat, bool, int, int]
"""Sizes and storage of a parameter.

(sizes, True for an expert's, format of its moments, True if trained, bytes if quantized, lines of its run).
"""
Sizes = tuple[Size, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSizes:
    """Sizes of each part of a model after tensor and expert parallelism, on the first rank, which has most."""

    embedding: Sizes
    dense: Sizes
    routed: Sizes
    norm: Sizes
    """Final norm and what else follows the last layer."""
    head: Sizes
    dense_linear: Sizes = ()
    routed_linear: Sizes = ()
    """Layers with linear attention, if any."""


def layer_kind(shape: ModelShape, layer: int) -> str:
    """Return the field of LocalSizes that holds a layer's parameters."""
    kind = "routed" if shape.is_moe_layer(layer) else "dense"
    return f"{kind}_linear" if shape.linear_of(layer) else kind


@cache
def layer_kinds(shape: ModelShape) -> tuple[str, ...]:
    """Return the kind of every layer."""
    return tuple(layer_kind(shape, layer) for layer in range(shape.layers))


def number_of_kinds(shape: ModelShape, layers: Iterable[int]) -> tuple[tuple[str, int], ...]:
    """Count these layers by kind, sorted by name."""
    return tuple(sorted(Counter(map(layer_kinds(shape).__getitem__, layers)).items()))


@cache
def pieces(shape: ModelShape, tp: int, ep: int, storage: StateStorage = FP32_STATES) -> LocalSizes:
    """Return the local sizes of the parts of a shape, layers by kind."""
    first = {layer_kind(shape, layer): layer for layer in reversed(range(shape.layers))}
    # A model just deep enough for one layer of each kind costs far less to walk than the whole.
    small = replace(shape, layers=max(first.values()) + 1)
    local = boxes(small, Layout(dp_shard=ep, tp=tp, ep=ep), 0)
    groups: dict[str, list[Size]] = {}
    for parameter in parameters(small):
        box = local[parameter.name]
        codes = bytes_of_codes(parameter.scheme, box), lines_of_codes(parameter.scheme, box)
        kind = parameter.group if parameter.layer < 0 else layer_kind(small, parameter.layer)
        # Prediction heads stand behind the last layer, on the same rank as the final norm.
        kind = "norm" if parameter.name.startswith(PREDICTOR) else kind
        if parameter.layer >= 0 and parameter.layer != first[kind]:
            continue
        size = box.sizes, parameter.group == "expert", storage.format_of(parameter), parameter.trained, *codes
        groups.setdefault(kind, []).append(size)
    # A tied head is the embedding's matrix: another rank may hold it as a copy.
    groups.setdefault("head", [groups["embedding"][0]])
    return LocalSizes(**{part.name: tuple(groups.get(part.name, ())) for part in fields(LocalSizes)})


@cache
def largest_weight(shape: ModelShape, tp: int, ep: int, routed: bool) -> int:
    """Return the elements of a layer's largest trained tensor on a rank."""
    sizes = pieces(shape, tp, ep)
    tensors = sizes.routed + sizes.routed_linear if routed else sizes.dense + sizes.dense_linear
    return max((prod(sizes) for sizes, _, _, trained, *_ in tensors if trained), default=0)


@cache
def largest_coded(shape: ModelShape, tp: int, ep: int, group: str) -> int:
    """Return the elements on a rank of a group's largest quantized matrix (of stacks, one expert's). 0 = none."""
    local = boxes(shape, Layout(dp_shard=ep, tp=tp, ep=ep), 0)
    matrices = (matrix for matrix in parameters(shape) if matrix.scheme and matrix.group == group)
    return max((prod(local[matrix.name].sizes[-2:]) for matrix in matrices), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementCounts:
    """Elements on one rank: `whole` without ZeRO, `shard` its padded share, `gathered` all shares.

    `learned` and `learned_gathered` count the trained ones, of which the rank updates `updated`. `tensors` is the
    number of trained tensors, and `moments` the bytes of their moments, which differ between elements.
    """

    whole: int
    shard: int
    updated: int
    gathered: int
    tensors: int
    moments: int
    learned: int
    learned_gathered: int
    codes: int
    """Bytes of quantized frozen matrices, codes and scales. No other number includes them."""
    codes_gathered: int
    """Bytes of all shares of those that ranks share."""


def counts(
    shape: ModelShape, layout: Layout, layers: Sequence[int], *, first: bool, last: bool,
    storage: StateStorage = FP32_STATES,
) -> ElementCounts:  # fmt: skip
    """Count the elements of the layers (and ends) that a pipeline rank holds."""
    sizes = pieces(shape, layout.tp, layout.ep, storage)
    parts: Counter[Size] = Counter()
    for kind, times in number_of_kinds(shape, layers):
        for size in getattr(sizes, kind):
            parts[size] += times
    ends = [*(sizes.embedding if first else ()), *(sizes.norm if last else ())]
    # A rank with both ends holds a tied matrix once.
    if last and not (shape.tied and first):
        ends += sizes.head
    for size in ends:
        parts[size] += 1
    return _count(parts, layout)


def expert_counts(shape: ModelShape, layout: Layout, layer: int) -> ElementCounts:
    """Count the elements of the experts of a layer."""
    return _count(Counter(size for size in _sizes(shape, layout, layer) if size[1]), layout)


def largest_cut_stack(shape: ModelShape, layout: Layout, layer: int) -> int:
    """Return the elements on a rank of a layer's largest stack of experts that ZeRO cuts inside experts. 0 = none."""
    ranks, stacks = layout.zero_ranks[1], [size for size in _sizes(shape, layout, layer) if size[1] and size[3]]
    return max((prod(sizes) for sizes, *_ in stacks if sharded_dim(sizes, ranks)), default=0)


def _sizes(shape: ModelShape, layout: Layout, layer: int) -> Sizes:
    sizes: Sizes = getattr(pieces(shape, layout.tp, layout.ep), layer_kind(shape, layer))
    return sizes


def _count(parts: Counter[Size], layout: Layout) -> ElementCounts:
    ranks, same = layout.zero_ranks
    whole = shard = gathered = tensors = moments = learned = updated = learned_gathered = codes = codes_gathered = 0
    for (sizes, expert, stored, trained, coded, lines), times in parts.items():
        n = same if expert else ranks
        # Codes are never trained, and shared by lines of their run instead of by a dim.
        if coded:
            share = share_bytes(lines, n) if shares_codes(layout) and n > 1 else 0
            codes += times * (share or coded)
            codes_gathered += times * share * n
            continue
        dim = sharded_dim(sizes, n)
        numel = prod(sizes)
        # ZeRO pads the cut dim to equal shares, so the first rank holds a full one.
        cut = (*sizes[:dim], -(-sizes[dim] // n), *sizes[dim + 1 :])
        each = cut[dim] * (numel // sizes[dim])
        whole += times * numel
        shard += times * each
        gathered += times * each * n
        if trained:
            tensors += times
            moments += times * stored.nbytes(cut)
            learned += times * numel
            updated += times * each
            learned_gathered += times * each * n
    return ElementCounts(
        whole=whole, shard=shard, updated=updated, gathered=gathered, tensors=tensors, moments=moments, learned=learned,
        learned_gathered=learned_gathered, codes=codes, codes_gathered=codes_gathered,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes by kind during the step and during the optimizer update."""

    step: dict[str, float]
    update: dict[str, float]
    parameter_bytes: float
    """Bytes per element."""
    gradient_bytes: float


def states(
    stack: Stack,
    layout: Layout,
    precision: str,
    count: ElementCounts,
    micro_batches: int = 1,
    reduce_dtype: str = "fp32",
    *,
    storage: StateStorage = FP32_STATES,
) -> States:
    """Return bytes per rank by kind, inside a step and at the update: spec/memory/held.py with the stack's widths.

    `micro_batches` counts those of a step on a rank. `count` must be computed with the same `storage`.
    """
    width = WIDTHS[precision]
    is_16_bit = precision != "fp32"
    gradient = stack.gradient_bytes if is_16_bit else width.gradient
    if stack.is_meshwright:
        gradient = gradient_bytes(precision, layout, micro_batches=micro_batches, reduce_dtype=reduce_dtype)
    zero, is_pipelined = layout.zero, layout.pp > 1
    keeps_shards_apart = stack.sharding == "fully_shard"
    # Under ZeRO-3 the shards may be the fp32 masters themselves: no second copy exists then.
    shard = stack.shard_bytes if stack.shard_bytes and zero == 3 and is_16_bit else width.parameter
    if stack.is_meshwright and shards_are_masters(precision, layout, storage, reduce_dtype):
        shard = width.master
    master = 0 if shard > width.parameter else master_bytes(precision, storage)
    kinds = {}
    # Inside the step gathered copies may exist; at the update only what persists does.
    for inside in (True, False):
        whole = inside and zero > 0 and (zero < 3 or is_pipelined) if keeps_shards_apart else zero < 3
        whole_gradients = zero == 0 or (inside and (zero == 1 or is_pipelined)) if keeps_shards_apart else zero < 2
        shards = count.updated * shard + (count.shard - count.updated) * width.parameter
        parameters = count.gathered * width.parameter if whole else shards
        kinds[inside] = {
            "parameters": count.codes
            + (parameters if keeps_shards_apart or zero == 3 else count.whole * (width.parameter if whole else shard)),
            "shards": shards if keeps_shards_apart and whole and zero else 0.0,
            "gradients": (count.learned if whole_gradients else count.updated) * gradient,
            "masters": count.updated * master,
            "moments": count.moments,
            "counters": count.tensors * COUNTER_BYTES,
        }
    return States(step=kinds[True], update=kinds[False], parameter_bytes=width.parameter, gradient_bytes=gradient)
