"""The sums of blocks and pipeline stages: seconds of a forward and backward pass, bytes kept, for one micro-batch."""

from collections import Counter
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal, NamedTuple

from meshwright.planner.cost.block import EXPERT_BIAS, LayerWork, adds_expert_biases, embedding, head, layer
from meshwright.planner.cost.host_time import NOTHING, Triple
from meshwright.planner.cost.links import Links
from meshwright.planner.cost.local_shape import Local
from meshwright.planner.cost.micro_batch_cost import NO_COST, MicroBatchCost
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.weight_product import linear
from meshwright.planner.cost.work import Exchange, LayerOperation, MemoryPass, Work
from meshwright.planner.kernels.kernel_operations import Product
from meshwright.spec.layout import RECOMPUTE, Layout
from meshwright.spec.schedule import ranges
from meshwright.spec.shape import ModelShape


def ranks_of(layout: Layout, axis: str) -> tuple[int, int]:
    """(ranks of a group along an axis, how many ranks apart they lie); tp is innermost, then cp, dp_shard, ..."""
    steps = {"tp": 1, "cp": layout.tp, "dp_shard": layout.tp * layout.cp}
    steps["dp_replicate"] = steps["dp_shard"] * layout.dp_shard
    steps["pp"] = steps["dp_replicate"] * layout.dp_replicate
    if axis == "ep":
        return layout.ep, 1
    return int(getattr(layout, axis)), steps[axis]


LAUNCHES = 6
"""Of a pass, for each expert: what Stack.expert_launch_s stands for."""
Side = Literal["forward", "inputs", "weights"]


NORMS = ("attention_norm", "mlp_norm")
"""Operations that recomputation of norms repeats."""


class BlockTime(NamedTuple):
    """A block's passes over one micro-batch, before a recompute policy: (seconds, those of them in which an exchange
    stands beside no computation). `again`, `norms`: what selective recomputation, and that of norms, repeats of the
    forward pass."""

    forward: tuple[float, float]
    inputs: tuple[float, float]
    weights_s: float
    again: tuple[float, float]
    norms: tuple[float, float]
    core: tuple[float, float]
    """The attention core's forward pass, where it is kept."""
    tail: tuple[float, float]
    """Of the forward pass, what no recomputation repeats."""

    @property
    def repeated(self) -> tuple[float, float]:
        """All that recomputation can repeat of the forward pass."""
        return self.forward[0] - self.tail[0], self.forward[1] - self.tail[1]


def block_time(block: LayerWork, of: Local, layout: Layout, speeds: Speeds, links: Links) -> BlockTime:
    """Time every operation of a block."""
    passes = PassSeconds(of=of, layout=layout, links=links, took=_took(block, speeds))
    alone, scores = of.stack.drops_scores_alone, any(kept.of == "scores" for kept in block.kept)
    repeated = tuple(op for op in block.operations if (scores and op.name == "attention" if alone else op.again))
    again = passes.of_pass(repeated, "forward")
    called = _host(block, of, speeds)
    if of.stack.selective_repeats:
        rest = passes.of_pass(tuple(op for op in block.operations if not op.again), "forward")
        again = again[0] + of.stack.selective_repeats * rest[0], again[1] + of.stack.selective_repeats * rest[1]
    forward, inputs = (passes.of_pass(block.operations, side) for side in ("forward", "inputs"))
    return BlockTime(
        forward=(forward[0] + called[0], forward[1]),
        inputs=(inputs[0] + called[1], inputs[1]),
        weights_s=passes.of_pass(block.operations, "weights")[0],
        again=(again[0] + called[2] * bool(repeated), again[1]),
        norms=passes.of_pass(tuple(op for op in block.operations if op.name in NORMS), "forward"),
        tail=passes.of_pass(block.operations[len(block.operations) - block.tail :], "forward"),
        core=passes.of_pass(
            tuple(op for op in block.operations if op.name == "attention" and block.keeps_core), "forward"
        ),
    )


