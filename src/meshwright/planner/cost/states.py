"""Parameters, gradients and optimizer states of a pipeline rank, in bytes: the counting of spec/held.py without walking
every layer, since all layers of a kind are alike. Equal to it to the byte (tests)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod

from meshwright.planner.cost.stack import Stack
from meshwright.spec.boxes import boxes, sharded_dim
from meshwright.spec.code_cuts import bytes_of_codes, lines_of_codes, share_bytes
from meshwright.spec.frozen_code_rules import shares_codes
from meshwright.spec.held import COUNTER_BYTES, WIDTHS, gradient_bytes, master_bytes, shards_are_masters
from meshwright.spec.inventory import PREDICTOR, parameters
from meshwright.spec.layout import Layout
from meshwright.spec.optimizer_states import FP32_STATES, MomentFormat, StateStorage
from meshwright.spec.shape import ModelShape

Size = tuple[tuple[int, ...], bool, MomentFormat, bool, int, int]
"""(sizes of a parameter, whether it is an expert's, how its moments are stored, whether it is trained, bytes of
one that is held as codes, lines of its run)."""
Sizes = tuple[Size, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSizes:
    """What tensor and expert parallelism leave of each part of a model on a rank (the first, which has the most)."""

    embedding: Sizes
    dense: Sizes
    routed: Sizes
    norm: Sizes
    """And what stands behind the last layer beside it."""
    head: Sizes
    dense_linear: Sizes = ()
    routed_linear: Sizes = ()
    """Of layers with linear attention, where there are any."""


def layer_kind(shape: ModelShape, layer: int) -> str:
    """The field of LocalSizes that a layer's parameters are in."""
    kind = "routed" if shape.is_moe_layer(layer) else "dense"
    return f"{kind}_linear" if shape.linear_of(layer) else kind


@cache
def layer_kinds(shape: ModelShape) -> tuple[str, ...]:
    """The same of every layer."""
    return tuple(layer_kind(shape, layer) for layer in range(shape.layers))


def number_of_kinds(shape: ModelShape, layers: Iterable[int]) -> tuple[tuple[str, int], ...]:
    """How many of these layers are of each kind, in the order of their names."""
    return tuple(sorted(Counter(map(layer_kinds(shape).__getitem__, layers)).items()))


@cache
def pieces(shape: ModelShape, tp: int, ep: int, storage: StateStorage = FP32_STATES) -> LocalSizes:
    """The parts of a shape; layers by their kind."""
    first = {layer_kind(shape, layer): layer for layer in reversed(range(shape.layers))}
    small = replace(shape, layers=max(first.values()) + 1)
    found = boxes(small, Layout(dp_shard=ep, tp=tp, ep=ep), 0)
    groups: dict[str, list[Size]] = {}
    for parameter in parameters(small):
        box = found[parameter.name]
        codes = bytes_of_codes(parameter.scheme, box), lines_of_codes(parameter.scheme, box)
        kind = parameter.group if parameter.layer < 0 else layer_kind(small, parameter.layer)
        kind = "norm" if parameter.name.startswith(PREDICTOR) else kind
        if parameter.layer >= 0 and parameter.layer != first[kind]:
            continue
        size = box.sizes, parameter.group == "expert", storage.of(parameter), parameter.trained, *codes
        groups.setdefault(kind, []).append(size)
    groups.setdefault("head", [groups["embedding"][0]])
    return LocalSizes(**{part.name: tuple(groups.get(part.name, ())) for part in fields(LocalSizes)})


@cache
def largest_weight(shape: ModelShape, tp: int, ep: int, routed: bool) -> int:
    """Elements of the largest tensor of a layer on a rank that has a gradient."""
    found = pieces(shape, tp, ep)
    some = found.routed + found.routed_linear if routed else found.dense + found.dense_linear
    return max((prod(sizes) for sizes, _, _, trained, *_ in some if trained), default=0)


