"""Costs of a block's passes and of pipeline stages, for one micro-batch: seconds, and bytes kept.

Seconds of a pass are those of its kernels, of the host's launches meanwhile, and of its exchanges. Blocks are counted
once for all layouts with the same local shape, and stages are sums of blocks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from meshwright.planner.cost.block import (
    EXPERT_BIAS,
    LayerWork,
    PolicyBytes,
    adds_expert_biases,
    embedding,
    first_half,
    head,
    layer,
    with_attention_kind,
)
from meshwright.planner.cost.exchanges import Links
from meshwright.planner.cost.micro_batch import NO_COST, LocalShape, MicroBatchCost
from meshwright.planner.cost.recorded import Memo
from meshwright.planner.cost.speeds import NOTHING, Speeds, Triple
from meshwright.planner.cost.weight_product import linear
from meshwright.planner.cost.work import Exchange, LayerOperation, Work
from meshwright.spec.layout.layout import RECOMPUTE, Layout
from meshwright.spec.layout.schedule import ranges
from meshwright.spec.model.shape import ModelShape

LAUNCHES = 6
"""Launches per expert and pass that Stack.expert_launch_s covers."""
Side = Literal["forward", "inputs", "weights"]
SIDES: tuple[Side, ...] = get_args(Side)
NORMS = ("attention_norm", "mlp_norm")
"""Operations that recomputation of norms repeats."""
AloneWork = list[tuple[float, bool, float]]
"""(seconds alone on the device, True if power bounds them, launches) of each piece of work."""
Alone = tuple[AloneWork, AloneWork, AloneWork]
"""Forward pass, input gradients, weight gradients."""
TimedOperation = tuple[LayerOperation, list[tuple[float, float]], list[tuple[float, bool]]]
"""One side of an operation in seconds, computed once for all passes that include it.