def _took(block: LayerWork, speeds: Speeds) -> dict[Work, float]:
    """Seconds of each piece of work of a block, whose products take longer for the power that both its passes draw."""
    products = others = 0.0
    alone: dict[Work, tuple[float, bool]] = {}
    for op in block.operations:
        for work in (*op.forward, *op.inputs, *op.weights):
            if work not in alone:
                alone[work] = speeds.seconds(work), speeds.power is not None and speeds.is_bound(work)
            seconds, bound = alone[work]
            if bound:
                products += seconds
            else:
                others += seconds
    slower = speeds.slowed(products, others)
    return {work: seconds * slower if bound else seconds for work, (seconds, bound) in alone.items()}


def _host(block: LayerWork, of: Local, speeds: Speeds) -> Triple:
    """What a layer takes beside its kernels; ranks that share a core take turns with it."""
    if not speeds.host or not block.boundary_bytes:
        return NOTHING
    routed = any(op.name == "dispatch" for op in block.operations)
    experts = of.shape.moe.experts / of.ep if of.shape.moe else 0.0
    times = speeds.host_share * speeds.ranks_per_core
    a, b, c = (times * one for one in speeds.host.layer(of.shape, routed=routed, experts=experts))
    return a, b, c


def block_cost(block: LayerWork, time: BlockTime, of: Local, recompute: str) -> MicroBatchCost:
    """A block's passes and kept bytes, with what recomputation repeats."""
    again = {
        "none": (0.0, 0.0), "norms": time.norms, "selective": time.again,
        "all-but-attention": (time.repeated[0] - time.core[0], time.repeated[1] - time.core[1]), "full": time.repeated,
    }[recompute]  # fmt: skip
    kept = block.kept_bytes(recompute)
    own = of.stack.own
    repeated = 0.0
    if recompute != "none":
        repeated = block.made_again_bytes(recompute) if own else max(0.0, block.kept_bytes("none") - kept)
    mlp = (block.backward.mlp if own else block.transient_bytes) + repeated
    attention, after = (
        one + repeated if own and block.boundary_bytes else 0.0
        for one in (block.backward.attention, block.backward.after)
    )
    new = block.backward.weights * of.width
    return MicroBatchCost(
        forward_s=time.forward[0],
        input_s=time.inputs[0] + again[0],
        weight_s=time.weights_s,
        exchange_s=time.forward[1] + time.inputs[1] + again[1],
        again_s=again[0],
        kept_bytes=kept,
        mlp_bytes=mlp,
        attention_bytes=attention,
        after_bytes=after,
        queued_bytes=block.backward.queued,
        split_bytes=max(0.0, kept + max(mlp - new, attention) - block.backward.queued),
        weights=block.backward.weights,
        new_bytes=new,
        logits=block.logits,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """Seconds of passes over operations: the device's kernels and exchanges beside the host's launches."""

    of: Local
    layout: Layout
    links: Links
    took: dict[Work, float]
    """Of each piece of work."""

    def of_pass(self, operations: tuple[LayerOperation, ...], side: Side) -> tuple[float, float]:
        """(seconds, those of them in which an exchange stands beside no computation)."""
        if not operations:
            return 0.0, 0.0
        stack = self.of.stack
        device = host = each = exchanged = routed = 0.0
        for op in operations:
            works: tuple[Work, ...] = getattr(op, side)
            host += stack.operation_s if works else 0.0
            for work in works:
                took, launch = self.took[work], stack.host_s * _launches(work)
                device, host, each = device + took, host + launch, each + max(took, launch)
            forward, backward = op.exchanges
            for exchange in forward if side == "forward" else backward if side == "inputs" else ():
                took = self._exposed(exchange, works)
                exchanged += took
                routed += took if exchange.axis == "ep" else 0.0
                host, each = host + stack.host_s, each + max(took, stack.host_s)
        if routed and stack.hides_experts:
            behind = device + sum(self._seconds(op.weights) for op in operations) * (side == "inputs")
            hidden = min(routed, stack.hides_experts * behind)
            exchanged, device = exchanged - hidden, device + stack.contention * hidden
        device += exchanged
        if side != "weights" and any(op.name == "dispatch" for op in operations):
            device += stack.counts_s + stack.expert_launch_s * self._launched(side) * self._experts
        longer = max(device, host)
        return longer + stack.stalls * max(0.0, each - longer), exchanged

    def _launched(self, side: Side) -> float:
        """Launches of an expert over those that expert_launch_s counts: its bias is added by kernels of its own."""
        beside = EXPERT_BIAS[side == "inputs"][1] / LAUNCHES if adds_expert_biases(self.of) else 0.0
        return 1 + beside

    @property
    def _experts(self) -> float:
        """On a rank."""
        return self.of.shape.moe.experts / self.of.ep if self.of.shape.moe else 0.0

    def _exposed(self, exchange: Exchange, works: tuple[Work, ...]) -> float:
        ranks, stride = ranks_of(self.layout, exchange.axis)
        beside = self.of.stack.hides_beside
        if exchange.collective == "ring":
            hop = self.links.send_seconds(exchange.size_bytes / ranks, stride, ranks)
            return (ranks - 1) * max(0.0, hop - beside * self._seconds(works) / ranks)
        took = self._whole(exchange)
        if exchange.within:
            took = max(took / exchange.times, took - beside * exchange.share * self._seconds(exchange.within))
        hidden = self._seconds(exchange.beside) - sum(self._whole(one) for one in exchange.first)
        took = max(0.0, took - beside * max(0.0, hidden))
        stack = self.of.stack
        hidden_share = 0.0 if stack.hides_with_sequence and not self.of.sp else stack.hides_tensor
        return took * (1 + stack.skew) * (1 - hidden_share) if exchange.axis == "tp" else took

    def _whole(self, exchange: Exchange) -> float:
        """Of all its calls, hidden ones too."""
        ranks, stride = ranks_of(self.layout, exchange.axis)
        moe = self.of.shape.moe
        routes = moe.top_k if moe and self.of.stack.routes_once and exchange.axis == "ep" else 0
        groups = (moe.groups, moe.top_groups) if moe else (1, 1)
        return exchange.times * self.links.seconds(
            exchange.collective, exchange.size_bytes, ranks, stride, routes, groups
        )

    def _seconds(self, works: tuple[Work, ...]) -> float:
        return sum([self.took[work] for work in works])


def _launches(work: Work) -> float:
    return work.launches if isinstance(work, MemoryPass) else work.calls if isinstance(work, Product) else 1.0


class StageKind(NamedTuple):
    """Layers of a pipeline stage: dense ones like the first, with a window that it has not, routed; and the ends."""

    dense: int
    windowed: int
    routed: int
    first: bool
    last: bool

    @property
    def layers(self) -> int:
        """Of all kinds."""
        return self.dense + self.windowed + self.routed


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the stages of a layout are made of."""

    embedding: MicroBatchCost
    head: MicroBatchCost
    dense: MicroBatchCost = NO_COST
    windowed: MicroBatchCost = NO_COST
    routed: MicroBatchCost = NO_COST
    stages: dict[StageKind, MicroBatchCost] = field(default_factory=dict, init=False, compare=False)
    """Those that were asked for."""

    def stage(self, kind: StageKind) -> MicroBatchCost:
        """A pipeline stage."""
        if kind not in self.stages:
            dense, windowed, routed, first, last = kind
            total = NO_COST.plus(self.dense, dense).plus(self.windowed, windowed).plus(self.routed, routed)
            self.stages[kind] = total.plus(self.embedding, first).plus(self.head, last)
        return self.stages[kind]


Policies = dict[str, MicroBatchCost]
"""By recompute policy."""


def costs(
    of: Local, layout: Layout, speeds: Speeds, links: Links, known: dict[tuple[object, ...], Policies]
) -> dict[str, Costs]:
    """Of every part of a shape under a layout, by recompute policy. `known`: parts that other layouts have had; those
    of this one are added."""
    shape = of.shape
    code = layout.compile, layout.kernels, layout.cuda_graphs
    inside = of.tp, of.sp, of.splits, of.compiled, of.keeps_norms, of.lowered, of.pieces, *code
    around = of.batch, of.cp, of.ring, of.context_split
    keys: dict[str, tuple[object, ...]] = {"embedding": (of.tokens, *inside), "head": (of.tokens, *inside)}
    if shape.unbuilt and shape.unbuilt.predicts:
        keys["head"] = *keys["head"], *around, of.ep, of.ep_pieces
    if shape.routed_layers < shape.layers:
        keys["dense"] = *around, *inside
    if shape.mixed_windows and shape.routed_layers < shape.layers:
        keys["windowed"] = *around, *inside
    if shape.routed_layers:
        keys["routed"] = *around, of.ep, of.ep_pieces, *inside
    found: dict[str, Policies] = {}
    for part, key in keys.items():
        if (part, key) not in known:
            known[part, key] = _policies(part, of, layout, speeds, links)
        found[part] = known[part, key]
    return {policy: Costs(**{part: one[policy] for part, one in found.items()}) for policy in RECOMPUTE}


def _policies(part: str, of: Local, layout: Layout, speeds: Speeds, links: Links) -> Policies:
    """Of one part; the ends are never recomputed."""
    if part in ("embedding", "head"):
        block = embedding(of) if part == "embedding" else head(of)
        end = block_cost(block, block_time(block, of, layout, speeds, links), of, "none")
        further = of.shape.unbuilt.predicts if part == "head" and of.shape.unbuilt else 0
        if not further:
            return dict.fromkeys(RECOMPUTE, end)
        joined = LayerWork(operations=(linear(of, "projection", of.tokens, 2 * of.shape.hidden, of.shape.hidden),))
        put = block_cost(joined, block_time(joined, of, layout, speeds, links), of, "none").plus(end)
        blocks = _policies(
            "routed" if of.shape.is_moe_layer(of.shape.layers - 1) else "dense", of, layout, speeds, links
        )
        return {policy: end.plus(put.plus(one), further) for policy, one in blocks.items()}
    mixed = of.shape.mixed_windows
    window = 0 if mixed and part == "dense" else of.shape.window
    if part == "routed" and of.shape.unbuilt is not None and of.shape.unbuilt.full_every:
        window = mean_window(of.shape.window, of.sequence, of.shape.unbuilt.full_every)
    found: Policies = dict.fromkeys(RECOMPUTE, NO_COST)
    for state, share in _kinds(of.shape, part == "routed").items():
        block = layer(of, window=window, routed=part == "routed", state=state)
        time = block_time(block, of, layout, speeds, links)
        found = {policy: cost.plus(block_cost(block, time, of, policy), share) for policy, cost in found.items()}
    return found


def _kinds(shape: ModelShape, routed: bool) -> dict[bool, float]:
    """Whether layers of a part have linear attention -> which share of them. Both are counted as equal ones, with the
    mean of what they take."""
    if shape.unbuilt is None or shape.unbuilt.linear is None:
        return {False: 1.0}
    found = Counter(bool(shape.linear_of(n)) for n in range(shape.layers) if shape.is_moe_layer(n) == routed)
    return {state: times / found.total() for state, times in found.items()}


def mean_window(window: int, sequence: int, full_every: int) -> int:
    """Routed layers with a window and every so many-th without are counted as one kind: with the window by which a
    query sees as many keys as in the mean of both."""
    windowed, whole = (span - span * span / (2 * sequence) for span in (min(window, sequence), sequence))
    seen = (whole + (full_every - 1) * windowed) / full_every
    return round(sequence - sqrt(max(0.0, sequence * (sequence - 2 * seen))))


def split_by_cost(shape: ModelShape, stages: int) -> list[range]:
    """Blocks in turn, the head weighing as its product: the next stage begins with the block after a threshold was
    reached (nanotron, src/nanotron/models/base.py). A stage can be left with the head alone, not with nothing."""
    layer = 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * shape.hidden * shape.ffn
    whole = shape.layers * layer + shape.vocab * shape.hidden
    sizes, filled = [0] * stages, 0
    for n in range(shape.layers):
        sizes[filled] += 1
        if (n + 1) * layer >= whole * (filled + 1) / stages and filled + 1 < stages:
            filled += 1
    return ranges(sizes)
