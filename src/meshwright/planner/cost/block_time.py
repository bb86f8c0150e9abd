"""Seconds of a block's passes for one micro-batch: its kernels, the host's launches beside them, and its exchanges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from meshwright.planner.cost.block import EXPERT_BIAS, adds_expert_biases
from meshwright.planner.cost.layer_work import LayerWork
from meshwright.planner.cost.links import Links
from meshwright.planner.cost.local_shape import LocalShape
from meshwright.planner.cost.speeds import NOTHING, Speeds, Triple
from meshwright.planner.cost.work import Exchange, LayerOperation, Work
from meshwright.spec.layout.layout import Layout


def ranks_of(layout: Layout, axis: str) -> tuple[int, int]:
    """Return (ranks of a group along an axis, distance between them). tp is innermost, then cp, dp_shard, ..."""
    if axis == "tp":
        return layout.tp, 1
    if axis == "ep":
        return layout.ep, 1
    if axis == "cp":
        return layout.cp, layout.tp
    inside = layout.tp * layout.cp
    if axis == "dp_shard":
        return layout.dp_shard, inside
    inside *= layout.dp_shard
    return (layout.dp_replicate, inside) if axis == "dp_replicate" else (layout.pp, inside * layout.dp_replicate)


LAUNCHES = 6
"""Launches per expert and pass that Stack.expert_launch_s covers."""
Side = Literal["forward", "inputs", "weights"]
SIDES: tuple[Side, ...] = get_args(Side)


NORMS = ("attention_norm", "mlp_norm")
"""Operations that recomputation of norms repeats."""


class BlockTime(NamedTuple):
    """Passes of a block over one micro-batch, before a recompute policy.

    Each pair is (seconds, seconds of exchanges beside no computation). `again` and `norms` are the parts of the forward
    pass that selective recomputation, and that of norms, repeats.
    """

    forward: tuple[float, float]
    inputs: tuple[float, float]
    weights_s: float
    again: tuple[float, float]
    norms: tuple[float, float]
    core: tuple[float, float]
    """The attention core's forward pass, where its output can be kept."""
    tail: tuple[float, float]
    """The part of the forward pass that no recomputation repeats."""

    @property
    def repeated(self) -> tuple[float, float]:
        """Everything of the forward pass that recomputation can repeat."""
        return self.forward[0] - self.tail[0], self.forward[1] - self.tail[1]


AloneWork = list[tuple[float, bool, float]]
"""(seconds alone on the device, True if power bounds them, launches) of each piece of work."""
Alone = tuple[AloneWork, AloneWork, AloneWork]
"""Forward pass, input gradients, weight gradients."""


def alone(operation: LayerOperation, speeds: Speeds) -> Alone:
    """Time the work of an operation by itself."""
    return speeds.alone(operation.forward), speeds.alone(operation.inputs), speeds.alone(operation.weights)


def block_time(
    block: LayerWork,
    local: LocalShape,
    speeds: Speeds,
    links: Links,
    timed: Mapping[int, Alone] = MappingProxyType({}),
) -> BlockTime:
    """Time every operation of a block. `timed`: times of operations shared with other blocks, by `id`."""
    operations = block.operations
    works_alone = [timed.get(id(op)) or alone(op, speeds) for op in operations]
    passes = PassSeconds(local=local, links=links, speeds=speeds, slower=_slower(works_alone, speeds))
    ahead, back, late = (
        [
            passes.timed(op, work[index], side)
            for op, work in zip(operations, works_alone, strict=True)
            if index == 0 or work[index] or op.exchanges.backward
        ]
        for index, side in enumerate(SIDES)
    )
    # selective recomputation repeats the attention core, or in some software all that is cheap
    scores_alone, scores = local.stack.drops_scores_alone, any(tensor.part == "scores" for tensor in block.tensors)
    repeated = [op for op in ahead if (scores and op[0].name == "attention" if scores_alone else op[0].again)]
    again = passes.pass_seconds(repeated, "forward")
    # the host's work of a repeated pass counts only if a pass is repeated
    called = _host_seconds(block, local, speeds)
    if local.stack.selective_repeats:
        rest = passes.pass_seconds([op for op in ahead if not op[0].again], "forward")
        again = again[0] + local.stack.selective_repeats * rest[0], again[1] + local.stack.selective_repeats * rest[1]
    forward, inputs = passes.pass_seconds(ahead, "forward"), passes.pass_seconds(back, "inputs", late)
    return BlockTime(
        forward=(forward[0] + called[0], forward[1]),
        inputs=(inputs[0] + called[1], inputs[1]),
        weights_s=passes.pass_seconds(late, "weights")[0],
        again=(again[0] + called[2] * bool(repeated), again[1]),
        norms=passes.pass_seconds([op for op in ahead if op[0].name in NORMS], "forward"),
        tail=passes.pass_seconds(ahead[len(ahead) - block.tail :], "forward"),
        core=passes.pass_seconds(
            [op for op in ahead if op[0].name == "attention"] if block.keeps_core else [], "forward"
        ),
    )


def _slower(each: list[Alone], speeds: Speeds) -> float:
    """Return how much slower a block's products run because of the power that both its passes draw."""
    if speeds.power is None:
        return 1.0
    products = others = 0.0
    for sides in each:
        for works in sides:
            for seconds, bound, _ in works:
                if bound:
                    products += seconds
                else:
                    others += seconds
    return speeds.slowed(products, others)


