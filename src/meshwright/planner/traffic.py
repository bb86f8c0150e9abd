"""What a rank sends in a step: axis, collective, calls, bytes. For Meshwright's own stack the very numbers that the
trainer's ledger counts (tests), except those of learned routing, which is taken to be even.

Bytes are those that the rank sends, as rings do: with n ranks, all-reduce 2 (n-1)/n of the tensor, all-gather,
reduce-scatter and all-to-all (n-1)/n of the whole one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from math import prod
from typing import NamedTuple

from meshwright.planner.block import Block, Local, embedding, head, layer, local
from meshwright.planner.stack import MESHWRIGHT, Stack
from meshwright.planner.stages import ranks_of
from meshwright.planner.states import Sizes, pieces
from meshwright.planner.work import Exchange
from meshwright.spec.boxes import boxes
from meshwright.spec.held import WIDTHS
from meshwright.spec.layout import Layout
from meshwright.spec.places import own_stages
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import stage_layers, stage_rank
from meshwright.spec.shape import ModelShape


class Sent(NamedTuple):
    """All calls of one collective along one axis in a step."""

    axis: str
    collective: str
    calls: int
    sent_bytes: int


Calls = Iterator[tuple[str, str, int, float]]
"""(axis, collective, calls, bytes sent in each)."""
NAMES = {
    "all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all", "ring": "send",
}  # fmt: skip


def traffic(plan: Plan, pp_rank: int = 0, stack: Stack = MESHWRIGHT) -> tuple[Sent, ...]:
    """Of the ranks with place 0 on every axis but the pipeline's."""
    calls: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for axis, collective, times, each_bytes in _all(plan, pp_rank, stack):
        calls[axis, collective] += times
        sent[axis, collective] += times * int(each_bytes)
    return tuple(Sent(*key, calls[key], sent[key]) for key in sorted(calls) if calls[key])


def of_exchange(exchange: Exchange, ranks: int) -> tuple[int, float]:
    """(calls, bytes that a rank sends in each)."""
    times = round(exchange.times)
    if exchange.collective == "ring":
        return times * (ranks - 1), exchange.size_bytes / ranks
    rounds = 2 if exchange.collective == "all-reduce" else 1
    return times, rounds * exchange.size_bytes * (ranks - 1) / ranks


def _all(plan: Plan, pp_rank: int, stack: Stack) -> Calls:
    layout, recipe, shape = plan.layout, plan.recipe, plan.model
    width = WIDTHS[recipe.precision]
    batch = layout.micro_batch_of(recipe.global_batch)
    of = local(shape, stack, layout, recipe.sequence, batch, width.parameter, recipe.dropout)
    m = layout.micro_batches(recipe.global_batch)
    own = own_stages(layout, pp_rank)
    split = stage_layers(shape.layers, layout.pp * layout.vp)
    layers = [layer for stage in own for layer in split[stage]]
    first, last = 0 in own, len(split) - 1 in own
    yield from _of_blocks(of, layout, m, layers, first, last)
    yield from _of_borders(of, layout, m, own, len(split))
    modules = _modules(shape, layout, layers, first, last)
    if layout.zero:
        yield from _of_shards(layout, m, modules, width.parameter, width.gradient)
    else:
        yield from _of_replicas(layout, modules, width.gradient)
    yield from _of_common_gradients(shape, layout, layers, first, last, width.gradient)
    yield from _of_numbers(shape, layout)


def _of_blocks(of: Local, layout: Layout, m: int, layers: list[int], first: bool, last: bool) -> Calls:
    shape = of.shape
    routed = sum(shape.is_moe_layer(layer) for layer in layers)
    parts: list[tuple[Block, int]] = []
    if len(layers) > routed:
        parts.append((layer(of), len(layers) - routed))
    if routed:
        parts.append((layer(of, routed=True), routed))
    if first:
        parts.append((embedding(of), 1))
    if last:
        parts.append((head(of), 1))
    for block, times in parts:
        again = layout.recompute if block.boundary_bytes else "none"
        for exchange in exchanges(block, again):
            ranks, _ = ranks_of(layout, exchange.axis)
            number, each = of_exchange(exchange, ranks)
            yield exchange.axis, NAMES[exchange.collective], m * times * number, each


def exchanges(block: Block, recompute: str = "none") -> Iterator[Exchange]:
    """Of a micro-batch's forward and backward pass; what follows the last kept tensor is not repeated."""
    for place, op in enumerate(block.operations):
        yield from op.forward_exchanges
        yield from op.backward_exchanges
        if recompute != "none" and any(later.inputs for later in block.operations[place:-1]):
            yield from op.forward_exchanges


def _of_borders(of: Local, layout: Layout, m: int, own: tuple[int, ...], stages: int) -> Calls:
    if layout.pp == 1:
        return
    holders = stage_rank(layout.schedule, layout.pp, layout.vp)
    for stage in own:
        for other in (stage + 1, stage - 1):
            if 0 <= other < stages and holders[other] != holders[stage]:
                yield "pp", "send", m, of.between_bytes


Module = tuple[Sizes, bool]
"""(parameters that are gathered and reduced together, whether they are experts spread over ep)."""