Of each piece of work: (on the device, of the host's launches). Of each exchange: (exposed seconds, True
if it is one of experts).
"""
Policies = dict[str, MicroBatchCost]
"""Cost by recompute policy."""
Timed = dict[int, Alone]
"""Work of each operation by `id`, valid as long as the operations exist."""
HALVES = 64
"""Cached halves. More than the micro-batches of one cell."""


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


class BlockTime(NamedTuple):
    """Passes of a block over one micro-batch, before a recompute policy.

    Each pair is (seconds, exposed seconds of exchanges). `again` and `norms` are the parts of the forward
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
    # One factor for the whole block: its power averages over all kernels of both passes.
    passes = PassSeconds(local=local, links=links, speeds=speeds, slower=_slower(works_alone, speeds))
    ahead, back, late = (
        [
            passes.timed(op, work[index], side)
            for op, work in zip(operations, works_alone, strict=True)
            # The forward pass keeps every operation, since `tail` counts them from the end.
            if index == 0 or work[index] or op.exchanges.backward
        ]
        for index, side in enumerate(SIDES)
    )
    # Selective recomputation repeats the attention core, or in some software all that is cheap.
    scores_alone, scores = local.stack.drops_scores_alone, any(tensor.part == "scores" for tensor in block.tensors)
    repeated = [op for op in ahead if (scores and op[0].name == "attention" if scores_alone else op[0].again)]
    again = passes.pass_seconds(repeated, "forward")
    # The host's work of a repeated pass counts only if a pass is repeated.
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
    # Without a power model the shares of the device include the limit.
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
    """Return the host's seconds of a layer in addition to its kernels. Ranks that share a core take turns."""
    if not speeds.host or not block.boundary_bytes:
        return NOTHING
    routed = any(op.name == "dispatch" for op in block.operations)
    experts = local.shape.moe.experts / local.ep if local.shape.moe else 0.0
    times = speeds.host_share * speeds.ranks_per_core
    a, b, c = (times * seconds for seconds in speeds.host.layer(local.shape, routed=routed, experts=experts))
    return a, b, c


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """Seconds of passes over operations: the device's kernels and exchanges, and the host's launches meanwhile."""

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
        """Return (seconds, exposed seconds of exchanges) of a pass.

        `later`: the weight gradients that follow the input gradients.
        """
        if not operations:
            return 0.0, 0.0
        stack = self.local.stack
        host_s, operation_s = stack.host_s, stack.operation_s
        # `each` is the pass if device and host never overlapped, towards which stalls lead.
        # A search runs this loop for every block, hence conditionals in place of max().
        device = host = each = exchanged = routed = 0.0
        # A pass lasts as long as the busier of device and host.
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
        # Exchanges of another micro-batch hide behind this computation, which they slow down.
        if routed and stack.hides_experts:
            behind = device + sum(sum([took for took, _ in works]) for _, works, _ in later)
            hidden = min(routed, stack.hides_experts * behind)
            exchanged, device = exchanged - hidden, device + stack.contention * hidden
        device += exchanged
        # Dispatch waits for the counts of tokens per expert, which the host must read.
        if side != "weights" and any(op.name == "dispatch" for op, _, _ in operations):
            device += stack.counts_s + stack.expert_launch_s * self._launched(side) * self._experts
        # Device and host do not overlap perfectly: a share of each operation's own wait stalls the pass.
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
        # A ring's hop hides behind the work on the part that arrived before.
        if exchange.collective == "ring":
            ranks, hop = self._hop(exchange)
            return (ranks - 1) * max(0.0, hop - beside * self._seconds(getattr(operation, side)) / ranks)
        took = self.exchange_seconds(exchange)
        # A call hides behind all pieces of the work but its own, so one call always stays exposed.
        if exchange.within:
            took = max(took / exchange.times, took - beside * exchange.share * self._seconds(exchange.within))
        # Earlier exchanges use up part of the work that could hide this one.
        hidden = self._seconds(exchange.beside) - sum([self.exchange_seconds(other) for other in exchange.first])
        if hidden > 0:
            took = max(0.0, took - beside * hidden)
        if axis != "tp":
            return took
        hidden_share = 0.0 if stack.hides_with_sequence and not self.local.sp else stack.hides_tensor
        return took * (1 + stack.skew) * (1 - hidden_share)

    def exchange_seconds(self, exchange: Exchange) -> float:
        """Return the seconds of all calls of an exchange, hidden ones included."""
        axis, collective, size_bytes, times = exchange[:4]
        if collective == "ring":
            ranks, hop = self._hop(exchange)
            return (ranks - 1) * hop
        # All layers exchange the same sizes, so each is timed once.
        key = axis, collective, size_bytes
        if key not in self._known:
            ranks, stride = self.local.group(axis)
            moe = self.local.shape.moe
            # 0 = software that sends each copy of a token by itself, also to the same node.
            routes = moe.top_k if moe and self.local.stack.routes_once and axis == "ep" else 0
            groups = (moe.groups, moe.top_groups) if moe else (1, 1)
            self._known[key] = self.links.seconds(collective, size_bytes, ranks, stride, routes, groups)
        return times * self._known[key]

    def _hop(self, exchange: Exchange) -> tuple[int, float]:
        """Return (ranks of a ring, seconds of one of its hops)."""
        ranks, stride = self.local.group(exchange.axis)
        return ranks, self.links.send_seconds(exchange.size_bytes / ranks, stride, ranks)

    def _seconds(self, works: tuple[Work, ...]) -> float:
        slower = self.slower
        return sum([took * slower if bound else took for took, bound, _ in self.speeds.alone(works)]) if works else 0.0


def policy_costs(block: LayerWork, time: BlockTime, local: LocalShape) -> "Policies":
    """Return a block's cost under each recompute policy, repeated passes included."""
    # This policy keeps the output of the core, so all of the pass but the core runs again.
    core = time.repeated[0] - time.core[0], time.repeated[1] - time.core[1]
    again = {"none": (0.0, 0.0), "norms": time.norms, "selective": time.again, "all-but-attention": core}
    return {
        policy: _block_cost(block, time, local, again.get(policy, time.repeated), bytes_of_policy)
        for policy, bytes_of_policy in block.by_policy(alone=local.stack.is_meshwright).items()
    }


