"""Costs of blocks and pipeline stages: seconds of a forward and backward pass and bytes kept, for one micro-batch."""

from collections import Counter
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from meshwright.planner.cost.block import embedding, first_half, head, layer, with_attention_kind
from meshwright.planner.cost.block_time import Alone, BlockTime, alone, block_time
from meshwright.planner.cost.layer_work import LayerWork, PolicyBytes
from meshwright.planner.cost.links import Links
from meshwright.planner.cost.local_shape import LocalShape
from meshwright.planner.cost.micro_batch_cost import NO_COST, MicroBatchCost
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.weight_product import linear
from meshwright.planner.cost.work import LayerOperation
from meshwright.spec.layout.layout import RECOMPUTE, Layout
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


@dataclass(frozen=True, slots=True)
class CostsByPolicy:
    """Costs by recompute policy, each assembled on first use, since a search needs few."""

    parts: dict[str, Policies]
    _made: dict[str, Costs] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getitem__(self, policy: str) -> Costs:
        if policy not in self._made:
            self._made[policy] = Costs(**{part: policies[policy] for part, policies in self.parts.items()})
        return self._made[policy]


def costs(
    local: LocalShape, layout: Layout, speeds: Speeds, links: Links, known: dict[tuple[object, ...], Policies],
    halves: "FirstHalves | None" = None,
) -> "CostsByPolicy":  # fmt: skip
    """Return the costs of every part of a shape under a layout, by recompute policy.

    `known` and `halves` cache parts that layouts have in common. Those of this layout are added.
    """
    shape = local.shape
    # the key of a part names all that its cost depends on; a missing field would return another's cost
    code = layout.compile, layout.kernels, layout.cuda_graphs
    inside = local.tp, local.sp, local.splits, local.compiled, local.keeps_norms, local.lowered, local.pieces, *code
    around = local.batch, local.cp, local.ring, local.context_split
    keys: dict[str, tuple[object, ...]] = {"embedding": (local.tokens, *inside), "head": (local.tokens, *inside)}
    if shape.unbuilt and shape.unbuilt.predicts:
        keys["head"] = *keys["head"], *around, local.ep, local.ep_pieces
    if shape.routed_layers < shape.layers:
        keys["dense"] = *around, *inside
    if shape.mixed_windows and shape.routed_layers < shape.layers:
        keys["windowed"] = *around, *inside
    if shape.routed_layers:
        keys["routed"] = *around, local.ep, local.ep_pieces, *inside
    halves = FirstHalves() if halves is None else halves
    parts: dict[str, Policies] = {}
    for part, key in keys.items():
        if (part, key) not in known:
            halves.key = *around, *inside
            known[part, key] = _policies(part, local, layout, speeds, links, halves)
        parts[part] = known[part, key]
    return CostsByPolicy(parts)


@dataclass(slots=True)
class FirstHalves:
    """Cache of first halves of blocks and their work. Blocks that differ in expert parallelism share them."""

    key: tuple[object, ...] = ()
    """Everything a half depends on except its kind of attention."""
    operations: dict[tuple[object, ...], tuple[LayerOperation, ...]] = field(default_factory=dict)
    alone: dict[int, Alone] = field(default_factory=dict)
    """Work of each operation by `id`, valid as long as `operations` holds the operation."""

    def layer_half(self, local: LocalShape, speeds: Speeds, window: int, *, state: bool) -> tuple[LayerOperation, ...]:
        """Return the first half of a kind of layer."""
        key = *self.key, window, state
        if key not in self.operations:
            if len(self.operations) >= HALVES:
                self.operations.clear()
                self.alone.clear()
            half = self.operations[key] = first_half(with_attention_kind(local, window, state=state))
            self.alone.update((id(op), alone(op, speeds)) for op in half)
        return self.operations[key]


HALVES = 64
"""Cached halves. More than the micro-batches of one cell."""


def _policies(
    part: str, local: LocalShape, layout: Layout, speeds: Speeds, links: Links, halves: FirstHalves
) -> Policies:  # fmt: skip
    """Return the costs of one part. The ends are never recomputed."""
    if part in ("embedding", "head"):
        block = embedding(local) if part == "embedding" else head(local)
        end = policy_costs(block, block_time(block, local, layout, speeds, links), local)["none"]
        further = local.shape.unbuilt.predicts if part == "head" and local.shape.unbuilt else 0
        if not further:
            return dict.fromkeys(RECOMPUTE, end)
        # a multi-token predictor: join two hidden states, one more layer, and the head again
        joined = LayerWork(
            operations=(linear(local, "projection", local.tokens, 2 * local.shape.hidden, local.shape.hidden),)
        )
        put = policy_costs(joined, block_time(joined, local, layout, speeds, links), local)["none"].plus(end)
        blocks = _policies(
            "routed" if local.shape.is_moe_layer(local.shape.layers - 1) else "dense",
            local,
            layout,
            speeds,
            links,
            halves,
        )
        return {policy: end.plus(put.plus(cost), further) for policy, cost in blocks.items()}
    mixed = local.shape.mixed_windows
    # of two kinds of windows, "dense" stands for layers without one
    window = 0 if mixed and part == "dense" else local.shape.window
    if part == "routed" and local.shape.unbuilt is not None and local.shape.unbuilt.full_every:
        window = mean_window(local.shape.window, local.sequence, local.shape.unbuilt.full_every)
    # stages are composed of equal layers, so kinds of attention count with their mean
    mean: Policies = {}
    for state, share in _attention_kinds(local.shape, part == "routed").items():
        half = halves.layer_half(local, speeds, window, state=state)
        block = layer(local, window=window, routed=part == "routed", state=state, attention=half)
        each = policy_costs(block, block_time(block, local, layout, speeds, links, halves.alone), local)
        if share == 1:
            return each
        mean = {policy: mean.get(policy, NO_COST).plus(cost, share) for policy, cost in each.items()}
    return mean


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
