"""What Muon takes of a step beside reading and writing its states: products, what travels, buffers. In closed form,
since the search asks for thousands of layouts; spec/matrix_exchange.py deals out the matrices themselves (tests hold
both together)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import NamedTuple

from meshwright.planner.cost.links import Links
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.kernels.kernel_operations import Product
from meshwright.spec.boxes import boxes_of, sharded_dim
from meshwright.spec.inventory import Parameter, parameters, tp_holders
from meshwright.spec.layout import Layout
from meshwright.spec.matrix_exchange import (
    ITERATIONS,
    ROUND_ELEMENTS,
    WORK_BYTES,
    round_elements,
    rounds,
    stage_ranks,
)
from meshwright.spec.shape import ModelShape

UPDATED_AT_ONCE_BYTES = 4 * 16 * 2**20
"""Temporaries of elementwise work: some of 2**22 elements in fp32 (training/muon.py)."""
DIRECTION_BYTES = 8.0
"""Of an element: the direction is written, and read again to be sent."""


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """Of a dense and of a routed layer: seconds of all products on one device; and of the longest matrix's."""

    dense_s: float = 0.0
    routed_s: float = 0.0
    longest_s: float = 0.0
    largest: int = 0
    """Elements of the largest matrix."""
    widest: int = 0
    """Elements of the largest parameter: all experts of a layer are one."""
    sizes: tuple["MatrixSize", ...] = ()


class MatrixSize(NamedTuple):
    """Matrices of one size: elements of one, of all in a dense and in a routed layer, and the shorter side as a share
    of the longer, which is that of its product with itself."""

    numel: int
    dense: int
    routed: int
    share: float


class Moved(NamedTuple):
    """Elements of a layer's matrices on a rank, on average: what it owns, what it sends to owners and to holders, what
    it updates. And of how many ranks the most common piece is."""

    owned: float = 0.0
    gathered: float = 0.0
    scattered: float = 0.0
    updated: float = 0.0
    copies: float = 1.0

    def plus(self, other: "Moved", times: float) -> "Moved":
        """With so many times another's."""
        owned, gathered, scattered, updated = (a + times * b for a, b in zip(self[:4], other[:4], strict=True))
        return Moved(owned, gathered, scattered, updated, max(self.copies, other.copies if times else 1.0))


@cache
def _layer(shape: ModelShape, routed: bool) -> tuple[Parameter, ...]:
    """The parameters with matrices of a layer of a kind."""
    kind = next((n for n in range(shape.layers) if shape.is_moe_layer(n) == routed), -1)
    return tuple(one for one in parameters(shape) if one.layer == kind and kind >= 0 and one.matrices)


