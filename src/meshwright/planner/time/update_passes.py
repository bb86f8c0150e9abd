"""Kernels of an optimizer step, and the bytes that each moves (training/optimizer/optimizer.py); Muon's products.

Muon's products, traffic and buffers are counted in closed form, since the search needs thousands of layouts.
spec/memory/matrix_exchange.py distributes the matrices themselves, and tests compare both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import NamedTuple

from meshwright.planner.cost.exchanges import Links
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.stack import Stack
from meshwright.planner.cost.states import ElementCounts, States
from meshwright.planner.kernels.kernel_operations import Product
from meshwright.spec.layout.layout import Layout
from meshwright.spec.memory.matrix_exchange import (
    ITERATIONS,
    ROUND_ELEMENTS,
    WORK_BYTES,
    round_elements,
    rounds,
    stage_ranks,
)
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.weights.boxes import boxes_of, sharded_dim
from meshwright.spec.weights.inventory import Parameter, parameters, tp_holders

GRADIENT_BYTES = 4.0
"""Bytes of a gradient as the optimizer of other software reads it."""
NORM_BYTES = 4.0
"""Bytes to read such gradients once for their norm."""
NARROW_BYTES = 18.0
"""Bytes with 8-bit moments: code books and scales bound that kernel, whatever the weights are."""


class UpdatePass(NamedTuple):
    """One kernel over all parameters of a rank."""

    kernel: str
    """Name in Speeds.update_shares."""
    weight_bytes: float
    """Bytes per parameter: gradient and weights, read and written."""
    moments: float = 0.0
    """Times that it moves the bytes of the moments."""


def update_passes(
    stack: Stack, recipe: Recipe, gradient_bytes: float, *, at_once: bool = False, measured: bool = False
) -> tuple[UpdatePass, ...]:
    """Return the kernels in the order in which they run. A `measured` machine has one, as `calibrate` timed it.

    torch's AdamW reads gradients in fp32, and its masters are rounded to new weights. Kernels of narrower moments, and
    of fp32 ones `at_once` (kernels/triton/updates.py), read gradients as they are and write both.
    `gradient_bytes`: of a gradient as kept over a step.
    """
    sixteen, storage = recipe.precision != "fp32", recipe.storage
    only = 4.0 if sixteen else 8.0
    weights = 8.0 + 2.0 if sixteen and storage.masters else only
    if not stack.is_meshwright or measured:
        return (UpdatePass("", NORM_BYTES + GRADIENT_BYTES + weights, 2.0),)
    norm = UpdatePass("half" if at_once else "norm", gradient_bytes)
    # One kernel per format of moments; torch's AdamW serves fp32 ones.
    if storage.moments == "int8":
        return norm, UpdatePass("narrow", NARROW_BYTES)
    if storage.narrow or at_once:
        return norm, UpdatePass("half", gradient_bytes + weights, 2.0)
    rounded = (UpdatePass("copy", 4.0 + 2.0),) if sixteen else ()
    return norm, UpdatePass("adamw", 4.0 + 8.0, 2.0), *rounded


def update_seconds(
    speeds: Speeds, stack: Stack, recipe: Recipe, elements: float, moment_bytes: float, gradient_bytes: float,
    *, at_once: bool = False,
) -> float:  # fmt: skip
    """Return the seconds of the optimizer over a rank's elements and moments, and of the norm of its gradients."""
    passes = update_passes(stack, recipe, gradient_bytes, at_once=at_once, measured=speeds.curves is not None)
    return sum(
        speeds.update_seconds(elements * kernel.weight_bytes + kernel.moments * moment_bytes, kernel.kernel)
        for kernel in passes
    )


class GradientSums(NamedTuple):
    """Summation of a rank's 16-bit gradients in fp32 (kernels/linear/weight_gradients.py)."""

    learned: float
    """Trained elements of its parameters."""
    updated: float
    """Elements that the rank updates."""
    micro_batches: int
    reduces_each: bool
    """Each micro-batch's gradients are reduced separately (ZeRO-2 and -3 without a pipeline)."""

    def seconds(
        self, speeds: Speeds, stack: Stack, recipe: Recipe, gradient_bytes: float, *, at_once: bool = False
    ) -> float:
        """Return the seconds of widening and adding gradients in separate passes.

        Each gradient is widened where it is summed first, and later ones are added. A gradient without a sum is read as
        it is, if the kernel can. Other software adds inside its products, or sets Stack.accumulates.
        """
        if not stack.is_meshwright or speeds.curves is not None or recipe.precision == "fp32":
            return 0.0
        if gradient_bytes < 4 and (recipe.storage.narrow or at_once):
            return 0.0
        widened = self.learned * (2.0 + 4.0) * (self.micro_batches if self.reduces_each else 1)
        added = (self.micro_batches - 1) * (self.updated * 12.0 if self.reduces_each else self.learned * (2.0 + 8.0))
        return speeds.update_seconds(widened, "widen") + (speeds.update_seconds(added, "add") if added else 0.0)


