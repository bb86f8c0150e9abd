"""Exchanges of tensor, context and expert parallelism inside a layer, and the seconds of an exchange between ranks.

Seconds are latency by steps and bandwidth by span. A group's ring uses the fast links inside a node. Between nodes it
uses as many network cards as it has ranks in a node, and the other groups of the node use the others. An all-reduce
takes the fastest of a ring, a tree (few steps) and, within one node since Hopper, the switch that adds by itself
(NVLS).

Latencies: NCCL's tuner (NVIDIA/nccl src/graph/tuning.cc). Bandwidths: nccl-tests of A100, H200 and B200 nodes
(stas00/ml-engineering network/README.md; VIA-Research/vTrain trace/a100), reproduced within 25 % from 4 MiB on. Letters
as in block.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, log2

from meshwright.planner.cost.micro_batch import LocalShape
from meshwright.planner.cost.speeds import LinkCurves
from meshwright.planner.cost.work import NO_EXCHANGES, Collective, Exchange, Exchanges, LayerOperation, MemoryPass, Work
from meshwright.spec.layout.cluster import Cluster
from meshwright.spec.recipe.recipe import most_answers
from meshwright.spec.rules.passes import holds_codes

SWITCHES: dict[str, dict[str, float]] = {
    "H": {"link_share": 0.81, "switch_from": 5, "switch_share": 0.59},
    "GH": {"link_share": 0.81, "switch_from": 5, "switch_share": 0.59},
    "B": {"link_share": 0.75, "switch_from": 6, "switch_share": 0.53},
    "GB": {"link_share": 0.75, "switch_from": 6, "switch_share": 0.53},
}
"""Prefix of a device's name -> what nccl-tests measured on such nodes."""


def enter(
    local: LocalShape, inputs: int = 1, *, alone: bool = False, readers: Sequence[LayerOperation] = ()
) -> Exchanges:
    """Return f or g before column-split matrices.

    With sp the input is gathered again in the backward pass, unless the `readers` are frozen. It is not either if f and
    g stand `alone`: before another reader too, or before quantized weights.

    Meshwright's engine gathers the input during the products of `readers`, piece by piece in the forward pass. It sums
    the gradient during the weight gradients, unless a split backward pass defers these.
    """
    if local.tp == 1:
        return NO_EXCHANGES
    alone = alone or holds_codes(local.shape)
    beside = readers if local.stack.is_meshwright and not alone else ()
    products, inner = (tuple(work for op in beside for work in getattr(op, side)) for side in ("forward", "inputs"))
    # A split backward pass computes weight gradients later, so nothing is left to hide the sum.
    after = tuple(work for op in beside for work in op.weights) if not local.splits else ()
    if not local.sp:
        return Exchanges((), (Exchange("tp", "all-reduce", local.hidden_bytes, inputs, after),))
    read_again = local.stack.regather and not alone and any(op.weights for op in readers)
    again = (in_pieces(local, "all-gather", inner),) if read_again else ()
    summed = in_pieces(local, "reduce-scatter", after)
    return Exchanges((in_pieces(local, "all-gather", products, waits=True),), (summed, *again))


def leave(local: LocalShape, writer: LayerOperation | None = None) -> Exchanges:
    """Return f* or g* after row-split matrices.

    Meshwright's engine runs it during the product of the `writer`, piece by piece, and gathers the gradient likewise.
    """
    if local.tp == 1:
        return NO_EXCHANGES
    forward, inputs = (writer.forward, writer.inputs) if writer and local.stack.is_meshwright else ((), ())
    if not local.sp:
        whole = Exchange("tp", "all-reduce", local.hidden_bytes)
        return Exchanges((in_pieces(local, "all-reduce", forward, waits=True) if writer else whole,))
    gathered = in_pieces(local, "all-gather", inputs, waits=True)
    return Exchanges((in_pieces(local, "reduce-scatter", forward, waits=True),), (gathered,))


def in_pieces(
    local: LocalShape, collective: Collective, beside: tuple[Work, ...] = (), *, waits: bool = False
) -> Exchange:
    """Return an exchange of the hidden states, one call per piece of the sequence.

    `waits`: the work `beside` has the same pieces, and each needs or produces the piece that is exchanged.
    """
    whole = Exchange("tp", collective, local.hidden_bytes / local.pieces, local.pieces)
    if not waits:
        return whole._replace(beside=beside)
    return whole._replace(within=beside, share=1 - 1 / local.pieces) if local.pieces > 1 else whole


def together(local: LocalShape, columns: float) -> tuple[Work, ...]:
    """Return the memory pass that joins the pieces of a sequence, for this number of columns."""
    return (MemoryPass(2 * local.tokens * columns * local.width),) if local.pieces > 1 else ()


def ring(local: LocalShape, keys_values: float) -> Exchanges:
    """Return the exchanges of context parallelism.

    They are keys and values in both passes, and in the backward pass also their gradients, in fp32.
    """
    if local.cp == 1:
        return NO_EXCHANGES
    size = local.batch * local.sequence * keys_values * local.width
    there, back = ("ring", "ring") if local.ring else ("all-gather", "reduce-scatter")
    keys = Exchange("cp", there, size)  # type: ignore[arg-type]  # two of the collectives
    gradients = Exchange("cp", back, size * 4 / local.width)  # type: ignore[arg-type]  # likewise
    return Exchanges((keys,), (keys, gradients))


