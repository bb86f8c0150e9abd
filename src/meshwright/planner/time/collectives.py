"""Traffic of a rank in a step: axis, collective, calls, bytes.

For Meshwright's engine tests check these figures against the trainer's ledger, except those of learned routing, which
is assumed even. Bytes are those that the rank sends, as rings do. With n ranks an all-reduce sends 2 (n-1)/n of the
tensor, an all-gather, reduce-scatter or all-to-all (n-1)/n of the whole one.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from meshwright.planner.cost import weight_product
from meshwright.planner.cost.block import LayerWork, embedding, head, layer
from meshwright.planner.cost.exchanges import Links
from meshwright.planner.cost.micro_batch import LocalShape, local_shape
from meshwright.planner.cost.stack import MESHWRIGHT, Stack
from meshwright.planner.cost.stage_costs import ranks_of
from meshwright.planner.cost.states import Size, Sizes, layer_kinds, number_of_kinds, pieces
from meshwright.planner.cost.work import Exchange
from meshwright.planner.time.update_passes import matrix_traffic
from meshwright.spec.layout.layout import Layout, layers_of_stages, own_stages, pipeline_ranks
from meshwright.spec.layout.schedule import stage_rank
from meshwright.spec.memory.held import WIDTHS, bucket_counts, list_common, list_held
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.spec.rules.passes import shares_codes
from meshwright.spec.weights.boxes import sharded_dim, share_bytes


class SentCalls(NamedTuple):
    """All calls of one collective along one axis in a step."""

    axis: str
    collective: str
    calls: int
    sent_bytes: int


class StageContents(NamedTuple):
    """Layers of a pipeline rank, and whether it has the embedding and the head."""

    layers: tuple[int, ...]
    first: bool
    last: bool

    @staticmethod
    def from_stages(stages: Sequence[int], split: Sequence[range]) -> "StageContents":
        """Return the contents of a rank with these stages. `split`: the layers of every stage."""
        layers = tuple(layer for stage in stages for layer in split[stage])
        return StageContents(layers, 0 in stages, len(split) - 1 in stages)


Calls = Iterator[tuple[str, str, int, float]]
"""(axis, collective, calls, bytes sent in each)."""
NAMES = {
    "all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all", "ring": "send",
}  # fmt: skip


def traffic(plan: Plan, pp_rank: int = 0, stack: Stack = MESHWRIGHT) -> tuple[SentCalls, ...]:
    """Return what the ranks with index 0 on every axis except the pipeline's send."""
    calls: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for axis, collective, times, each_bytes in _all_calls(plan, pp_rank, stack):
        calls[axis, collective] += times
        # Each call sends whole bytes, so rounding comes before the multiplication.
        sent[axis, collective] += times * int(each_bytes)
    return tuple(SentCalls(*key, calls[key], sent[key]) for key in sorted(calls) if calls[key])


def exchange_calls(exchange: Exchange, ranks: int) -> tuple[int, float]:
    """Return (calls, bytes that a rank sends in each)."""
    times = round(exchange.times)
    if exchange.collective == "ring":
        return times * (ranks - 1), exchange.size_bytes / ranks
    # A ring sums in two rounds: a reduce-scatter, then an all-gather.
    rounds = 2 if exchange.collective == "all-reduce" else 1
    return times, rounds * exchange.size_bytes * (ranks - 1) / ranks


def _all_calls(plan: Plan, pp_rank: int, stack: Stack) -> Calls:
    layout, recipe, shape = plan.layout, plan.recipe, plan.model
    width = WIDTHS[recipe.precision]
    batch = layout.micro_batch_of(recipe.global_batch)
    local = local_shape(
        shape, stack, layout, recipe.sequence, batch, width.parameter, dropout=recipe.dropout,
        documents=recipe.document_mask, gpu=plan.cluster.device.is_gpu, compares=recipe.traits.pairs,
        fake_quantize=recipe.fake_quantize,
    )  # fmt: skip
    m = layout.micro_batches(recipe.global_batch)
    stages, split = own_stages(layout, pp_rank), layers_of_stages(shape.layers, layout)
    contents = StageContents.from_stages(stages, split)
    # Gradients travel in the width of their sum, whatever the width they were computed in.
    summed = 4.0 if recipe.reduce_dtype == "fp32" else width.gradient
    # The first layers of each stage recompute, and repeat their exchanges.
    recomputed = {n for stage in stages for n in split[stage][: layout.recomputed(len(split[stage]))]}
    yield from _block_calls(local, layout, m, contents, recomputed)
    yield from _border_calls(local, layout, m, stages, len(split))
    if layout.zero:
        yield from _shard_calls(
            layout, m, layout.pp > 1, _units(shape, layout, contents), width.parameter, summed, shares_codes(layout)
        )
    else:
        yield from _replica_calls(shape, layout, contents, summed)
    first = pipeline_ranks(layout)[pp_rank]
    yield from _common_gradient_calls(shape, layout, first, summed)
    if recipe.optimizer == "muon":
        yield from matrix_traffic(shape, layout, first, recipe.precision)
    yield from _scalar_calls(layout, len(recipe.traits.figures))