def _block_cost(
    block: LayerWork, time: BlockTime, local: LocalShape, again: tuple[float, float], policy: PolicyBytes
) -> MicroBatchCost:  # fmt: skip
    kept_bytes, repeated = policy
    is_engine, back = local.stack.is_meshwright, block.backward
    # Of other software only one peak per layer is known, not its moments.
    mlp = (back.mlp if is_engine else block.transient_bytes) + repeated
    # Embedding and head have no moments inside a block, and store no input of one.
    inside = is_engine and block.boundary_bytes
    attention = back.attention + repeated if inside else 0.0
    new = back.weights * local.width
    return MicroBatchCost(
        forward_s=time.forward[0],
        input_s=time.inputs[0] + again[0],
        weight_s=time.weights_s,
        exchange_s=time.forward[1] + time.inputs[1] + again[1],
        again_s=again[0],
        kept_bytes=kept_bytes,
        mlp_bytes=mlp,
        attention_bytes=attention,
        after_bytes=back.after + repeated if inside else 0.0,
        outside_bytes=back.outside + repeated,
        inner_bytes=back.inner,
        queued_bytes=back.queued,
        # The weight gradient comes later in a split pass, so its bytes are not part of this peak.
        split_bytes=max(0.0, kept_bytes + max(mlp - new, attention) - back.queued),
        weights=back.weights,
        new_bytes=new,
        logits=block.logits,
        largest_kept_bytes=kept_bytes,
    )


class StageKind(NamedTuple):
    """Layers of a pipeline stage: dense ones, those with another window than the first, routed ones, and the ends."""

    dense: int
    windowed: int
    routed: int
    first: bool
    last: bool

    @property
    def layers(self) -> int:
        """Layers of all kinds."""
        return self.dense + self.windowed + self.routed


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of the parts of which stages are composed."""

    embedding: MicroBatchCost
    head: MicroBatchCost
    dense: MicroBatchCost = NO_COST
    windowed: MicroBatchCost = NO_COST
    routed: MicroBatchCost = NO_COST
    stages: dict[StageKind, MicroBatchCost] = field(default_factory=dict, init=False, compare=False)
    """Stages computed so far."""

    def stage(self, kind: StageKind) -> MicroBatchCost:
        """Return the cost of a pipeline stage."""
        if kind not in self.stages:
            dense, windowed, routed, first, last = kind
            total = NO_COST.plus(self.dense, dense).plus(self.windowed, windowed).plus(self.routed, routed)
            self.stages[kind] = total.plus(self.embedding, first).plus(self.head, last)
        return self.stages[kind]


@dataclass(frozen=True, slots=True)
class CostsByPolicy:
    """Costs by recompute policy, each assembled on first use, since a search needs few."""

    parts: dict[str, Policies]
    _made: dict[str, Costs] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getitem__(self, policy: str) -> Costs:
        if policy not in self._made:
            self._made[policy] = Costs(**{part: policies[policy] for part, policies in self.parts.items()})
        return self._made[policy]


class BlockCosts:
    """Costs of blocks and of a model's ends, counted once for all local shapes with the same cost."""

    def __init__(self, speeds: Speeds, links: Links) -> None:
        self.speeds, self.links = speeds, links
        # A memo per part, since the ends read less of a shape than blocks do, and dense blocks less than routed ones.
        self._parts = {part: Memo(self._policies) for part in ("embedding", "head", "dense", "windowed", "routed")}
        self._halves = Memo(self._first_half, most=HALVES)

    def by_policy(self, local: LocalShape) -> CostsByPolicy:
        """Return the costs of every part of a shape, by recompute policy."""
        shape, parts = local.shape, ["embedding", "head"]
        if shape.routed_layers < shape.layers:
            parts += ["dense", "windowed"] if shape.mixed_windows else ["dense"]
        if shape.routed_layers:
            parts.append("routed")
        # Without experts, blocks differ with nearly every local shape: a memo of them would only cost time.
        memoised = parts if shape.moe else parts[:2]
        return CostsByPolicy({
            part: self._parts[part](local, part) if part in memoised else self._policies(local, part) for part in parts
        })  # fmt: skip

    def _time(self, block: LayerWork, local: LocalShape, timed: Mapping[int, Alone] = MappingProxyType({})) -> Policies:
        return policy_costs(block, block_time(block, local, self.speeds, self.links, timed), local)

    def _policies(self, local: LocalShape, part: str) -> Policies:
        """Return the costs of one part. The ends are never recomputed."""
        shape = local.shape
        if part in ("embedding", "head"):
            end = self._time(embedding(local) if part == "embedding" else head(local), local)["none"]
            further = shape.unbuilt.predicts if part == "head" and shape.unbuilt else 0
            if not further:
                return dict.fromkeys(RECOMPUTE, end)
            # A multi-token predictor: join two hidden states, one more layer, and the head again.
            joined = LayerWork(operations=(linear(local, "projection", local.tokens, 2 * shape.hidden, shape.hidden),))
            put = self._time(joined, local)["none"].plus(end)
            last = "routed" if shape.is_moe_layer(shape.layers - 1) else "dense"
            blocks = self._parts[last](local, last)
            return {policy: end.plus(put.plus(cost), further) for policy, cost in blocks.items()}
        # Of two kinds of windows, "dense" stands for layers without one.
        window = 0 if shape.mixed_windows and part == "dense" else shape.window
        if part == "routed" and shape.unbuilt is not None and shape.unbuilt.full_every:
            window = mean_window(shape.window, local.sequence, shape.unbuilt.full_every)
        # Stages are composed of equal layers, so kinds of attention count with their mean.
        mean: Policies = {}
        for state, share in _attention_kinds(shape, part == "routed").items():
            # Only routed layers of other expert parallelism share a half.
            half, timed = (self._halves if shape.moe else self._first_half)(local, window, state)
            block = layer(local, window=window, routed=part == "routed", state=state, attention=half)
            policies = self._time(block, local, timed)
            if share == 1:
                return policies
            mean = {policy: mean.get(policy, NO_COST).plus(cost, share) for policy, cost in policies.items()}
        return mean

    def _first_half(self, local: LocalShape, window: int, state: bool) -> tuple[tuple[LayerOperation, ...], Timed]:
        """Return the first half of a kind of layer, which those that differ in experts share, and its times by `id`."""
        half = first_half(with_attention_kind(local, window, state=state))
        return half, {id(op): alone(op, self.speeds) for op in half}