def exchange_passes(
    local: LocalShape, size_bytes: float, experts: Sequence[LayerOperation], shared: Sequence[LayerOperation]
) -> tuple[Exchanges, Exchanges]:
    """Return the exchanges of `size_bytes` of rows to their experts and back.

    In the forward pass they stand before and behind the experts' operations, whose pieces hide both, in the backward
    pass the other way round. In Meshwright's engine the shared experts' first product overlaps with the exchange that
    arrives, the rest with the one that returns.
    """
    if local.ep == 1:
        return NO_EXCHANGES, NO_EXCHANGES
    assert local.shape.moe is not None
    # Ranks first tell each other how many rows come: 8 bytes per expert.
    tell = Exchange("ep", "all-to-all", 8.0 * local.shape.moe.experts)
    parts = (
        (shared[:2], shared[2:]) if local.stack.is_meshwright else ((), ())
    )  # entry and first product, then the rest
    # Only what goes to experts may be narrowed: rows in the forward pass, gradients of outputs in the backward pass.
    narrow = (local.stack.dispatch_bytes or local.width) / local.width
    there, back = (
        Exchanges(
            *(
                _exchange_pass(local, size_bytes * (narrow if side == out else 1), experts, part, side)
                for side in (0, 1)
            )
        )
        for out, part in enumerate(parts)
    )
    return there._replace(forward=(tell, *there.forward)), back


def _exchange_pass(
    local: LocalShape,
    size_bytes: float,
    experts: Sequence[LayerOperation],
    shared: Sequence[LayerOperation],
    back: int,
) -> tuple[Exchange]:
    """Return the exchange of the forward pass, or of the backward pass (1)."""
    # Compiled blocks compute weight gradients at once even in a split pass.
    later = local.splits and not local.compiled
    sides = ("inputs",) if back and later else ("inputs", "weights") if back else ("forward",)

    def works(operations: Sequence[LayerOperation]) -> tuple[Work, ...]:
        return tuple(work for op in operations for side in sides for work in getattr(op, side))

    pieces = local.ep_pieces
    whole = Exchange("ep", "all-to-all", size_bytes / pieces, pieces, beside=works(shared))
    others = tuple(exchange for op in shared for exchange in op.exchanges[back] if exchange.beside or exchange.within)
    # Each exchange hides behind half of the experts' pieces; the other half hides the way back.
    return (whole._replace(first=others, within=works(experts) if pieces > 1 else (), share=0.5),)


def balance(local: LocalShape) -> tuple[Exchange, ...]:
    """Return the exchange of experts' shares and probabilities per sequence, where ranks see only a part of it."""
    assert local.shape.moe is not None
    size = 2.0 * local.batch * local.shape.moe.experts * 4
    axes = [axis for axis, parts in (("cp", local.cp), ("tp", local.tp if local.ep > 1 else 1)) if parts > 1]
    return tuple(Exchange(axis, "all-reduce", size) for axis in axes)  # type: ignore[arg-type]  # two of the axes