def _modules(shape: ModelShape, layout: Layout, layers: list[int], first: bool, last: bool) -> list[Module]:
    """Each block, what is before and what is behind them; experts apart where they lie on other ranks."""
    found = pieces(shape, layout.tp, layout.ep)
    modules: list[Module] = []
    for number in layers:
        block = found.routed if shape.is_moe_layer(number) else found.dense
        modules.append((tuple(size for size in block if layout.ep == 1 or not size[2]), False))
        modules.append((tuple(size for size in block if layout.ep > 1 and size[2]), True))
    front = found.embedding if first else ()
    behind = (*found.norm, *(() if shape.tied and first else found.head)) if last else ()
    ends = [front, behind] if not layout.zero else [(*front, *behind)]
    return [(sizes, spread) for sizes, spread in [*modules, *((end, False) for end in ends)] if sizes]


def _numel(sizes: Iterable[tuple[int, int, bool]], ranks: int = 1) -> int:
    return sum(-(-rows // ranks) * row for rows, row, _ in sizes)


def _holders(layout: Layout) -> int:
    """Ranks of a replica that hold the same experts."""
    return layout.dp_shard * layout.cp * layout.tp // layout.ep


def _of_replicas(layout: Layout, modules: list[Module], gradient_bytes: float) -> Calls:
    for sizes, spread in modules:
        n = layout.dp_replicate * (_holders(layout) if spread else layout.dp_shard * layout.cp)
        if n > 1:
            axis = "expert_data" if spread else "data"
            yield axis, "all_reduce", 1, 2 * (n - 1) * _numel(sizes) * gradient_bytes // n


def _of_shards(layout: Layout, m: int, modules: list[Module], word: float, gradient_bytes: float) -> Calls:
    """ZeRO-2 reduces after each micro-batch, ZeRO-3 also gathers each block twice; under a pipeline once a step."""
    each = m if layout.pp == 1 else 1
    for place, (sizes, spread) in enumerate(modules):
        n, axis = (_holders(layout), "expert_shard") if spread else (layout.dp_shard * layout.cp, "shard")
        shard = _numel(sizes, n)
        outside = place == len(modules) - 1
        gathers = each * (1 if outside or layout.pp > 1 else 2) if layout.zero == 3 else 1
        if n > 1:
            yield axis, "all_gather", gathers, (n - 1) * shard * word
            yield axis, "reduce_scatter", each if layout.zero >= 2 else 1, (n - 1) * shard * gradient_bytes
        r = layout.dp_replicate
        if r > 1:
            yield "replicate", "all_reduce", 1, 2 * (r - 1) * shard * gradient_bytes // r


@cache
def _in_part(shape: ModelShape, tp: int, ep: int, sp: bool) -> dict[str, int]:
    """Elements that tp ranks hold in common while each has but a part of their gradient, by the part of the model."""
    first = shape.moe.first_dense if shape.moe else 0
    small = replace(shape, layers=min(shape.layers, first + 1))
    found: Counter[str] = Counter()
    for name, box in boxes(small, Layout(dp_shard=ep, tp=tp, ep=ep, sp=sp), 0).items():
        if box.sizes == box.whole and (sp or ".attention." in name or ".mlp." in name):
            number = name.split(".")[1] if name.startswith("layers.") else ""
            kind = ("routed" if small.is_moe_layer(int(number)) else "dense") if number else name.split(".")[0]
            if kind != "dense" or int(number) == 0:
                found[kind] += prod(box.sizes)
    return dict(found)


def _of_common_gradients(
    shape: ModelShape, layout: Layout, layers: list[int], first: bool, last: bool, gradient_bytes: float
) -> Calls:
    n = layout.dp_shard * layout.cp if layout.zero else 1
    if shape.tied and layout.pp > 1 and first != last:
        yield "pp", "all_reduce", 1, _numel(pieces(shape, layout.tp, layout.ep).embedding[:1], n) * gradient_bytes
    t = layout.tp
    if t == 1:
        return
    part = _in_part(shape, t, layout.ep, layout.sp)
    routed = sum(shape.is_moe_layer(layer) for layer in layers)
    numel = (len(layers) - routed) * part.get("dense", 0) + routed * part.get("routed", 0)
    numel += part.get("norm", 0) if last else 0
    numel += part.get("positions", 0) if first else 0
    if numel:
        yield "tp", "all_reduce", 1, 2 * (t - 1) * (numel // n) * gradient_bytes // t
    if shape.mla is None and t > shape.kv_heads:
        copies = t // shape.kv_heads
        keys = 2 * shape.head_dim * (shape.hidden + (1 if shape.qkv_bias else 0)) * len(layers)
        yield "tp", "all_reduce", 1, 2 * (copies - 1) * (keys // n) * gradient_bytes // copies


def _of_numbers(shape: ModelShape, layout: Layout) -> Calls:
    """Tokens and sequences (float64), loss (and balance loss) (float32), the squared norm of the gradients."""
    n, p, world = layout.dp * layout.cp, layout.pp, layout.world
    losses = 2 if shape.moe else 1
    if n > 1:
        yield "data", "all_reduce", 2, 2 * (n - 1) * 8 // n
        yield "data", "all_reduce", losses, 2 * (n - 1) * 4 // n
    if p > 1:
        yield "pp", "all_reduce", losses, 2 * (p - 1) * 4 // p
    if world > 1:
        yield "world", "all_reduce", 1, 2 * (world - 1) * 4 // world