def _host_seconds(block: LayerWork, local: LocalShape, speeds: Speeds) -> Triple:
    """Return the host's seconds of a layer beside its kernels. Ranks that share a core take turns."""
    if not speeds.host or not block.boundary_bytes:
        return NOTHING
    routed = any(op.name == "dispatch" for op in block.operations)
    experts = local.shape.moe.experts / local.ep if local.shape.moe else 0.0
    times = speeds.host_share * speeds.ranks_per_core
    a, b, c = (times * seconds for seconds in speeds.host.layer(local.shape, routed=routed, experts=experts))
    return a, b, c


TimedOperation = tuple[LayerOperation, list[tuple[float, float]], list[tuple[float, bool]]]
"""One side of an operation in seconds, computed once for all passes that include it.

Of each piece of work: (on the device, of the host's launches). Of each exchange: (seconds beside no computation, True
if it is one of experts).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """Seconds of passes over operations: the device's kernels and exchanges beside the host's launches."""

    local: LocalShape
    links: Links
    speeds: Speeds
    slower: float
    """Factor by which power-bound products are slower than alone."""
    _known: dict[tuple[str, str, float], float] = field(default_factory=dict, init=False, repr=False)
    """(axis, collective, bytes) -> seconds of one call."""

    def timed(self, operation: LayerOperation, works: AloneWork, side: Side) -> TimedOperation:
        """Time one side of an operation. Power-bound `works` take longer."""
        host_s, slower = self.local.stack.host_s, self.slower
        forward, backward = operation.exchanges
        exchanges = forward if side == "forward" else backward if side == "inputs" else ()
        return (
            operation,
            [(seconds * slower if bound else seconds, host_s * launches) for seconds, bound, launches in works],
            [(self._exposed(exchange, operation, side), exchange.axis == "ep") for exchange in exchanges]
            if exchanges
            else [],
        )

    def pass_seconds(
        self, operations: list[TimedOperation], side: Side, later: Sequence[TimedOperation] = ()
    ) -> tuple[float, float]:
        """Return (seconds, seconds of exchanges beside no computation) of a pass.

        `later`: the weight gradients that follow the input gradients.
        """
        if not operations:
            return 0.0, 0.0
        stack = self.local.stack
        host_s, operation_s = stack.host_s, stack.operation_s
        device = host = each = exchanged = routed = 0.0
        # a pass lasts as long as the busier of device and host
        for _, works, exchanges in operations:
            if works:
                host += operation_s
            for took, launch in works:
                device += took
                host += launch
                each += took if took > launch else launch
            for took, expert in exchanges:
                exchanged += took
                if expert:
                    routed += took
                host += host_s
                each += took if took > host_s else host_s
        # exchanges of another micro-batch hide behind this computation, which they slow down
        if routed and stack.hides_experts:
            behind = device + sum(sum([took for took, _ in works]) for _, works, _ in later)
            hidden = min(routed, stack.hides_experts * behind)
            exchanged, device = exchanged - hidden, device + stack.contention * hidden
        device += exchanged
        # dispatch waits for the counts of tokens per expert, which the host must read
        if side != "weights" and any(op.name == "dispatch" for op, _, _ in operations):
            device += stack.counts_s + stack.expert_launch_s * self._launched(side) * self._experts
        # device and host do not overlap perfectly: a share of each operation's own wait stalls the pass
        longer = max(device, host)
        return longer + stack.stalls * max(0.0, each - longer), exchanged

    def _launched(self, side: Side) -> float:
        """Return an expert's launches relative to those that expert_launch_s covers. Separate bias kernels add some."""
        beside = EXPERT_BIAS[side == "inputs"][1] / LAUNCHES if adds_expert_biases(self.local) else 0.0
        return 1 + beside

    @property
    def _experts(self) -> float:
        """Experts on a rank."""
        return self.local.shape.moe.experts / self.local.ep if self.local.shape.moe else 0.0

    def _exposed(self, exchange: Exchange, operation: LayerOperation, side: Side) -> float:
        stack, axis = self.local.stack, exchange.axis
        beside = stack.hides_beside
        # a ring's hop hides behind the work on the part that arrived before
        if exchange.collective == "ring":
            ranks, stride = self.local.group(axis)
            hop = self.links.send_seconds(exchange.size_bytes / ranks, stride, ranks)
            return (ranks - 1) * max(0.0, hop - beside * self._seconds(getattr(operation, side)) / ranks)
        took = self._whole(exchange)
        if exchange.within:
            took = max(took / exchange.times, took - beside * exchange.share * self._seconds(exchange.within))
        # earlier exchanges use up part of the work that could hide this one
        hidden = self._seconds(exchange.beside) - sum([self._whole(other) for other in exchange.first])
        if hidden > 0:
            took = max(0.0, took - beside * hidden)
        if axis != "tp":
            return took
        hidden_share = 0.0 if stack.hides_with_sequence and not self.local.sp else stack.hides_tensor
        return took * (1 + stack.skew) * (1 - hidden_share)

    def _whole(self, exchange: Exchange) -> float:
        """Return the seconds of all calls of an exchange, hidden ones included."""
        axis, collective, size_bytes, times = exchange[:4]
        # all layers exchange the same sizes, so each is timed once
        key = axis, collective, size_bytes
        if key not in self._known:
            ranks, stride = self.local.group(axis)
            moe = self.local.shape.moe
            routes = moe.top_k if moe and self.local.stack.routes_once and axis == "ep" else 0
            groups = (moe.groups, moe.top_groups) if moe else (1, 1)
            self._known[key] = self.links.seconds(collective, size_bytes, ranks, stride, routes, groups)
        return times * self._known[key]

    def _seconds(self, works: tuple[Work, ...]) -> float:
        slower = self.slower
        return sum([took * slower if bound else took for took, bound, _ in self.speeds.alone(works)]) if works else 0.0