def optimizer_seconds(
    speeds: Speeds,
    stack: Stack,
    recipe: Recipe,
    layout: Layout,
    count: ElementCounts,
    state: States,
    micro_batches: int,
) -> float:
    """Return the seconds of a rank to sum the gradients of a step and update its weights.

    With CUDA graphs gradients stay in place: they are zeroed and added to.
    """
    sums = GradientSums(count.learned, count.updated, micro_batches, layout.zero >= 2 and layout.pp == 1)
    at_once, width = stack.updates_at_once and layout.kernels in ("auto", "triton"), state.gradient_bytes
    seconds = update_seconds(speeds, stack, recipe, count.updated, count.moments, width, at_once=at_once)
    seconds += sums.seconds(speeds, stack, recipe, width, at_once=at_once)
    return seconds + (speeds.update_seconds(4 * state.step["gradients"]) if layout.cuda_graphs == "on" else 0.0)


UPDATED_AT_ONCE_BYTES = 4 * 16 * 2**20
"""Temporaries of elementwise work: several of 2**22 fp32 elements (training/optimizer/muon.py)."""
DIRECTION_BYTES = 8.0
"""Bytes per element to write the direction and read it again for sending."""


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """Seconds of all products of a dense and of a routed layer on one device, and of the longest matrix."""

    dense_s: float = 0.0
    routed_s: float = 0.0
    longest_s: float = 0.0
    largest: int = 0
    """Elements of the largest matrix."""
    widest: int = 0
    """Elements of the largest parameter. All experts of a layer are one."""
    sizes: tuple["MatrixSize", ...] = ()


class MatrixSize(NamedTuple):
    """Matrices of one size.

    Elements of one, of all in a dense and in a routed layer, and the shorter side over the longer. The latter is the
    relative size of a matrix's product with itself.
    """

    numel: int
    dense: int
    routed: int
    share: float


class Moved(NamedTuple):
    """Elements of a layer's matrices on a rank, on average.

    Those that it owns, sends to owners, sends to holders, and updates. `copies`: ranks that hold the most common piece.
    """

    owned: float = 0.0
    gathered: float = 0.0
    scattered: float = 0.0
    updated: float = 0.0
    copies: float = 1.0

    def plus(self, other: "Moved", times: float) -> "Moved":
        """Return the sum with `times` of another."""
        owned, gathered, scattered, updated = (a + times * b for a, b in zip(self[:4], other[:4], strict=True))
        return Moved(owned, gathered, scattered, updated, max(self.copies, other.copies if times else 1.0))


@cache
def _layer_matrices(shape: ModelShape, routed: bool) -> tuple[Parameter, ...]:
    """Return the parameters with matrices in a layer of this kind."""
    kind = next((n for n in range(shape.layers) if shape.is_moe_layer(n) == routed), -1)
    return tuple(p for p in parameters(shape) if p.layer == kind and kind >= 0 and p.matrices)


def spread(parameter: Parameter, shape: ModelShape, layout: Layout) -> tuple[int, float]:
    """Return (pieces of each matrix, ranks that hold each piece) over the ranks of a stage."""
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
    """Return the moved elements of a layer.

    `layout` has only degrees of data, context, tensor, expert parallelism and ZeRO.
    """
    ranks, total = layout.dp * layout.cp * layout.tp, Moved()
    for parameter in _layer_matrices(shape, routed):
        pieces, copies = spread(parameter, shape, layout)
        owned = copies / ranks if pieces > 1 else 1.0  # share of a matrix on its owner
        sent = parameter.numel / ranks
        total = total.plus(Moved(sent, sent * (1 - owned), sent * (copies - owned), sent * copies, copies), 1)
    return total


def layer_matrices(shape: ModelShape, precision: str, speeds: Speeds) -> LayerMatrices:
    """Return the seconds of a shape's matrices at a device's speeds."""
    # Routed and dense layers differ in matrices, layers of a kind do not.
    width = WORK_BYTES[precision]
    each = {
        routed: [(matrix, _matrix_s(matrix, speeds, width)) for matrix in _layer_matrices(shape, routed)]
        for routed in (False, True)
    }
    every = [pair for pairs in each.values() for pair in pairs]
    if not every:
        return LayerMatrices()
    dense, routed = (
        sum(matrix.matrices[0] * s for matrix, s in each[kind] if matrix.matrices) for kind in (False, True)
    )
    sizes = _sizes(shape)
    widest = max(matrix.numel for matrix, _ in every)
    return LayerMatrices(dense, routed, max(s for _, s in every), max(size.numel for size in sizes), widest, sizes)


def _sizes(shape: ModelShape) -> tuple[MatrixSize, ...]:
    sizes: dict[tuple[int, int], list[int]] = {}
    for routed in (False, True):
        for parameter in _layer_matrices(shape, routed):
            assert parameter.matrices is not None
            sizes.setdefault(parameter.matrices[1:], [0, 0])[routed] += parameter.numel
    return tuple(
        MatrixSize(rows * columns, dense, routed, min(rows, columns) / max(rows, columns))
        for (rows, columns), (dense, routed) in sizes.items()
    )