def _attention_kinds(shape: ModelShape, routed: bool) -> dict[bool, float]:
    """Return {True for linear attention: share of the part's layers}.

    Layers of both kinds are counted as equal ones with the mean cost.
    """
    if shape.unbuilt is None or shape.unbuilt.linear is None:
        return {False: 1.0}
    layers = Counter(bool(shape.linear_of(n)) for n in range(shape.layers) if shape.is_moe_layer(n) == routed)
    return {state: times / layers.total() for state, times in layers.items()}


def mean_window(window: int, sequence: int, full_every: int) -> int:
    """Return the window with which a query sees as many keys as on average over routed layers.

    Every `full_every`-th routed layer has no window. All are counted as one kind.
    """
    windowed, whole = (span - span * span / (2 * sequence) for span in (min(window, sequence), sequence))
    seen = (whole + (full_every - 1) * windowed) / full_every
    return round(sequence - sqrt(max(0.0, sequence * (sequence - 2 * seen))))


def split_by_cost(shape: ModelShape, stages: int) -> list[range]:
    """Split layers over stages by cost, the head weighted by its product.

    The next stage begins with the block after a threshold was reached (nanotron, src/nanotron/models/base.py). A stage
    may hold the head alone, but not nothing.
    """
    layer = 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * shape.hidden * shape.ffn
    whole = shape.layers * layer + shape.vocab * shape.hidden
    sizes, filled = [0] * stages, 0
    for n in range(shape.layers):
        sizes[filled] += 1
        if (n + 1) * layer >= whole * (filled + 1) / stages and filled + 1 < stages:
            filled += 1
    return ranges(sizes)