def answer_sums(local: LocalShape) -> tuple[Exchange, ...]:
    """Return the exchange of log-probability and tokens of each answer, and of padding, in fp64."""
    size = local.batch * (most_answers(local.sequence) + 1) * 2 * 8
    return (Exchange("cp", "all-reduce", size),) if local.cp > 1 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Rates that the links of a cluster reach."""

    per_node: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    link_share: float = 0.78
    """Bus bandwidth of a ring with large messages, over the data sheet's one-direction figure."""
    network_share: float = 0.75
    base_s: float = 3.0e-5
    """Seconds of any collective."""
    network_base_s: float = 1.0e-4
    """Added for a collective that leaves the node."""
    link_step_s: float = 4.0e-6
    """Seconds of a ring step inside a node."""
    network_step_s: float = 1.4e-5
    """Seconds of a step between nodes."""
    switch_from: int = 0
    """Ranks in one node from which all-reduces are summed in the switch. 0 = never."""
    switch_share: float = 0.59
    """Bytes/s of the tensor in such an all-reduce, over the data sheet's one-direction figure."""
    crowding: float = 0.0
    """Loss of bandwidth for each doubling of nodes beyond one."""
    curves: LinkCurves | None = None
    """Measurements inside this very node. There they replace latency and bandwidth, divided by curve_share."""
    curve_share: float = 1.0

    def seconds(
        self, collective: str, size_bytes: float, ranks: int, stride: int = 1, routes: int = 0,
        groups: tuple[int, int] = (1, 1),
    ) -> float:  # fmt: skip
        """Return the seconds of one collective over `ranks` ranks that lie `stride` ranks apart.

        Args:
            size_bytes: As in work.Exchange.
            routes: Of so many equal rows, each node receives at most one and forwards it (all-to-all).
            groups: (groups of experts, groups that a token goes to).
        """
        if ranks <= 1 or not size_bytes:
            return 0.0
        inside, nodes = self.span(ranks, stride)
        # A measured time replaces the model, but only within a node: no curves exist across nodes.
        if nodes == 1 and self.curves:
            measured = self.curves.exchange_s(collective, size_bytes, ranks)
            if measured is not None:
                return measured / self.curve_share
        bandwidth = self.bandwidth(inside, nodes)
        # Rows for the node and for other nodes travel at once over different links: the slower decides.
        if collective == "all-to-all" and nodes > 1:
            once = nodes_reached(routes, nodes, *groups) / routes if routes else 1.0
            away = once * size_bytes * (nodes - 1) / nodes / (self.network_bytes_per_s * self.network_share)
            near = size_bytes * (inside - 1) / inside / (self.link_bytes_per_s * self.link_share)
            return self.base_s + self.network_base_s + (nodes - 1) * self.network_step_s + max(away, near)
        # Rings: every rank passes all but its own share to the next, a step per rank.
        moved = size_bytes * (ranks - 1) / ranks
        ring_s = (ranks - nodes) * self.link_step_s + (nodes - 1) * self.network_step_s + moved / bandwidth
        base_s = self.base_s + (self.network_base_s if nodes > 1 else 0.0)
        if collective != "all-reduce":
            return base_s + ring_s
        # A sum is a reduce-scatter and an all-gather, or a tree, or done by the switch: NCCL takes the fastest.
        best = min(2 * ring_s, self._tree_s(size_bytes, inside, nodes))
        if self.switch_from and ranks >= self.switch_from and nodes == 1:
            best = min(best, self.base_s + size_bytes / (self.link_bytes_per_s * self.switch_share))
        return base_s + best

    def _tree_s(self, size_bytes: float, inside: int, nodes: int) -> float:
        """Return the seconds of a tree, whose sums run inside and between nodes at once.

        2 (K - 1) / K of the tensor leaves each of K nodes.
        """
        hops_s = 2 * ((inside - 1) * self.link_step_s + log2(nodes) * self.network_step_s)
        near_s = 2 * size_bytes / (self.link_bytes_per_s * self.link_share)
        away_s = 2 * (nodes - 1) / nodes * size_bytes / self.bandwidth(inside, nodes) if nodes > 1 else 0.0
        return hops_s + max(near_s, away_s)

    def span(self, ranks: int, stride: int) -> tuple[int, int]:
        """Return (ranks of a group in one node, nodes)."""
        inside = max(1, min(ranks, self.per_node // stride)) if stride < self.per_node else 1
        return inside, -(-ranks // inside)

    def bandwidth(self, inside: int, nodes: int) -> float:
        """Return bytes/s of a rank's ring: the network cards together, at most the links."""
        link = self.link_bytes_per_s * self.link_share
        if nodes == 1:
            return link
        network = inside * self.network_bytes_per_s * self.network_share
        return min(link, network) / (1 + self.crowding * log2(nodes))

    def send_seconds(self, size_bytes: float, stride: int, ranks: int = 2) -> float:
        """Return the seconds of one transfer to the next of `ranks` that lie `stride` apart.

        The slowest transfer counts: between nodes if any border lies between nodes.
        """
        near = stride * ranks <= self.per_node
        measured = self.curves.exchange_s("send", size_bytes, 2) if near and self.curves else None
        if measured is not None:
            return measured / self.curve_share
        rate = self.link_bytes_per_s * self.link_share if near else self.network_bytes_per_s * self.network_share
        return self.base_s / 2 + size_bytes / rate


def nodes_reached(routes: int, nodes: int, groups: int = 1, top_groups: int = 1) -> float:
    """Return the average number of nodes that hold a token's experts, all equally likely.

    With groups a token reaches the experts of a few (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). A node holds
    equally many groups as others or one more, or a group spans nodes.
    """
    if groups <= nodes:
        # The nodes over which the groups of a token spread.
        within = nodes * top_groups / groups
        return within * (1 - (1 - 1 / within) ** routes)
    held, more = divmod(groups, nodes)
    few, one_more = (_missed(routes, held + extra, groups, top_groups) for extra in (0, 1))
    return nodes * (1 - few + (few - one_more) * more / nodes)


def _missed(routes: int, held: int, groups: int, top_groups: int) -> float:
    """Return the probability that a token has no expert on a node that holds `held` of the groups."""
    return sum(
        comb(held, there) * comb(groups - held, top_groups - there) * (1 - there / top_groups) ** routes
        for there in range(min(held, top_groups) + 1)
    ) / comb(groups, top_groups)


def links_of(cluster: Cluster) -> Links:
    """Return the links of a cluster from its data sheet."""
    device = cluster.device
    link = device.link_bytes_per_s or device.memory_bytes_per_s / 10 or 1e10
    known = next((v for start, v in SWITCHES.items() if device.name.upper().startswith(start)), {})
    return Links(
        per_node=cluster.devices_per_node,
        link_bytes_per_s=link,
        network_bytes_per_s=device.network_bytes_per_s or link / 10,
        **known,  # type: ignore[arg-type]  # fields that are numbers
    )