@cache
def largest_coded(shape: ModelShape, tp: int, ep: int, group: str) -> int:
    """Elements on a rank of the largest frozen matrix of a group that is held as codes, of stacks of one expert's; 0:
    none."""
    found = boxes(shape, Layout(dp_shard=ep, tp=tp, ep=ep), 0)
    some = (found[one.name].sizes[-2:] for one in parameters(shape) if one.scheme and one.group == group)
    return max(map(prod, some), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementCounts:
    """Elements on one rank: `whole` without ZeRO, `shard` its padded share, `gathered` all shares; the same of what is
    trained, of which it updates `own`; `tensors` that are; and the bytes of their `moments`, which are not the same for
    each element."""

    whole: int
    shard: int
    own: int
    gathered: int
    tensors: int
    moments: int
    learned: int
    learned_gathered: int
    codes: int
    """Bytes of frozen matrices that are codes and scales, which are in no other number here."""
    codes_gathered: int
    """Of those of them that ranks share, all shares."""


def counts(
    shape: ModelShape, layout: Layout, layers: Sequence[int], *, first: bool, last: bool,
    storage: StateStorage = FP32_STATES,
) -> ElementCounts:  # fmt: skip
    """Of the layers (and ends) that a pipeline rank holds."""
    found = pieces(shape, layout.tp, layout.ep, storage)
    parts: Counter[Size] = Counter()
    for kind, times in number_of_kinds(shape, layers):
        for size in getattr(found, kind):
            parts[size] += times
    ends = [*(found.embedding if first else ()), *(found.norm if last else ())]
    if last and not (shape.tied and first):
        ends += found.head
    for size in ends:
        parts[size] += 1
    return _count(parts, layout)


def expert_counts(shape: ModelShape, layout: Layout, layer: int) -> ElementCounts:
    """Of the experts of a layer."""
    return _count(Counter(size for size in _sizes(shape, layout, layer) if size[1]), layout)


def largest_cut_stack(shape: ModelShape, layout: Layout, layer: int) -> int:
    """Elements on a rank of the largest stack of a layer's experts that ZeRO cuts inside of experts; 0: none."""
    ranks, stacks = cut_over(layout)[1], [size for size in _sizes(shape, layout, layer) if size[1] and size[3]]
    return max((prod(sizes) for sizes, *_ in stacks if sharded_dim(sizes, ranks)), default=0)


def _sizes(shape: ModelShape, layout: Layout, layer: int) -> Sizes:
    sizes: Sizes = getattr(pieces(shape, layout.tp, layout.ep), layer_kind(shape, layer))
    return sizes


def cut_over(layout: Layout) -> tuple[int, int]:
    """Ranks over which ZeRO cuts a parameter, and an expert's."""
    ranks = layout.dp_shard * layout.cp if layout.zero else 1
    return ranks, ranks * layout.tp // layout.ep if layout.zero and layout.ep > 1 else ranks


def _count(parts: Counter[Size], layout: Layout) -> ElementCounts:
    ranks, same = cut_over(layout)
    whole = shard = gathered = tensors = moments = learned = own = learned_gathered = codes = codes_gathered = 0
    for (sizes, expert, stored, trained, coded, lines), times in parts.items():
        n = same if expert else ranks
        if coded:
            share = share_bytes(lines, n) if shares_codes(layout) and n > 1 else 0
            codes += times * (share or coded)
            codes_gathered += times * share * n
            continue
        dim = sharded_dim(sizes, n)
        numel = prod(sizes)
        cut = (*sizes[:dim], -(-sizes[dim] // n), *sizes[dim + 1 :])
        each = cut[dim] * (numel // sizes[dim])
        whole += times * numel
        shard += times * each
        gathered += times * each * n
        if trained:
            tensors += times
            moments += times * stored.nbytes(cut)
            learned += times * numel
            own += times * each
            learned_gathered += times * each * n
    return ElementCounts(
        whole=whole, shard=shard, own=own, gathered=gathered, tensors=tensors, moments=moments, learned=learned,
        learned_gathered=learned_gathered, codes=codes, codes_gathered=codes_gathered,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes by kind inside the step and while the optimizer runs."""

    step: dict[str, float]
    update: dict[str, float]
    parameter_bytes: float
    """Of an element."""
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
    """spec/held.py's table with the stack's widths; `micro_batches` of a step on a rank. `count` was made with the same
    `storage`."""
    width = WIDTHS[precision]
    sixteen = precision != "fp32"
    gradient = stack.gradient_bytes if sixteen else width.gradient
    if stack.own:
        gradient = gradient_bytes(precision, layout, micro_batches=micro_batches, reduce_dtype=reduce_dtype)
    zero, late = layout.zero, layout.pp > 1
    beside = stack.sharding == "fully_shard"
    shard = stack.shard_bytes if stack.shard_bytes and zero == 3 and sixteen else width.parameter
    if stack.own and shards_are_masters(precision, layout, storage, reduce_dtype):
        shard = width.master
    master = 0 if shard > width.parameter else master_bytes(precision, storage)
    kinds = {}
    for inside in (True, False):
        whole = inside and zero > 0 and (zero < 3 or late) if beside else zero < 3
        whole_gradients = zero == 0 or (inside and (zero == 1 or late)) if beside else zero < 2
        shards = count.own * shard + (count.shard - count.own) * width.parameter
        parameters = count.gathered * width.parameter if whole else shards
        kinds[inside] = {
            "parameters": count.codes
            + (parameters if beside or zero == 3 else count.whole * (width.parameter if whole else shard)),
            "shards": shards if beside and whole and zero else 0.0,
            "gradients": (count.learned if whole_gradients else count.own) * gradient,
            "masters": count.own * master,
            "moments": count.moments,
            "counters": count.tensors * COUNTER_BYTES,
        }
    return States(step=kinds[True], update=kinds[False], parameter_bytes=width.parameter, gradient_bytes=gradient)
