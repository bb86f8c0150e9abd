"""Parameters, gradients and optimizer states of a pipeline rank, in bytes: the counting of spec/held.py without walking
every layer, since all layers of a kind are alike. Equal to it to the byte (tests)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from meshwright.planner.stack import Stack
from meshwright.spec.boxes import boxes
from meshwright.spec.held import COUNTER_BYTES, WIDTHS
from meshwright.spec.inventory import parameters
from meshwright.spec.layout import Layout
from meshwright.spec.shape import ModelShape

Sizes = tuple[tuple[int, int, bool], ...]
"""(rows, elements of a row, whether it is an expert's) of each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What tensor and expert parallelism leave of each part of a model on a rank (the first, which has the most)."""

    embedding: Sizes
    dense: Sizes
    routed: Sizes
    norm: Sizes
    head: Sizes


@cache
def pieces(shape: ModelShape, tp: int, ep: int) -> Pieces:
    """The parts of a shape; layers by their kind."""
    first = shape.moe.first_dense if shape.moe else 0
    small = replace(shape, layers=min(shape.layers, first + 1)) if first < shape.layers else replace(shape, layers=1)
    found = boxes(small, Layout(dp_shard=ep, tp=tp, ep=ep), 0)
    groups: dict[str, list[tuple[int, int, bool]]] = {}
    for parameter in parameters(small):
        sizes = found[parameter.name].sizes
        kind = parameter.group if parameter.layer < 0 else "routed" if small.is_moe_layer(parameter.layer) else "dense"
        if kind == "dense" and parameter.layer > 0:
            continue
        groups.setdefault(kind, []).append((sizes[0], prod(sizes[1:]), parameter.group == "expert"))
    head = groups.get("head", []) or [groups["embedding"][0]]
    return Pieces(
        embedding=tuple(groups["embedding"]),
        dense=tuple(groups.get("dense", ())),
        routed=tuple(groups.get("routed", ())),
        norm=tuple(groups["norm"]),
        head=tuple(head),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Elements on one rank: `whole` without ZeRO, `shard` its padded share, `own` what it updates, `tensors`."""

    whole: int
    shard: int
    own: int
    gathered: int
    tensors: int


def counts(shape: ModelShape, layout: Layout, layers: Sequence[int], *, first: bool, last: bool) -> Counts:
    """Of the layers (and ends) that a pipeline rank holds."""
    found = pieces(shape, layout.tp, layout.ep)
    routed = sum(shape.is_moe_layer(layer) for layer in layers)
    parts: Counter[tuple[int, int, bool]] = Counter()
    for sizes, times in ((found.dense, len(layers) - routed), (found.routed, routed)):
        for size in sizes:
            parts[size] += times
    ends = [*(found.embedding if first else ()), *(found.norm if last else ())]
    if last and not (shape.tied and first):
        ends += found.head
    for size in ends:
        parts[size] += 1
    return _count(parts, layout)


def _count(parts: Counter[tuple[int, int, bool]], layout: Layout) -> Counts:
    ranks = layout.dp_shard * layout.cp if layout.zero else 1
    same = layout.dp_shard * layout.cp * layout.tp // layout.ep if layout.zero and layout.ep > 1 else ranks
    whole = shard = own = gathered = tensors = 0
    for (rows, row, expert), times in parts.items():
        n = same if expert else ranks
        each = -(-rows // n)
        whole += times * rows * row
        shard += times * each * row
        own += times * min(each, rows) * row
        gathered += times * each * n * row
        tensors += times
    return Counts(whole=whole, shard=shard, own=own, gathered=gathered, tensors=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes by kind inside the step and while the optimizer runs."""

    step: dict[str, float]
    update: dict[str, float]
    parameter_bytes: float
    """Of an element."""
    gradient_bytes: float


def states(stack: Stack, layout: Layout, precision: str, count: Counts) -> States:
    """spec/held.py's table with the stack's widths."""
    width = WIDTHS[precision]
    sixteen = precision != "fp32"
    gradient = stack.gradient_bytes if sixteen else width.gradient
    master = stack.master_bytes if sixteen else width.master
    shard_gradient = stack.sharded_gradient_bytes if sixteen and layout.zero else 0.0
    zero, late = layout.zero, layout.pp > 1
    kinds = {}
    for inside in (True, False):
        whole = inside and zero > 0 and (zero < 3 or late)
        whole_gradients = zero == 0 or (inside and (zero == 1 or late))
        if stack.name != "meshwright":  # flat buffers: parameters whole until ZeRO-3, gradients until ZeRO-2
            whole, whole_gradients = zero < 3, zero < 2
        kinds[inside] = {
            "parameters": (count.gathered if whole else count.shard if zero == 3 or stack.name == "meshwright" else
                           count.whole) * width.parameter,
            "shards": count.shard * width.parameter if whole and zero and stack.name == "meshwright" else 0.0,
            "gradients": (count.whole if whole_gradients else count.shard) * gradient + count.shard * shard_gradient,
            "masters": count.own * master,
            "moments": count.own * width.moments,
            "counters": count.tensors * COUNTER_BYTES,
        }  # fmt: skip
    return States(step=kinds[True], update=kinds[False], parameter_bytes=width.parameter, gradient_bytes=gradient)
