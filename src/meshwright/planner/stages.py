"""The sums of blocks and pipeline stages: seconds of a forward and backward pass, bytes kept, for one micro-batch."""

from dataclasses import dataclass
from math import ceil

from meshwright.planner.block import Block, Local, embedding, head, layer
from meshwright.planner.kept import NONE, Logits
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
    """Largest moment of a layer's backward pass, beyond what is kept."""
    logits: Logits = NONE

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
            logits=self.logits.plus(other.logits, times),
        )


def stride_of(layout: Layout, axis: str) -> tuple[int, int]:
    """(ranks of a group along an axis, how many ranks apart they lie); tp is innermost, then cp, dp_shard, ..."""
    steps = {"tp": 1, "cp": layout.tp, "dp_shard": layout.tp * layout.cp}
    steps["dp_replicate"] = steps["dp_shard"] * layout.dp_shard
    steps["pp"] = steps["dp_replicate"] * layout.dp_replicate
    if axis == "ep":
        return layout.ep, 1
    return int(getattr(layout, axis)), steps[axis]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTime:
    """A block's passes over one micro-batch, before a recompute policy: (computation, exposed exchange) in seconds, and
    kernels launched. `again`: what selective recomputation repeats of the forward pass."""

    forward: tuple[float, float]
    inputs: tuple[float, float]
    weights_s: float
    again: tuple[float, float]
    launches: tuple[float, float, float]


def block_time(block: Block, of: Local, layout: Layout, speeds: Speeds, links: Links) -> BlockTime:
    """Time every operation of a block."""
    forward = [_pass(op, op.forward, op.forward_exchanges, of, layout, speeds, links) for op in block.operations]
    inputs = [_pass(op, op.inputs, op.backward_exchanges, of, layout, speeds, links) for op in block.operations]
    again = [pair for op, pair in zip(block.operations, forward, strict=True) if op.again]
    sides = [
        [work for op in block.operations for work in getattr(op, side)] for side in ("forward", "inputs", "weights")
    ]
    return BlockTime(
        forward=_totals(forward),
        inputs=_totals(inputs),
        weights_s=sum(map(speeds.seconds, sides[2])),
        again=_totals(again),
        launches=(sum(map(_launches, sides[0])), sum(map(_launches, sides[1])), sum(map(_launches, sides[2]))),
    )


def block_cost(block: Block, time: BlockTime, of: Local, recompute: str) -> Cost:
    """A block's passes and kept bytes, with what recomputation repeats."""
    stack = of.stack
    if not block.boundary_bytes:
        recompute = "none"
    again = {"none": (0.0, 0.0), "selective": time.again, "full": time.forward}[recompute]
    host = [stack.host_s * launches for launches in time.launches]
    again_s = max(sum(again), host[0] if recompute == "full" else 0.0)
    kept = block.kept_bytes(recompute)
    return Cost(
        forward_s=max(sum(time.forward), host[0]),
        input_s=max(sum(time.inputs), host[1]) + again_s,
        weight_s=max(time.weights_s, host[2]),
        exchange_s=time.forward[1] + time.inputs[1] + again[1],
        again_s=again_s,
        kept_bytes=kept,
        transient_bytes=block.transient_bytes
        + (max(0.0, block.kept_bytes("none") - kept) if recompute != "none" else 0.0),
        logits=block.logits,
    )


def _totals(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


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


def layers_by_cost(shape: ModelShape, stages: int) -> list[range]:
    """Layers of each stage where stages fill up, front to back, to equal shares of the products' weights, the head's
    counted and the embedding's not (nanotron's way): the last stages may have none."""
    block = 4 * shape.hidden**2 + (3 if shape.mlp == "swiglu" else 2) * shape.hidden * shape.ffn
    total = shape.layers * block + shape.vocab * shape.hidden
    ends = [min(shape.layers, ceil(total * (stage + 1) / stages / block)) for stage in range(stages)]
    return [range(start, end) for start, end in zip([0, *ends], [*ends[:-1], shape.layers], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the stages of a layout are made of."""

    embedding: Cost
    dense: Cost
    routed: Cost
    head: Cost

    def stage(self, dense: int, routed: int, *, first: bool, last: bool) -> Cost:
        """A pipeline stage with so many dense and routed layers."""
        total = Cost().plus(self.dense, dense).plus(self.routed, routed)
        if first:
            total = total.plus(self.embedding)
        return total.plus(self.head) if last else total


def costs(of: Local, layout: Layout, speeds: Speeds, links: Links) -> dict[str, Costs]:
    """Of every part of a shape under a layout, by recompute policy."""
    shape, none = of.shape, Block(operations=())
    blocks = {
        "embedding": embedding(of),
        "dense": layer(of, window=shape.window) if shape.routed_layers < shape.layers else none,
        "routed": layer(of, window=shape.window, routed=True) if shape.routed_layers else none,
        "head": head(of),
    }
    times = {part: block_time(block, of, layout, speeds, links) for part, block in blocks.items()}
    return {
        recompute: Costs(**{part: block_cost(block, times[part], of, recompute) for part, block in blocks.items()})
        for recompute in ("none", "selective", "full")
    }
