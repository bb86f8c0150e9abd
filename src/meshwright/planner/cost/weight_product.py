"""Products of activations with weight matrices, their gradients, and the memory passes around them."""

from meshwright.planner.cost import adapters
from meshwright.planner.cost.local_shape import LocalShape
from meshwright.planner.cost.recorded import with_fields
from meshwright.planner.cost.work import LayerOperation, MemoryPass, Work
from meshwright.planner.kernels.kernel_operations import Product


def cast(local: LocalShape, elements: float) -> tuple[Work, ...]:
    """Return the pass that narrows an operand and transposes it, since both later products read it along other rows."""
    width = local.product_width
    return (MemoryPass((local.width + 2 * width) * elements),) if width < local.width else ()


def rounded(local: LocalShape, *elements: float) -> tuple[Work, ...]:
    """Return the passes that round operands of these `elements` to 8 bits (kernels.fp8.narrow).

    Triton and compiled code take two passes: one reads the maxima, one reads and writes. Otherwise magnitudes, maxima,
    the scaled copy and the cast are separate passes.
    """
    if not local.fp8:
        return ()
    two_passes = local.compiled or local.stack.rounds_in_place
    moved, launches = (2 * local.width + 1, 2.0) if two_passes else (6 * local.width + 1, 4.0)
    return tuple(MemoryPass(moved * each, launches) for each in elements)


def accumulated(local: LocalShape, elements: float) -> tuple[Work, ...]:
    """Return the pass that adds new gradients to those of earlier micro-batches."""
    return (MemoryPass(elements * (local.width + 2 * local.stack.gradient_bytes)),) if local.stack.accumulates else ()


def linear(local: LocalShape, name: str, tokens: float, into: float, out: float, bias: bool = False) -> LayerOperation:
    """Return (tokens, into) x (into, out) as an operation with its gradients, rounding, adapters and accumulation."""
    width, low = local.product_width, 1.0 if local.fp8 else local.product_width
    least = 1.0 if local.fp8_all else width
    # a bias is a kernel of its own only in eager code; its gradient is a sum over rows everywhere
    moved = tokens * out * local.width
    apart = (MemoryPass(2 * moved),) if bias and local.stack.passes > 1 else ()
    summed = (MemoryPass(moved),) if bias else ()
    adapts = local.shape.lora is not None
    thin = adapters.thin(local, name, tokens, into, out) if adapts else adapters.NONE
    restored = adapters.restored(local, name, into, out) if adapts else ()
    # with fp8-all a separate, uncompiled operator rounds in the backward pass (kernels.linear)
    back = with_fields(local, compiled=False) if local.fp8_all else local
    turned = rounded(back, tokens * into, tokens * out) if local.fp8_all else ()
    learned = (*turned, Product(into, tokens, out, 1.0, least), *summed, *accumulated(local, into * out))
    return LayerOperation(
        name=name,
        forward=(*cast(local, tokens * into), *rounded(local, tokens * into, into * out), *restored,
                 Product(tokens, into, out, 1.0, low), *apart, *thin.forward),
        inputs=(*cast(local, tokens * out), *rounded(back, tokens * out, into * out), *restored,
                Product(tokens, out, into, 1.0, low), *thin.inputs),
        weights=thin.weights if local.shape.lora else learned,
    )  # fmt: skip


TILE, STEP = 128, 64
"""Rows of a tile of the grouped kernel, and of its steps over an inner dim.

Experts have any number of rows, so on average each wastes half a tile and half a step.
"""


def grouped(local: LocalShape, name: str, copies: float, into: float, out: float) -> LayerOperation:
    """Return the grouped products of all experts, one per piece.

    Weight gradients of the pieces are joined. Rounding of operands is not compiled (kernels.experts). Other software
    multiplies at the width of its recipe. Fused experts round the tensors between their products inside them.
    """
    assert local.shape.moe is not None
    experts, pieces = local.shape.moe.experts / local.ep, local.ep_pieces
    rows_each = copies / experts
    grouped = local.stack.is_meshwright and local.gpu
    # tiles of grouped kernels do not span experts: on average the last of each is half empty
    rows, inner = (rows_each + TILE / 2, rows_each + STEP / 2) if grouped else (rows_each, rows_each)
    put = (MemoryPass(2 * experts * into * out * local.width, pieces),) if pieces > 1 else ()
    thin = adapters.thin(local, name, rows_each, into, out, experts / pieces)
    restored = adapters.restored(local, name, into, out, experts)
    matrices = experts * into * out
    width = 1.0 if local.fp8_all else 2.0 if local.stack.is_meshwright else min(2.0, local.product_width)
    # fused experts cast nothing between their products: only the first input and the last gradient
    enters, returns = (
        () if local.stack.fused_experts and name.endswith(inside) else cast(local, copies * size)
        for inside, size in (("down", into), ("up", out))
    )
    forward, inputs, turned = (
        rounded(with_fields(local, compiled=False), *elements) if local.fp8_all else ()
        for elements in ((copies * into, matrices), (copies * out, matrices), (copies * into, copies * out))
    )
    learned = turned + (Product(into, inner, out, experts / pieces, width, grouped=grouped),) * pieces + put
    product = Product(rows, into, out, experts / pieces, width, grouped=grouped)
    product_of_gradient = product._replace(k=out, n=into)
    return LayerOperation(
        name=name,
        forward=(*enters, *forward, *restored, *(product,) * pieces, *thin.forward * pieces),
        inputs=(*returns, *inputs, *restored, *(product_of_gradient,) * pieces, *thin.inputs * pieces),
        weights=thin.weights * pieces if local.shape.lora else learned,
    )