def _matrix_s(parameter: Parameter, speeds: Speeds, width: int) -> float:
    """Return the seconds of one matrix, in a batch of as many of its size as a round holds."""
    assert parameter.matrices is not None
    number, rows, columns = parameter.matrices
    small, large = sorted((rows, columns))
    batch = min(number, max(1, ROUND_ELEMENTS // (rows * columns)))
    shapes = (small, large, small), (small, small, small), (small, small, large)
    return ITERATIONS * sum(speeds.seconds(Product(*size, batch, width)) for size in shapes) / batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCosts:
    """Cost of Muon for one model, recipe and cluster."""

    shape: ModelShape
    width: int
    """Bytes per element sent."""
    layers: LayerMatrices
    speeds: Speeds
    links: Links

    def moved(self, layout: Layout, dense: int, routed: int) -> Moved:
        """Return the moved elements of a rank with these layers."""
        cuts = Layout(
            dp_replicate=layout.dp_replicate, dp_shard=layout.dp_shard, cp=layout.cp, tp=layout.tp, ep=layout.ep,
            zero=layout.zero,
        )  # fmt: skip
        total = Moved()
        for kind, times in ((False, dense), (True, routed)):
            if times:
                total = total.plus(moved(self.shape, cuts, kind), times)
        return total

    def seconds(self, layout: Layout, dense: int, routed: int) -> float:
        """Return the seconds of a rank of a stage with these layers.

        Its share of the products, or one whole matrix, and the traffic with the memory passes around it.
        """
        return self._products_s(layout, dense, routed) + self.exchange_s(layout, self.moved(layout, dense, routed))

    def least_s(self, layout: Layout, dense: int, routed: int) -> float:
        """Return a lower bound for a rank that holds at least these layers.

        With layers of two kinds it is the products alone, because rounds hold more where matrices have more holders.
        """
        mixed = 0 < self.shape.routed_layers < self.shape.layers
        return self._products_s(layout, dense, routed) if mixed else self.seconds(layout, dense, routed)

    def _products_s(self, layout: Layout, dense: int, routed: int) -> float:
        ranks, layers = layout.dp * layout.cp * layout.tp, self.layers
        return max((dense * layers.dense_s + routed * layers.routed_s) / ranks, layers.longest_s)

    def exchange_s(self, layout: Layout, moved: Moved) -> float:
        """Return the seconds of traffic both ways, in as many calls as there are rounds.

        Copies on both ends are included: pieces, whole matrices and pieces again.
        """
        ranks, w, sent_s = layout.dp * layout.cp * layout.tp, self.width, 0.0
        times = max(1.0, moved.owned / self._whole(moved)) if moved.owned else 0.0
        for size in (moved.gathered, moved.scattered):
            if ranks > 1 and times:
                # Links takes the whole tensor, of which a rank sends all but its own part.
                each = size / times * w * ranks / (ranks - 1)
                sent_s += times * self.links.seconds("all-to-all", each, ranks)
        copied = 4 * w * moved.owned + moved.updated * (DIRECTION_BYTES + 3 * w)
        return sent_s + self.speeds.update_seconds(copied)

    def _whole(self, moved: Moved) -> int:
        """Return the most elements of matrices on a rank in a round."""
        return round_elements(self.layers.largest, round(moved.copies))

    def buffer_bytes(self, layout: Layout, dense: int, routed: int) -> float:
        """Return the most bytes of a round.

        Its matrices, and those of one size in the next iteration with two products of each with itself. Or what is sent
        to the holders and received from the owners.
        """
        moved, layers = self.moved(layout, dense, routed), self.layers
        if not moved.owned:
            return 0.0
        ranks = layout.dp * layout.cp * layout.tp
        whole = min(self._whole(moved), max(layers.largest, moved.owned))
        inside = max(
            min(whole, max(size.numel, (dense * size.dense + routed * size.routed) / ranks)) * (1 + 2 * size.share)
            for size in layers.sizes
        )
        most = max(whole + inside, whole * 2 * moved.updated / moved.owned)
        return max(most * self.width, min(UPDATED_AT_ONCE_BYTES, 16.0 * min(layers.widest, moved.updated)))


def matrix_traffic(shape: ModelShape, layout: Layout, rank: int, precision: str) -> Iterator[tuple[str, str, int, int]]:
    """Yield (axis, collective, calls, bytes) of what a rank sends in a step, matrix by matrix."""
    here = stage_ranks(layout, rank).index(rank)
    for exchange_round in rounds(shape, layout, rank):
        for runs, parts in (
            (exchange_round.gathers, exchange_round.sent),
            (exchange_round.scatters, exchange_round.scattered),
        ):
            if runs:
                sent = sum(part.numel for part in parts if part.peer != here)
                yield "stage", "all_to_all", 1, sent * WORK_BYTES[precision]
