"""The sums of blocks and pipeline stages: seconds of a forward and backward pass, bytes kept, for one micro-batch."""

from collections import Counter
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from meshwright.planner.cost.block import embedding, first_half, head, layer, of_kind
from meshwright.planner.cost.block_time import Alone, BlockTime, alone, block_time
from meshwright.planner.cost.layer_work import LayerWork, PolicyBytes
from meshwright.planner.cost.links import Links
from meshwright.planner.cost.local_shape import Local
from meshwright.planner.cost.micro_batch_cost import NO_COST, MicroBatchCost
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.weight_product import linear
from meshwright.planner.cost.work import LayerOperation
from meshwright.spec.layout import RECOMPUTE, Layout
from meshwright.spec.schedule import ranges
from meshwright.spec.shape import ModelShape


def policy_costs(block: LayerWork, time: BlockTime, of: Local) -> "Policies":
    """A block's passes and kept bytes under each recompute policy, with what it repeats."""
    core = time.repeated[0] - time.core[0], time.repeated[1] - time.core[1]
    again = {"none": (0.0, 0.0), "norms": time.norms, "selective": time.again, "all-but-attention": core}
    return {
        policy: _block_cost(block, time, of, again.get(policy, time.repeated), bytes_of_policy)
        for policy, bytes_of_policy in block.by_policy(alone=of.stack.own).items()
    }


def _block_cost(
    block: LayerWork, time: BlockTime, of: Local, again: tuple[float, float], policy: PolicyBytes
) -> MicroBatchCost:  # fmt: skip
    kept, repeated = policy
    own, back = of.stack.own, block.backward
    mlp = (back.mlp if own else block.transient_bytes) + repeated
    inside = own and block.boundary_bytes
    attention = back.attention + repeated if inside else 0.0
    new = back.weights * of.width
    return MicroBatchCost(
        forward_s=time.forward[0],
        input_s=time.inputs[0] + again[0],
        weight_s=time.weights_s,
        exchange_s=time.forward[1] + time.inputs[1] + again[1],
        again_s=again[0],
        kept_bytes=kept,
        mlp_bytes=mlp,
        attention_bytes=attention,
        after_bytes=back.after + repeated if inside else 0.0,
        outside_bytes=back.outside + repeated,
        inner_bytes=back.inner,
        queued_bytes=back.queued,
        split_bytes=max(0.0, kept + max(mlp - new, attention) - back.queued),
        weights=back.weights,
        new_bytes=new,
        logits=block.logits,
        largest_kept_bytes=kept,
    )


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


@dataclass(frozen=True, slots=True)
class CostsByPolicy:
    """By recompute policy, put together when one is asked for first: a search asks for few."""

    parts: dict[str, Policies]
    _made: dict[str, Costs] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getitem__(self, policy: str) -> Costs:
        if policy not in self._made:
            self._made[policy] = Costs(**{part: policies[policy] for part, policies in self.parts.items()})
        return self._made[policy]


def costs(
    of: Local, layout: Layout, speeds: Speeds, links: Links, known: dict[tuple[object, ...], Policies],
    halves: "FirstHalves | None" = None,
) -> "CostsByPolicy":  # fmt: skip
    """Of every part of a shape under a layout, by recompute policy. `known`: parts that other layouts have had; those
    of this one are added. `halves`: likewise."""
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
    halves = FirstHalves() if halves is None else halves
    found: dict[str, Policies] = {}
    for part, key in keys.items():
        if (part, key) not in known:
            halves.key = *around, *inside
            known[part, key] = _policies(part, of, layout, speeds, links, halves)
        found[part] = known[part, key]
    return CostsByPolicy(found)


@dataclass(slots=True)
class FirstHalves:
    """First halves of blocks that were asked for last, and their work alone: blocks that differ in expert parallelism
    have the same."""

    key: tuple[object, ...] = ()
    """All that a half depends on, but for its kind of attention."""
    operations: dict[tuple[object, ...], tuple[LayerOperation, ...]] = field(default_factory=dict)
    alone: dict[int, Alone] = field(default_factory=dict)
    """Of each operation, by `id`, which is its own as long as `operations` hold it."""

    def of_layer(self, of: Local, speeds: Speeds, window: int, *, state: bool) -> tuple[LayerOperation, ...]:
        """The half of a kind of layer."""
        key = *self.key, window, state
        if key not in self.operations:
            if len(self.operations) >= HALVES:
                self.operations.clear()
                self.alone.clear()
            half = self.operations[key] = first_half(of_kind(of, window, state=state))
            self.alone.update((id(op), alone(op, speeds)) for op in half)
        return self.operations[key]


HALVES = 64
"""More than micro-batches of one cell."""


def _policies(
    part: str, of: Local, layout: Layout, speeds: Speeds, links: Links, halves: FirstHalves
) -> Policies:  # fmt: skip
    """Of one part; the ends are never recomputed."""
    if part in ("embedding", "head"):
        block = embedding(of) if part == "embedding" else head(of)
        end = policy_costs(block, block_time(block, of, layout, speeds, links), of)["none"]
        further = of.shape.unbuilt.predicts if part == "head" and of.shape.unbuilt else 0
        if not further:
            return dict.fromkeys(RECOMPUTE, end)
        joined = LayerWork(operations=(linear(of, "projection", of.tokens, 2 * of.shape.hidden, of.shape.hidden),))
        put = policy_costs(joined, block_time(joined, of, layout, speeds, links), of)["none"].plus(end)
        blocks = _policies(
            "routed" if of.shape.is_moe_layer(of.shape.layers - 1) else "dense", of, layout, speeds, links, halves
        )
        return {policy: end.plus(put.plus(one), further) for policy, one in blocks.items()}
    mixed = of.shape.mixed_windows
    window = 0 if mixed and part == "dense" else of.shape.window
    if part == "routed" and of.shape.unbuilt is not None and of.shape.unbuilt.full_every:
        window = mean_window(of.shape.window, of.sequence, of.shape.unbuilt.full_every)
    found: Policies = {}
    for state, share in _kinds(of.shape, part == "routed").items():
        half = halves.of_layer(of, speeds, window, state=state)
        block = layer(of, window=window, routed=part == "routed", state=state, attention=half)
        each = policy_costs(block, block_time(block, of, layout, speeds, links, halves.alone), of)
        if share == 1:
            return each
        found = {policy: found.get(policy, NO_COST).plus(cost, share) for policy, cost in each.items()}
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
