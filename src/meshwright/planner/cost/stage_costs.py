"""Costs of blocks and pipeline stages: seconds of a forward and backward pass and bytes kept, for one micro-batch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from types import MappingProxyType
from typing import NamedTuple

from meshwright.planner.cost.block import embedding, first_half, head, layer, with_attention_kind
from meshwright.planner.cost.block_time import Alone, BlockTime, alone, block_time
from meshwright.planner.cost.layer_work import LayerWork, PolicyBytes
from meshwright.planner.cost.links import Links
from meshwright.planner.cost.local_shape import LocalShape
from meshwright.planner.cost.micro_batch_cost import NO_COST, MicroBatchCost
from meshwright.planner.cost.recorded import Memo
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.weight_product import linear
from meshwright.planner.cost.work import LayerOperation
from meshwright.spec.layout.layout import RECOMPUTE
from meshwright.spec.layout.schedule import ranges
from meshwright.spec.model.shape import ModelShape


def policy_costs(block: LayerWork, time: BlockTime, local: LocalShape) -> "Policies":
    """Return a block's cost under each recompute policy, repeated passes included."""
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
    # of other software only one peak per layer is known, not its moments
    mlp = (back.mlp if is_engine else block.transient_bytes) + repeated
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
        # the weight gradient comes later in a split pass, so its bytes are not part of this peak
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


Policies = dict[str, MicroBatchCost]
"""Cost by recompute policy."""
Timed = dict[int, Alone]
"""Work of each operation by `id`, valid beside the operations themselves."""


@dataclass(frozen=True, slots=True)
class CostsByPolicy:
    """Costs by recompute policy, each assembled on first use, since a search needs few."""

    parts: dict[str, Policies]
    _made: dict[str, Costs] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getitem__(self, policy: str) -> Costs:
        if policy not in self._made:
            self._made[policy] = Costs(**{part: policies[policy] for part, policies in self.parts.items()})
        return self._made[policy]


HALVES = 64
"""Cached halves. More than the micro-batches of one cell."""


class BlockCosts:
    """Costs of blocks and of a model's ends, counted once for all local shapes with the same cost."""

    def __init__(self, speeds: Speeds, links: Links) -> None:
        self.speeds, self.links = speeds, links
        # a memo per part, since the ends read less of a shape than blocks do, and dense blocks less than routed ones
        self._parts = {part: Memo(self._policies) for part in ("embedding", "head", "dense", "windowed", "routed")}
        self._halves = Memo(self._first_half, most=HALVES)

    def by_policy(self, local: LocalShape) -> CostsByPolicy:
        """Return the costs of every part of a shape, by recompute policy."""
        shape, parts = local.shape, ["embedding", "head"]
        if shape.routed_layers < shape.layers:
            parts += ["dense", "windowed"] if shape.mixed_windows else ["dense"]
        if shape.routed_layers:
            parts.append("routed")
        # without experts, blocks differ with nearly every local shape: a memo of them would only cost time
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
            # a multi-token predictor: join two hidden states, one more layer, and the head again
            joined = LayerWork(operations=(linear(local, "projection", local.tokens, 2 * shape.hidden, shape.hidden),))
            put = self._time(joined, local)["none"].plus(end)
            last = "routed" if shape.is_moe_layer(shape.layers - 1) else "dense"
            blocks = self._parts[last](local, last)
            return {policy: end.plus(put.plus(cost), further) for policy, cost in blocks.items()}
        # of two kinds of windows, "dense" stands for layers without one
        window = 0 if shape.mixed_windows and part == "dense" else shape.window
        if part == "routed" and shape.unbuilt is not None and shape.unbuilt.full_every:
            window = mean_window(shape.window, local.sequence, shape.unbuilt.full_every)
        # stages are composed of equal layers, so kinds of attention count with their mean
        mean: Policies = {}
        for state, share in _attention_kinds(shape, part == "routed").items():
            # only routed layers of other expert parallelism share a half
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