def spread(parameter: Parameter, shape: ModelShape, layout: Layout) -> tuple[int, float]:
    """(pieces of each of its matrices, ranks that hold each piece) over the ranks of a stage."""
    ranks = layout.dp * layout.cp * layout.tp
    apart = parameter.group == "expert" and layout.ep > 1
    sharers = (
        (ranks // layout.dp_replicate // layout.ep if apart else layout.dp_shard * layout.cp) if layout.zero else 1
    )
    sizes = boxes_of([parameter], shape, layout, 0)[parameter.name].sizes
    dim = sharded_dim(sizes, sharers)
    inside = dim >= len(sizes) - 2
    cuts = ceil(sizes[dim] / ceil(sizes[dim] / sharers)) if inside else 1
    beside = layout.ep if apart else layout.tp // tp_holders(parameter, shape, layout)
    return (1 if apart else beside) * cuts, max(1.0, ranks / beside / sharers)


@cache
def moved(shape: ModelShape, layout: Layout, routed: bool) -> Moved:
    """Of a layer. `layout` with degrees of data, context, tensor and expert parallelism and ZeRO alone."""
    ranks, found = layout.dp * layout.cp * layout.tp, Moved()
    for one in _layer(shape, routed):
        pieces, copies = spread(one, shape, layout)
        own = copies / ranks if pieces > 1 else 1.0  # share of a matrix that its owner holds
        sent = one.numel / ranks
        found = found.plus(Moved(sent, sent * (1 - own), sent * (copies - own), sent * copies, copies), 1)
    return found


def layer_matrices(shape: ModelShape, precision: str, speeds: Speeds) -> LayerMatrices:
    """Seconds by a device's speeds."""
    width = WORK_BYTES[precision]
    each = {routed: [(one, _matrix_s(one, speeds, width)) for one in _layer(shape, routed)] for routed in (False, True)}
    every = [pair for some in each.values() for pair in some]
    if not every:
        return LayerMatrices()
    dense, routed = (sum(one.matrices[0] * s for one, s in each[kind] if one.matrices) for kind in (False, True))
    sizes = _sizes(shape)
    widest = max(one.numel for one, _ in every)
    return LayerMatrices(dense, routed, max(s for _, s in every), max(one.numel for one in sizes), widest, sizes)


def _sizes(shape: ModelShape) -> tuple[MatrixSize, ...]:
    found: dict[tuple[int, int], list[int]] = {}
    for routed in (False, True):
        for one in _layer(shape, routed):
            assert one.matrices is not None
            found.setdefault(one.matrices[1:], [0, 0])[routed] += one.numel
    return tuple(
        MatrixSize(rows * columns, dense, routed, min(rows, columns) / max(rows, columns))
        for (rows, columns), (dense, routed) in found.items()
    )


def _matrix_s(parameter: Parameter, speeds: Speeds, width: int) -> float:
    """Of one matrix, among as many of its size as a round has room for."""
    assert parameter.matrices is not None
    number, rows, columns = parameter.matrices
    small, large = sorted((rows, columns))
    batch = min(number, max(1, ROUND_ELEMENTS // (rows * columns)))
    shapes = (small, large, small), (small, small, small), (small, small, large)
    return ITERATIONS * sum(speeds.seconds(Product(*one, batch, width)) for one in shapes) / batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCosts:
    """Of one model, recipe and cluster."""

    shape: ModelShape
    width: int
    """Bytes of an element that travels."""
    layers: LayerMatrices
    speeds: Speeds
    links: Links

    def moved(self, layout: Layout, dense: int, routed: int) -> Moved:
        """Of a rank with so many layers."""
        cuts = Layout(
            dp_replicate=layout.dp_replicate, dp_shard=layout.dp_shard, cp=layout.cp, tp=layout.tp, ep=layout.ep,
            zero=layout.zero,
        )  # fmt: skip
        found = Moved()
        for kind, times in ((False, dense), (True, routed)):
            if times:
                found = found.plus(moved(self.shape, cuts, kind), times)
        return found

    def seconds(self, layout: Layout, dense: int, routed: int) -> float:
        """Of a rank of a stage with so many layers: its share of the products, or one whole matrix; what travels, and
        what is read and written for that."""
        return self._products_s(layout, dense, routed) + self.exchange_s(layout, self.moved(layout, dense, routed))

    def least_s(self, layout: Layout, dense: int, routed: int) -> float:
        """Not above the truth where a rank holds at least so many layers. Of layers of two kinds the products alone:
        rounds have more room where matrices are held more often."""
        mixed = 0 < self.shape.routed_layers < self.shape.layers
        return self._products_s(layout, dense, routed) if mixed else self.seconds(layout, dense, routed)

    def _products_s(self, layout: Layout, dense: int, routed: int) -> float:
        ranks, layers = layout.dp * layout.cp * layout.tp, self.layers
        return max((dense * layers.dense_s + routed * layers.routed_s) / ranks, layers.longest_s)

    def exchange_s(self, layout: Layout, one: Moved) -> float:
        """Both ways, in as many calls as there are rounds; and the copies on both ends: pieces, whole matrices and
        pieces again."""
        ranks, w, sent_s = layout.dp * layout.cp * layout.tp, self.width, 0.0
        times = max(1.0, one.owned / self._whole(one)) if one.owned else 0.0
        for size in (one.gathered, one.scattered):
            if ranks > 1 and times:
                each = size / times * w * ranks / (ranks - 1)
                sent_s += times * self.links.seconds("all-to-all", each, ranks)
        copied = 4 * w * one.owned + one.updated * (DIRECTION_BYTES + 3 * w)
        return sent_s + self.speeds.update_seconds(copied)

    def _whole(self, one: Moved) -> int:
        """Elements of matrices that a rank has in a round, at most."""
        return round_elements(self.layers.largest, round(one.copies))

    def buffer_bytes(self, layout: Layout, dense: int, routed: int) -> float:
        """The most of a round: its matrices, and those of one size in the next iteration with two products of each
        with itself; or what is sent to their holders and what is received from their owners."""
        one, layers = self.moved(layout, dense, routed), self.layers
        if not one.owned:
            return 0.0
        ranks = layout.dp * layout.cp * layout.tp
        whole = min(self._whole(one), max(layers.largest, one.owned))
        inside = max(
            min(whole, max(size.numel, (dense * size.dense + routed * size.routed) / ranks)) * (1 + 2 * size.share)
            for size in layers.sizes
        )
        most = max(whole + inside, whole * 2 * one.updated / one.owned)
        return max(most * self.width, min(UPDATED_AT_ONCE_BYTES, 16.0 * min(layers.widest, one.updated)))


def matrix_traffic(shape: ModelShape, layout: Layout, rank: int, precision: str) -> Iterator[tuple[str, str, int, int]]:
    """(axis, collective, calls, bytes) of what a rank sends in a step: the very exchange, matrix by matrix."""
    here = stage_ranks(layout, rank).index(rank)
    for one in rounds(shape, layout, rank):
        for runs, parts in ((one.gathers, one.sent), (one.scatters, one.scattered)):
            if runs:
                sent = sum(part.numel for part in parts if part.peer != here)
                yield "stage", "all_to_all", 1, sent * WORK_BYTES[precision]