class Sharing(NamedTuple):
    """Seconds of data parallelism, each collective by itself.

    Reducing all gradients once, gathering all parameters once, and summing gradients once per step over replicas that
    hold the same shards.
    """

    reduce_s: float = 0.0
    gather_s: float = 0.0
    copies_s: float = 0.0

    def worst(self, other: "Sharing") -> "Sharing":
        """Return the larger seconds of two ranks."""
        return Sharing(*map(max, self, other))


def sharing(shape: ModelShape, layout: Layout, held: StageContents, links: Links, word: float, summed: float,
            lump: bool) -> Sharing:  # fmt: skip
    """Return the seconds of the ledger's calls.

    Args:
        word: Bytes of a parameter as it travels.
        summed: Bytes of a gradient as it travels.
        lump: A collective takes everything at once, not unit by unit.
    """
    # A pipeline gathers once and reduces once; seen as one micro-batch these are the seconds of each.
    calls = (
        _shard_calls(layout, 1, False, _units(shape, layout, held), word, summed, shares_codes(layout))
        if layout.zero
        else _replica_calls(shape, layout, held, summed)
    )
    seconds = {"reduce": 0.0, "gather": 0.0, "copies": 0.0}
    sizes: dict[tuple[str, str], float] = {}
    for axis, collective, times, sent in calls:
        if collective == "all_gather":
            # ZeRO-3 gathers twice per pass; the timeline needs the seconds of one.
            times = max(1, times // 2) if layout.zero == 3 else times
        # A ring's sum sends everything twice.
        size = sent / (2 if collective == "all_reduce" else 1)
        if lump:
            sizes[axis, collective] = sizes.get((axis, collective), 0.0) + times * size
        else:
            seconds[_part(axis, collective)] += times * _seconds(layout, links, axis, collective, size)
    for (axis, collective), size in sizes.items():
        seconds[_part(axis, collective)] += _seconds(layout, links, axis, collective, size)
    return Sharing(seconds["reduce"], seconds["gather"], seconds["copies"])


def _part(axis: str, collective: str) -> str:
    return "copies" if axis == "replicate" else "gather" if collective == "all_gather" else "reduce"


def _seconds(layout: Layout, links: Links, axis: str, collective: str, round_bytes: float) -> float:
    """Return the seconds of one call whose rounds each send `round_bytes`."""
    holders = _holders(layout)
    ranks, stride = {
        "shard": (layout.dp_shard * layout.cp, layout.tp),
        "data": (layout.dp * layout.cp, layout.tp),
        "expert_shard": (holders, layout.ep),
        "expert_data": (layout.dp_replicate * holders, layout.ep),
        "replicate": ranks_of(layout, "dp_replicate"),
    }[axis]
    # A rank sends (n - 1) / n of the tensor in a round; Links takes the size of the whole tensor.
    return links.seconds(collective.replace("_", "-"), round_bytes * ranks / (ranks - 1), ranks, stride)


def _block_calls(local: LocalShape, layout: Layout, m: int, held: StageContents, recomputed: Collection[int]) -> Calls:
    """Yield the calls inside blocks. `recomputed`: the layers that recompute."""
    layers, first, last = held
    frozen = local.shape.lora is not None
    policy = layout.acting_recompute if local.stack.drops_scores_alone else layout.recompute
    # Layers of a kind with the same policy make the same calls; frozen first layers send no gradient.
    kinds = Counter(
        (local.shape.is_moe_layer(n), policy if n in recomputed else "none", frozen and n == 0) for n in layers
    )
    parts = [
        (_entered(layer(local, routed=routed), entered), again, times)
        for (routed, again, entered), times in kinds.items()
    ]
    parts += [(embedding(local), "none", 1)] if first else []
    parts += [(head(local), "none", 1)] if last else []
    for block, again, times in parts:
        for exchange in exchanges(block, again):
            ranks, _ = ranks_of(layout, exchange.axis)
            number, each = exchange_calls(exchange, ranks)
            yield exchange.axis, NAMES[exchange.collective], m * times * number, each


def _entered(block: LayerWork, entered: bool) -> LayerWork:
    """Return the block. `entered`: its input comes from no trained weight."""
    return replace(block, operations=weight_product.behind_frozen(block.operations)) if entered else block


def exchanges(block: LayerWork, recompute: str = "none") -> Iterator[Exchange]:
    """Yield the exchanges of a micro-batch's passes. What follows the last kept tensor is not repeated."""
    for index, op in enumerate(block.operations):
        yield from op.exchanges.forward
        yield from op.exchanges.backward
        repeats_nothing = recompute in ("none", "norms") or (
            recompute == "all-but-attention" and op.name == "attention"
        )
        if not repeats_nothing and any(later.inputs for later in block.operations[index:-1]):
            yield from op.exchanges.forward


def _border_calls(local: LocalShape, layout: Layout, m: int, rank_stages: tuple[int, ...], stages: int) -> Calls:
    if layout.pp == 1:
        return
    holders = stage_rank(layout.schedule, layout.pp, layout.vp)
    for stage in rank_stages:
        for other in (stage + 1, stage - 1):
            # The two stages at the tip of a V lie on one rank, which sends itself nothing.
            if 0 <= other < stages and holders[other] != holders[stage]:
                yield "pp", "send", m, local.between_bytes


class ShardingUnit(NamedTuple):
    """Parameters that are gathered and reduced together."""

    sizes: Sizes
    spread: bool = False
    """Experts spread over the ranks of ep."""
    stays_whole: bool = False
    """Whole from the forward to the backward pass, under ZeRO-3 too."""
    times: int = 1
    """Number of such units."""

    @property
    def learned(self) -> Sizes:
        """The trained part."""
        return tuple(size for size in self.sizes if size[3])


def _ends(shape: ModelShape, layout: Layout, held: StageContents) -> tuple[Sizes, Sizes]:
    """Return embedding with positions, and norm with head, as far as a rank has them. A tied matrix is in the first."""
    sizes = pieces(shape, layout.tp, layout.ep)
    front, behind = sizes.embedding if held.first else (), sizes.norm if held.last else ()
    if shape.tied:
        return (*front, *(sizes.head if held.last and not held.first else ())), behind
    return front, (*behind, *sizes.head) if held.last else behind


def _units(shape: ModelShape, layout: Layout, held: StageContents) -> Iterator[ShardingUnit]:
    """Yield each block, embedding with positions, and norm with head.

    Experts on other ranks are separate units. Under ZeRO a tied matrix makes both ends one unit.
    """
    apart, (front, behind) = layout.ep > 1, _ends(shape, layout, held)
    units = list(_blocks(shape, layout, held.layers))
    # Experts after the last layer (multi-token predictors) are cut over fewer ranks.
    units.append(ShardingUnit(tuple(size for size in behind if apart and size[1]), spread=True))
    behind = tuple(size for size in behind if not (apart and size[1]))
    ends = (
        [ShardingUnit((*front, *behind), stays_whole=True)]
        if shape.tied and layout.zero
        else [ShardingUnit(front), ShardingUnit(behind, stays_whole=True)]
    )
    return (unit for unit in (*units, *ends) if unit.sizes and unit.times)


def _blocks(shape: ModelShape, layout: Layout, layers: Iterable[int]) -> Iterator[ShardingUnit]:
    """Yield the units of these layers, those of a kind together."""
    sizes, apart = pieces(shape, layout.tp, layout.ep), layout.ep > 1
    for block, times in ((getattr(sizes, kind), times) for kind, times in number_of_kinds(shape, layers)):
        yield ShardingUnit(tuple(size for size in block if not (apart and size[1])), times=times)
        yield ShardingUnit(tuple(size for size in block if apart and size[1]), spread=True, times=times)


def _numel(sizes: Iterable[Size], ranks: int = 1) -> int:
    """Return the elements of a rank's padded share, without quantized ones."""
    numel = 0
    for size, _, _, _, coded, _ in sizes:
        if not coded:
            dim = sharded_dim(size, ranks)
            numel += -(-size[dim] // ranks) * (prod(size) // size[dim])
    return numel


def _code_bytes(sizes: Iterable[Size], ranks: int) -> int:
    """Return the bytes of a rank's padded share of quantized matrices."""
    return sum(share_bytes(lines, ranks) for *_, coded, lines in sizes if coded)


def _holders(layout: Layout) -> int:
    """Return the ranks of a replica that hold the same experts."""
    return layout.dp_shard * layout.cp * layout.tp // layout.ep


def _replica_calls(shape: ModelShape, layout: Layout, held: StageContents, summed: float) -> Calls:
    """Yield the buckets of norm with head, blocks and embedding, in the order of the backward pass."""
    local, (front, behind) = pieces(shape, layout.tp, layout.ep), _ends(shape, layout, held)
    # Gradients become ready from the last layer to the first, which decides what shares a bucket.
    kinds = [*map(layer_kinds(shape).__getitem__, reversed(held.layers))]
    parts = {"behind": behind, "front": front, **{kind: getattr(local, kind) for kind in set(kinds)}}
    for spread, axis in ((False, "data"), (True, "expert_data")):
        # Experts have fewer replicas, so they fill buckets of their own.
        n = layout.dp_replicate * (_holders(layout) if spread else layout.dp_shard * layout.cp)
        if n == 1 or (spread and layout.ep == 1):
            continue
        numel = {
            name: _numel(size for size in sizes if size[3] and (layout.ep > 1 and bool(size[1])) == spread)
            for name, sizes in parts.items()
        }
        sums = [numel[name] * summed for name in ("behind", *kinds, "front") if numel[name]]
        counts = bucket_counts(sums) if layout.pp == 1 else [1] * len(sums)
        for size, times in Counter(sum(sums[a:b]) for a, b in pairwise(accumulate(counts, initial=0))).items():
            yield axis, "all_reduce", times, 2 * (n - 1) * size // n


def _shard_calls(
    layout: Layout, m: int, pipelined: bool, units: Iterable[ShardingUnit], word: float, summed: float, coded: bool
) -> Calls:  # fmt: skip
    """Yield the calls of ZeRO.

    ZeRO-2 reduces after each micro-batch. ZeRO-3 also gathers each unit once or twice, under a pipeline once a step.
    `coded`: ranks share quantized matrices, too.
    """
    each, r = 1 if pipelined else m, layout.dp_replicate
    for unit in units:
        n, axis = (_holders(layout), "expert_shard") if unit.spread else (layout.dp_shard * layout.cp, "shard")
        learned = unit.learned
        share = _numel(learned, n)
        whole = share if len(learned) == len(unit.sizes) else _numel(unit.sizes, n)
        shard_bytes = whole * word + (_code_bytes(unit.sizes, n) if coded else 0)
        # Again in the backward pass, except a unit that stays whole, and once a step under a pipeline.
        gathers = each * (1 if unit.stays_whole or pipelined else 2) if layout.zero == 3 else 1
        if n > 1 and shard_bytes:
            yield axis, "all_gather", unit.times * gathers, (n - 1) * shard_bytes
        if n > 1 and share:
            yield axis, "reduce_scatter", unit.times * (each if layout.zero >= 2 else 1), (n - 1) * share * summed
        if r > 1 and share:
            yield "replicate", "all_reduce", unit.times, 2 * (r - 1) * share * summed // r


def _common_gradient_calls(shape: ModelShape, layout: Layout, rank: int, summed: float) -> Calls:
    """Yield sums that data parallelism leaves: of weights on several tp ranks, or on both ends of a pipeline."""
    shares = {box.parameter.name: box.owned for box in list_held(shape, layout, rank) if box.parameter.trained}
    for group in list_common(shape, layout, rank):
        n, numel = len(group.ranks), sum(shares.get(name, 0) for name in group.names)
        if group.late and numel:
            yield group.axis, "all_reduce", 1, 2 * (n - 1) * numel * summed // n


def _scalar_calls(layout: Layout, figures: int) -> Calls:
    """Yield the sums of scalars.

    Tokens (float64). Loss, balance loss and figures of the objective (float32) in one. The squared norm of the
    gradients.
    """
    n, p, world = layout.dp * layout.cp, layout.pp, layout.world
    for axis, ranks, size in (("data", n, 8), ("losses", n * p, 8 + 4 * figures), ("world", world, 4)):
        if ranks > 1:
            yield axis, "all_reduce", 1, 2 * (ranks - 1) * size // ranks
