"""The sums of blocks and pipeline stages: seconds of a forward and backward pass, bytes kept, for one micro-batch."""

from dataclasses import dataclass

from meshwright.planner.block import Block, Local, embedding, head, layer
from meshwright.planner.links import Links
from meshwright.planner.speeds import Speeds
from meshwright.planner.work import Attention, Exchange, Operation, Pass, Work
from meshwright.spec.layout import Layout
from meshwright.spec.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One micro-batch. Seconds include exposed exchanges; `exchange_s` says how many of them are that."""

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    exchange_s: float = 0.0
    again_s: float = 0.0
    """Of input_s: repeated forward passes."""
    kept_bytes: float = 0.0
    transient_bytes: float = 0.0
    """Largest moment of a backward pass, beyond what is kept."""
    logit_bytes: float = 0.0

    @property
    def backward_s(self) -> float:
        """Both halves."""
        return self.input_s + self.weight_s

    def plus(self, other: "Cost", times: float = 1.0) -> "Cost":
        """One after the other, the other several times."""
        return Cost(
            forward_s=self.forward_s + times * other.forward_s,
            input_s=self.input_s + times * other.input_s,
            weight_s=self.weight_s + times * other.weight_s,
            exchange_s=self.exchange_s + times * other.exchange_s,
            again_s=self.again_s + times * other.again_s,
            kept_bytes=self.kept_bytes + times * other.kept_bytes,
            transient_bytes=max(self.transient_bytes, other.transient_bytes if times else 0.0),
            logit_bytes=max(self.logit_bytes, other.logit_bytes if times else 0.0),
        )


def stride_of(layout: Layout, axis: str) -> tuple[int, int]:
    """(ranks of a group along an axis, how many ranks apart they lie); tp is innermost, then cp, dp_shard, ..."""
    steps = {"tp": 1, "cp": layout.tp, "dp_shard": layout.tp * layout.cp}
    steps["dp_replicate"] = steps["dp_shard"] * layout.dp_shard
    steps["pp"] = steps["dp_replicate"] * layout.dp_replicate
    if axis == "ep":
        return layout.ep, 1
    return int(getattr(layout, axis)), steps[axis]


def block_cost(block: Block, of: Local, layout: Layout, speeds: Speeds, links: Links) -> Cost:
    """A block's passes, with what recomputation repeats."""
    stack, recompute = of.stack, layout.recompute if block.boundary_bytes else "none"
    forward = [_pass(op, op.forward, op.forward_exchanges, of, layout, speeds, links) for op in block.operations]
    inputs = [_pass(op, op.inputs, op.backward_exchanges, of, layout, speeds, links) for op in block.operations]
    weights = sum(speeds.seconds(work) for op in block.operations for work in op.weights)
    forward_gpu, forward_exchange = (sum(column) for column in zip(*forward, strict=True))
    input_gpu, input_exchange = (sum(column) for column in zip(*inputs, strict=True))
    launches = [sum(_launches(work) for op in block.operations for work in getattr(op, side))
                for side in ("forward", "inputs", "weights")]  # fmt: skip
    chosen = [pair for op, pair in zip(block.operations, forward, strict=True) if recompute == "full" or op.again]
    again_gpu, again_exchange = (
        (sum(p[0] for p in chosen), sum(p[1] for p in chosen)) if recompute != "none" else (0, 0)
    )
    host = stack.host_s
    again_s = max(again_gpu + again_exchange, host * launches[0] if recompute == "full" else 0.0)
    whole = block.kept_bytes("none")
    kept = block.kept_bytes(recompute) * stack.slack
    return Cost(
        forward_s=max(forward_gpu + forward_exchange, host * launches[0]),
        input_s=max(input_gpu + input_exchange, host * launches[1]) + again_s,
        weight_s=max(weights, host * launches[2]),
        exchange_s=forward_exchange + input_exchange + again_exchange,
        again_s=again_s,
        kept_bytes=kept,
        transient_bytes=block.transient_bytes + (max(0.0, whole - kept) if recompute != "none" else 0.0),
    )


def _launches(work: Work) -> float:
    return work.launches if isinstance(work, Pass) else 1.0


def _pass(
    op: Operation, works: tuple[Work, ...], exchanges: tuple[Exchange, ...], of: Local, layout: Layout,
    speeds: Speeds, links: Links,
) -> tuple[float, float]:  # fmt: skip
    """(seconds of computation, seconds of exchange that stand beside no computation)."""
    busy = sum(speeds.seconds(work) for work in works)
    exposed = 0.0
    for exchange in exchanges:
        ranks, stride = stride_of(layout, exchange.axis)
        kind = "all-gather" if exchange.collective == "ring" else exchange.collective
        took = exchange.count * links.seconds(kind, exchange.size_bytes, ranks, stride)
        if exchange.collective == "ring":
            core = sum(speeds.seconds(work) for work in works if isinstance(work, Attention))
            took = max(0.0, took - core * (ranks - 1) / ranks)
        elif exchange.axis == "tp":
            took *= 1 - of.stack.hides_tensor
        exposed += took
    return busy, exposed


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the stages of a layout are made of."""

    embedding: Cost
    dense: Cost
    routed: Cost
    head: Cost

    def stage(self, shape: ModelShape, layers: range, *, first: bool, last: bool) -> Cost:
        """A pipeline stage."""
        routed = sum(shape.is_moe_layer(layer) for layer in layers) if shape.moe else 0
        total = Cost().plus(self.dense, len(layers) - routed).plus(self.routed, routed)
        if first:
            total = total.plus(self.embedding)
        return total.plus(self.head) if last else total


def costs(of: Local, layout: Layout, speeds: Speeds, links: Links) -> Costs:
    """Of every part of a shape under a layout."""
    shape = of.shape

    def cost(block: Block) -> Cost:
        return block_cost(block, of, layout, speeds, links)

    last = cost(head(of))
    return Costs(
        embedding=cost(embedding(of)),
        dense=cost(layer(of, window=shape.window)) if shape.routed_layers < shape.layers else Cost(),
        routed=cost(layer(of, window=shape.window, routed=True)) if shape.routed_layers else Cost(),
        head=Cost().plus(last),
    )
